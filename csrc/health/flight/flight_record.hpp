// The flight record: the last N operations of this process, and how far each of them got.
//
// All groups share one ring, because the question after a hang is in which order this rank called what. Every
// collective writes to it, so an entry costs one fetch_add, one clock reading and a copy of the sizes in use: no
// allocation, no system call, no lock shared between entries. JSON: schema in flight_record_json.cpp. Reader:
// ark_torch/tools/flight.py.
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

// Shapes of an operation's first few tensors. Dimensions beyond the fourth are folded into it (the element count stays
// right), tensors beyond the fourth are only counted; `truncated` tells if either happened.
class FlightSizes {
 public:
  static constexpr int kTensors = 4;
  static constexpr int kDims = 4;

  FlightSizes() = default;
  FlightSizes(const FlightSizes& other) { *this = other; }
  FlightSizes& operator=(const FlightSizes& other);  // copies only what is in use

  void add(const int64_t* dims, size_t count);  // one tensor
  void add(int64_t elements) { add(&elements, 1); }

  int stored() const { return stored_; }     // tensors whose sizes are kept
  uint32_t total() const { return total_; }  // all tensors of the operation
  bool truncated() const { return truncated_; }
  int dims(int tensor) const { return dims_[tensor]; }
  int64_t size(int tensor, int dim) const { return sizes_[tensor][dim]; }

 private:
  uint8_t stored_ = 0;
  bool truncated_ = false;
  std::array<uint8_t, kTensors> dims_{};
  uint32_t total_ = 0;
  int64_t sizes_[kTensors][kDims];  // not initialised beyond dims_, because clearing 128 bytes per call would be wasted
};

// One operation. The caller fills the first part; the record sets id, state and times.
struct FlightEntry {
  uint32_t group = 0;  // from register_group
  int32_t root = -1;   // rank in the group; -1: the operation has none
  int32_t peer = -1;   // send: destination, recv: source (rank in the group); -1: none or any source
  int32_t tag = 0;
  bool is_p2p = false;
  int8_t dtype = -1;                           // ark::DType; -1: none (barrier)
  int8_t output_dtype = -1;                    // -1: as dtype
  int8_t reduce_op = -1;                       // ark::ReduceOp; -1: none
  FlightState state = FlightState::scheduled;  // `started` for a call that runs at once saves a clock reading
  uint64_t sequence = 0;       // of collectives in the group, from 1; a p2p operation has the last collective's
  uint64_t p2p_sequence = 0;   // of messages with this peer and tag, from 1; 0: unknown
  const char* operation = "";  // static string: "all_reduce"
  uint64_t input_bytes = 0;
  uint64_t input_elements = 0;
  uint64_t output_elements = 0;
  int64_t timeout_ms = 0;  // 0: none
  FlightSizes inputs;
  FlightSizes outputs;

  uint64_t id = 0;
  int64_t created_ns = 0;  // steady clock
  int64_t started_ns = 0;  // 0: not yet, or unknown (device without timing)
  int64_t ended_ns = 0;    // completed or failed
};

// A rank's progress, read from shared memory by the rank that writes the dump.
struct FlightPeer {
  int rank = -1;               // in the group
  uint64_t last_enqueued = 0;  // sequence numbers of collectives
  uint64_t last_completed = 0;
  int waiting_on = -1;  // rank it waits for; -1: none or unknown
  bool lost = false;    // its process ended
  uint64_t last_started = 0;
  std::string operation;  // current operation; empty: none or unknown
};

// Why a dump is written. The record keeps it, so a later dump also shows the first cause.
struct FlightFailure {
  uint64_t key = 0;  // equal for all threads that see one failure, so it is dumped once. 0: no such check
  uint32_t group = 0;
  bool has_group = false;
  std::string error;
  int peer = -1;  // rank to blame; -1: unknown
  std::string operation;
  uint64_t sequence = 0;
  std::vector<FlightPeer> peers;
  std::string frame;  // hook: Python frame of the caller, filled with ARK_DEBUG=1; empty otherwise
};

