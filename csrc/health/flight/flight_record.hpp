// The flight record: what the last N operations of this process were, and how far each of them got.
//
// One ring for the whole process (all groups share it), because the question after a hang is "in which order did this
// rank call what". Written on the hot path of every collective, so an entry costs one fetch_add, one clock reading and
// a copy of the sizes in use: no allocation, no system call, no lock shared by two entries.
//
// Invariants
// - Ids start at 1, only grow, and are never reused; id 0 means "not recorded" and every call accepts it.
// - Slot `id & (capacity - 1)` holds the newest entry that maps there: an older one never overwrites a newer one.
// - Each slot has its own one-word lock. lock() is an acquire exchange and unlock() a release store, so whoever holds
//   it sees all that the last holder wrote; entries are plain memory between the two. A lock is held for a copy of
//   less than 1 KB; the spin on it is bounded, and past the bound a writer drops its update (counted in `dropped`) and
//   a reader skips the slot: a thread stopped by a debugger in mid-copy cannot hang a collective or a dump.
// - Progress (last sequence scheduled, started, completed) is kept per group beside the ring in atomics that only grow,
//   so it survives wrap-around.
// - Times are steady-clock nanoseconds; wall time is added on output from one offset taken then.
//
// JSON: schema in flight_record_json.cpp. Reading side: ark_torch/tools/flight.py.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace ark {

enum class FlightState : uint8_t { scheduled = 0, started = 1, completed = 2, failed = 3 };

// Shapes of the first few tensors of an operation. Dimensions beyond the fourth are folded into it (the number of
// elements stays right), tensors beyond the fourth are only counted; `truncated` says that either happened.
class FlightSizes {
 public:
  static constexpr int kTensors = 4;
  static constexpr int kDims = 4;

  FlightSizes() = default;
  FlightSizes(const FlightSizes& other) { *this = other; }
  FlightSizes& operator=(const FlightSizes& other);  // copies what is in use only

  void add(const int64_t* dims, size_t count);  // one tensor
  void add(int64_t elements) { add(&elements, 1); }

  int stored() const { return stored_; }     // tensors whose sizes are kept
  uint32_t total() const { return total_; }  // tensors the operation had
  bool truncated() const { return truncated_; }
  int dims(int tensor) const { return dims_[tensor]; }
  int64_t size(int tensor, int dim) const { return sizes_[tensor][dim]; }

 private:
  uint8_t stored_ = 0;
  bool truncated_ = false;
  std::array<uint8_t, kTensors> dims_{};
  uint32_t total_ = 0;
  int64_t sizes_[kTensors][kDims];  // left unset beyond dims_: clearing 128 bytes a call would be for nothing
};

// One operation. The caller fills the first part; id, state and times are the record's.
struct FlightEntry {
  uint32_t group = 0;  // from register_group
  int32_t root = -1;   // rank in the group; -1: the operation has none
  int32_t peer = -1;   // send: destination, recv: source (rank in the group); -1: none or any source
  int32_t tag = 0;
  bool is_p2p = false;
  int8_t dtype = -1;                           // ark::DType; -1: none (barrier)
  int8_t output_dtype = -1;                    // -1: as dtype
  int8_t reduce_op = -1;                       // ark::ReduceOp; -1: none
  FlightState state = FlightState::scheduled;  // pass `started` for a call that runs at once: saves a clock reading
  uint64_t sequence = 0;       // of collectives in the group, from 1; a p2p operation carries the last collective's
  uint64_t p2p_sequence = 0;   // of sends to (or receives from) this peer with this tag, from 1; 0: unknown
  const char* operation = "";  // static string: "all_reduce"
  uint64_t input_bytes = 0;
  uint64_t input_elements = 0;
  uint64_t output_elements = 0;
  int64_t timeout_ms = 0;  // 0: none
  FlightSizes inputs;
  FlightSizes outputs;

  uint64_t id = 0;
  int64_t created_ns = 0;  // steady clock
  int64_t started_ns = 0;  // 0: not yet, or (on a device whose times are not taken) not known
  int64_t ended_ns = 0;    // completed or failed
};

// How far a rank got, as read from shared memory by the rank that writes the dump.
struct FlightPeer {
  int rank = -1;               // in the group
  uint64_t last_enqueued = 0;  // sequence numbers of collectives
  uint64_t last_completed = 0;
  int waiting_on = -1;  // rank it waits for; -1: none or unknown
  bool lost = false;    // its process ended
  uint64_t last_started = 0;
  std::string operation;  // what it is in; empty: nothing or unknown
};