// Invariants:
// - Ids start at 1, only grow and are never reused. Id 0 means "not recorded", and every call accepts it.
// - Slot `id & (capacity - 1)` holds the newest entry that maps there: an older one never overwrites a newer one.
// - Each slot has its own one-word lock: lock() is an acquire exchange and unlock() a release store, so a holder sees
//   everything that the previous holder wrote. A lock is held for a copy of less than 1 KB. The spin is bounded: past
//   the bound a writer drops its update (counted in `dropped`) and a reader skips the slot. So a thread that a debugger
//   stops cannot hang a collective or a dump.
// - Progress (last sequence scheduled, started, completed) is kept per group outside the ring, in atomics that only
//   grow, so it survives wrap-around.
// - Times are steady-clock nanoseconds. Output adds one offset, taken then, to get wall time.
class FlightRecord {
 public:
  static constexpr size_t kDefaultCapacity = 2048;
  static constexpr size_t kErrorBytes = 160;

  // The process's record. Never destroyed, because threads may still write during process exit.
  static FlightRecord& instance();

  explicit FlightRecord(size_t capacity = kDefaultCapacity);
  ~FlightRecord();
  FlightRecord(const FlightRecord&) = delete;
  FlightRecord& operator=(const FlightRecord&) = delete;

  // Sets the capacity in entries, rounded up to a power of two; 0 turns recording off. A new capacity drops all
  // entries. Safe with concurrent writers, but the old ring is kept until the end, so call it only at set-up.
  void resize(size_t capacity);
  size_t capacity() const;
  bool enabled() const { return ring_.load(std::memory_order_acquire) != nullptr; }

  // Interns a group's names, once per group and off the hot path. `rank` and `size` are the group's, `global_ranks` its
  // members in rank order (empty: 0..size-1). Returns the id for entries, from 1 (0: no group). The largest group also
  // sets this process's global rank.
  uint32_t register_group(std::string_view name, std::string_view description, int rank, int size,
                          const std::vector<int>& global_ranks);
  // PyTorch names a group only after creating its backend.
  void describe_group(uint32_t group, std::string_view name, std::string_view description);
  // The group is gone. Its entries stay until overwritten; then its id may be reused.
  void retire_group(uint32_t group);

  // Hot path. scheduled() returns the entry's id. All ignore id 0 and ids that were overwritten.
  uint64_t scheduled(const FlightEntry& entry);
  void started(uint64_t id);
  void completed(uint64_t id);
  // Device times on the steady clock. 0: not measured; then the end is when it was noticed.
  void started_on_device(uint64_t id, int64_t started_ns);
  void completed_on_device(uint64_t id, int64_t started_ns, int64_t ended_ns);
  void failed(uint64_t id, std::string_view error);  // truncates the text to kErrorBytes - 1

  uint64_t last_id() const { return next_id_.load(std::memory_order_relaxed) - 1; }
  uint64_t dropped() const { return dropped_.load(std::memory_order_relaxed); }
  // Copies the entries, oldest first (for tests and to_json). `errors`, if given, receives one text per entry.
  std::vector<FlightEntry> snapshot(std::vector<std::string>* errors = nullptr) const;

  // This process's place in the job, shown in the output; -1: unknown. Usually register_group sets it.
  void set_global_rank(int rank, int world_size);

  std::string to_json() const;
  // Keeps the cause of a failure for later output. Only the first few are kept, and one per key.
  void note(const FlightFailure& failure) noexcept;
  // Notes the failure and writes to_json() to `path` through a temporary file (mode 0600) and a rename, so a reader
  // sees all or nothing. Any thread; never throws. Skips a key that another thread has dumped or is dumping. Returns
  // false if the file could not be written.
  bool dump(const std::string& path, const FlightFailure& failure) noexcept;
  bool dump(const std::string& path) const noexcept;  // on demand, without a failure

 private:
  struct Slot;
  struct Ring;
  struct Group;
  // Group i is in chunk bit_width(i + kFirstChunk) ..: addresses never move, so the hot path takes no lock.
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

  mutable std::mutex mutex_;  // guards everything below; never taken on the hot path
  std::vector<std::unique_ptr<Ring>> rings_;
  std::array<std::atomic<Group*>, kChunks> chunks_{};
  uint32_t groups_ = 1;                                      // ids given out so far; 0 is not used
  std::vector<std::pair<int64_t, FlightFailure>> failures_;  // time, cause; the first kFailures
  std::vector<uint64_t> dumped_keys_;
};

// "<prefix><global rank>.json", the names that ARK_FLIGHT_DUMP produces.
std::string flight_dump_path(const std::string& prefix, int global_rank);

}  // namespace ark