// Why a dump is written. Kept by the record, so that a later dump also shows the earlier (first) cause.
struct FlightFailure {
  uint64_t key = 0;  // one failure seen by several threads: one key, one dump. 0: no such check
  uint32_t group = 0;
  bool has_group = false;
  std::string error;
  int peer = -1;  // rank to blame; -1: unknown
  std::string operation;
  uint64_t sequence = 0;
  std::vector<FlightPeer> peers;
  std::string frame;  // hook: Python frame of the caller, filled with ARK_DEBUG=1; empty otherwise
};

class FlightRecord {
 public:
  static constexpr size_t kDefaultCapacity = 2048;
  static constexpr size_t kErrorBytes = 160;

  // The process's record. Never destroyed: threads may still write while the process exits.
  static FlightRecord& instance();

  explicit FlightRecord(size_t capacity = kDefaultCapacity);
  ~FlightRecord();
  FlightRecord(const FlightRecord&) = delete;
  FlightRecord& operator=(const FlightRecord&) = delete;

  // Capacity in entries, rounded up to a power of two; 0 turns recording off. Entries so far are dropped, unless the
  // capacity stays the same. Safe beside writers; the old ring is kept until the end, so call it at set-up only.
  void resize(size_t capacity);
  size_t capacity() const;
  bool enabled() const { return ring_.load(std::memory_order_acquire) != nullptr; }

  // Interns a group's names; once per group, not on the hot path. `rank` and `size` are the group's, `global_ranks`
  // its members in rank order (empty: 0..size-1). Returns the id that entries carry, from 1 (0: no group). The
  // largest group also tells who this process is.
  uint32_t register_group(std::string_view name, std::string_view description, int rank, int size,
                          const std::vector<int>& global_ranks);
  // PyTorch names a group only after its backend was made.
  void describe_group(uint32_t group, std::string_view name, std::string_view description);
  // The group is gone: its entries stay until overwritten, then its id may be given out again.
  void retire_group(uint32_t group);

  // Hot path. scheduled() returns the entry's id. All ignore an id of 0 or one already overwritten.
  uint64_t scheduled(const FlightEntry& entry);
  void started(uint64_t id);
  void completed(uint64_t id);
  // What a device did, by its own time (steady clock). 0: not taken; the end is then when it was noticed.
  void started_on_device(uint64_t id, int64_t started_ns);
  void completed_on_device(uint64_t id, int64_t started_ns, int64_t ended_ns);
  void failed(uint64_t id, std::string_view error);  // text cut at kErrorBytes - 1

  uint64_t last_id() const { return next_id_.load(std::memory_order_relaxed) - 1; }
  uint64_t dropped() const { return dropped_.load(std::memory_order_relaxed); }
  // Copies the entries, oldest first (tests, to_json). `errors`, when given, receives one text an entry.
  std::vector<FlightEntry> snapshot(std::vector<std::string>* errors = nullptr) const;

  // Who this process is in the job; shown in the output. -1: unknown. register_group sees to it as a rule.
  void set_global_rank(int rank, int world_size);

  std::string to_json() const;
  // Keeps the cause of a failure for later output; what comes after the first few, or twice (by key), is let go.
  void note(const FlightFailure& failure) noexcept;
  // Notes the failure and writes to_json() to `path`: temporary file beside it, mode 0600, then rename, so a reader
  // sees a whole file or none. Any thread; never throws. A key that another thread has dumped, or is dumping, is not
  // written again. False: the file could not be written.
  bool dump(const std::string& path, const FlightFailure& failure) noexcept;
  bool dump(const std::string& path) const noexcept;  // on demand, without a failure

 private:
  struct Slot;
  struct Ring;
  struct Group;
  // Group i lives in chunk bit_width(i + kFirstChunk) ..: addresses never move, so the hot path takes no lock.
  static constexpr uint32_t kFirstChunk = 64;
  static constexpr int kChunks = 20;

  Group* group(uint32_t id) const;
  template <typename Change>
  void update(uint64_t id, Change change);
  bool write_file(const std::string& path) const;

  std::atomic<Ring*> ring_{nullptr};
  std::atomic<uint64_t> next_id_{1};
  std::atomic<uint64_t> dropped_{0};
  std::atomic<int> global_rank_{-1};
  std::atomic<int> world_size_{-1};

  mutable std::mutex mutex_;  // everything below; never taken on the hot path
  std::vector<std::unique_ptr<Ring>> rings_;
  std::array<std::atomic<Group*>, kChunks> chunks_{};
  uint32_t groups_ = 1;                                      // ids given out so far; 0 is nobody's
  std::vector<std::pair<int64_t, FlightFailure>> failures_;  // time, cause; the first kFailures
  std::vector<uint64_t> dumped_keys_;
};

// "<prefix><global rank>.json", as ARK_FLIGHT_DUMP names files.
std::string flight_dump_path(const std::string& prefix, int global_rank);

}  // namespace ark
