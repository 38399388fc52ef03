// Collectives of many bytes by copy engines: while they move bytes no SM is taken from whatever computes beside them.
// Alike on all ranks: which of these functions is called, for how many bytes.
//
// Nearly everything is pushed: when two ranks read from each other at once each gets half of what the link carries
// (H200). What is to be added goes into slots of its owner, and so does what a receiver's own tensor is to get, unless
// that is registered: then straight to its place. The way from a slot to the tensor is a copy within the GPU, which the
// driver makes by SMs whatever one asks it for. Therefore sums of up to pull_below bytes are pulled from the owner's
// slots after all: alone that is slower, beside computation sooner (25 MB: products and all_reduces together 27%; a
// step of GPT-2 XL with buckets of 50 MB: 66.6 ms, pushed 68.1). All copies over the link are on one stream, one peer
// at a time, beginning with the next rank: two copies at once, with two peers, or of two ranks with one, halve an
// engine's speed. In calls of many copies what they wait for is awaited on a stream of its own, and what follows them
// is told on a third one: in line with the copies each of these costs up to 15 us in which the link is idle, like this
// they take place beside the copy before (2 H200: 1 GB 3.0 ms instead of 3.2, 256 MB 0.80 instead of 0.85). The first
// and the last copy then take 10 us longer, and beside computation more waiting streams cost more: on their own streams
// in all calls, a step of GPT-2 XL with buckets of 50 MB took 73.7 ms instead of 66.7.
//
// All these streams cost the thread that issues a call, and where that thread is the limit, as in a step of DDP without
// graphs, the whole step. So eager all_reduces of up to in_line_to bytes are in line (copy_engine_call.hpp): on the
// caller's stream alone, in which the link waits while pieces are added up.
//
// From three ranks on ranks drift apart until two of them do use one link. So the right to it goes round: a word "turn"
// for each link, which starts at the rank before the link's own and is passed on behind each rank's copy (or where it
// has nothing to copy) to the rank before, and has come back when all have had it. It is passed while the last
// tail_bytes are still on their way, which is the time that passing takes. That is done where all ranks go through the
// same rounds: all but broadcasts, in which each link has one user, and messages of which only two ranks know.
//
// Beside computation each kernel waits until SMs are free, which may take as long as a whole kernel of the others. So
// there are kWorkers streams for what SMs do, that several pieces wait side by side. Not more: streams share the few
// queues of a device, and one that waits for a word holds up those behind it in its queue.
//
// Slots are used in turn, from the first one on in every call, so that a graph's constants fit whatever ran before; a
// slot belongs to one worker. Words (stream_words.hpp) go to whoever waits: "arrived" behind a part to be added, "came"
// behind a piece of a message, "free" and "taken" back from whoever has read the slot; those two are 1 at first, and
// awaited before the slot is written again. They lie in host memory that all ranks map. No cycle: what a rank does in
// step j depends on what all ranks do in earlier steps, or in this one before it (a turn: on the copy before this one).
// That holds for the order in which a rank submits operations, whatever stream they are for: all streams may share one
// hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1), and a wait then holds up all that was submitted after it.
//
// Registered outputs: copies are enqueued before anybody could ask the receiver for its address. So the contract is
// NCCL's: all ranks pass the same place of the same window. It is checked on the device: a receiver tells its senders
// a mark that stands for window, place, bytes and operation, and a sender writes only behind a wait for its own mark,
// which also shows that the receiver's stream has come to this call. Ranks that disagree wait, write nothing, and
// diagnose() finds out why. Marks are exchanged as soon as a group has registered anything, for plain tensors too: the
// other rank's may be registered. One is told again only after all of a call arrived, which was sent after it was seen.
//
// Waits have no bound of their own. Status words say that a collective is under way and how far it is; the watching
// thread (health/device_watch.hpp) fails the group when nothing moved for the timeout, and then calls release_all() in
// every look: results are garbage then, and every later call raises. Once is not enough: a stream that is let go puts 0
// back, comes to its next wait, and calls may stand behind this one. That thread makes no call of the driver: while
// some thread is in cuMemcpyDtoH to pageable memory, which waits for these very streams, the driver holds a lock of the
// context that most calls need (seen on an H200), and a release that needs it never comes.
//
// Ordering. A teller's copy goes over the link into memory of the waiter's GPU, its word then into host memory: another
// path. Behind the copy in its stream the driver puts a fence like __threadfence_system() before the write of the word
// (the default flag of cuStreamWriteValue32; what would take it away is not used): the copy is visible to the waiter's
// GPU before the word is visible to anybody. The waiter's stream starts what follows its wait when it has seen the
// word. CU_STREAM_WAIT_VALUE_FLUSH, which selected platforms offer, is for remote writes that have reached the device
// but may not be visible there yet: behind such a fence they are. The other way, "free" and "taken", nothing but the
// order of a stream is needed: reads have ended before the word is written. The operations are documented for memory
// registered with cuMemHostRegister. That one page works so in several processes is not: NCCL's shared-memory transport
// registers such mappings in every process, for kernels and copies; here it is assumed of stream memory operations too.
// The host's loads and stores race with the streams' by intent: words are 32 bits, aligned, and whole; a 1 that it
// stores before a stream's 0 is lost and stored again.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "collectives/cuda/copy_engine/stream_words.hpp"
#include "cuda/add.cuh"
#include "health/device_watch.hpp"

namespace ark {

class CopyEngine {
 public:
  // Symmetric memory to give it, of at most `limit` bytes (ARK_BUFFER_MB): with less, smaller pieces; 0: too little.
  static uint64_t memory_bytes(int ranks, uint64_t limit);

  // The words' host memory, each rank's: as this rank's device sees it, and as its host does.
  struct Words {
    std::vector<CUdeviceptr> of;
    std::vector<uint32_t*> host;
  };
  static size_t words_bytes(int ranks);
  static void prepare(uint32_t* own, int rank, int ranks);  // zeroed words, before a peer sees them

  // memory[r]: rank r's, as mapped here; `bytes` of each. `status`: as the device sees it, and as the host does.
  // `held`: kept as long as the engine; graphs hold addresses of words.
  CopyEngine(int rank, int device, std::vector<char*> memory, uint64_t bytes, Words words, device::EngineStatus* status,
             device::EngineStatus* host_status, std::shared_ptr<void> held = nullptr);
  ~CopyEngine();
  CopyEngine(const CopyEngine&) = delete;

  struct Message {
    const void* data;
    uint64_t bytes;
  };
  struct Place {
    void* data;
    uint64_t bytes;
  };
  // On a group with registered memory: where the outputs lie. Above a mark's bits the host is told whom it is awaited
  // of.
  static constexpr int kMarkShift = 32 - device::kMaxRanks;
  static constexpr uint32_t kMarkBits = (uint32_t{1} << kMarkShift) - 1;
  struct Outputs {
    uint32_t mark = 0;      // never 0 in its kMarkBits; equal on two ranks if they passed what belongs together
    std::vector<char*> at;  // rank r's output as mapped here; empty: it is not registered
  };
  // Null: the group has registered nothing.
  using MaybeOutputs = const Outputs*;

  // parts[r]: rank r's contribution; sum and, where it is not null, handed_out: where the result goes; all of `bytes`.
  using Add =
      std::function<void(const void* const* parts, void* sum, void* handed_out, uint64_t bytes, CUstream stream)>;
  void all_reduce(const void* in, void* out, uint64_t bytes, uint64_t element_bytes, CUstream stream, const Add& add,
                  MaybeOutputs outputs);
  // ins[r]: what goes into rank r's result, of `bytes`.
  void reduce_scatter(const void* const* ins, void* out, uint64_t bytes, uint64_t element_bytes, CUstream stream,
                      const Add& add);
  // sends[r] to rank r, receives[r] from rank r; own ones too. Registered: at[r] is where this rank's message belongs
  // in rank r's output.
  // `all`: every rank of the group calls this now.
  void move(const Message* sends, const Place* receives, bool all, CUstream stream, MaybeOutputs outputs);
  void broadcast(void* data, uint64_t bytes, int root, CUstream stream, MaybeOutputs outputs);  // from rank to rank

  uint64_t pull_below = 128 << 20;  // all_reduces up to here, not registered; tests choose others

  uint64_t in_line_to = 0;  // eager all_reduces up to here that use no slot twice

  uint64_t tail_bytes = 4 << 20;  // what is still on its way when a turn is passed
  uint64_t apart_from = 8;        // copies of a call whose waits and words are on streams of their own

  // By the watching thread, without a call of the driver. The group has failed: lets the waits end that it finds, for a
  // few milliseconds or until there are none; to be called again and again.
  void release_all();
  // While a collective does not move. Nobody: it cannot be told, or it moves.
  EngineDiagnosis diagnose() const;

 private:
  // 0, 0, 1, 1 at first; of turns 1 at the rank before the receiver, which stands for the teller; marks.
  enum Word { arrived, came, free_slot, taken, turn, entered, kWords };
  enum Bank { parts, messages, sums };
  static constexpr int kSlots = 4, kWorkers = 2;  // slots of a bank at most
  static_assert(kSlots % kWorkers == 0);
  class Call;

  // From three ranks on each copy waits for its turn: few large ones.
  static int slots_of(int ranks) { return ranks <= 2 ? kSlots : 2; }
  static uint64_t slot_count(int ranks);
  CUdeviceptr word(int waiter, Word which, int teller, uint64_t piece) const;
  static size_t place_of(Word which, int teller, uint64_t slot, int ranks) {
    return (static_cast<size_t>(which) * ranks + teller) * kSlots + slot;
  }
  char* slot(int owner, Bank bank, int writer, uint64_t piece) const;
  CUdeviceptr told(uint32_t device::EngineStatus::*word) const {  // to the host
    return reinterpret_cast<CUdeviceptr>(&(status_->*word));
  }
  void copy(CUstream stream, void* to, const void* from, uint64_t bytes);
  void follow(CUstream stream, CUstream before);  // stream waits for all that `before` has been given
  uint64_t piece_of(uint64_t bytes, uint64_t unit, uint64_t wanted, bool slots) const;
  int before(int rank) const { return (rank + size_ - 1) % size_; }
  int unused_turn() const;  // of the rank that did not use it, or -1
  uint32_t others() const { return ((uint32_t{1} << size_) - 1) & ~(uint32_t{1} << rank_); }

  const int rank_, size_, device_, slots_;
  const uint64_t slot_bytes_;
  const std::vector<char*> memory_;
  const Words words_;
  const std::shared_ptr<void> held_;
  device::EngineStatus* const status_;
  device::EngineStatus* const host_status_;
  CUstream link_ = nullptr, awaiting_ = nullptr, telling_ = nullptr, work_[kWorkers] = {};
  CUevent event_ = nullptr;
  CUevent done_[kSlots] = {};  // a piece's sum, until it is handed out
  CUevent idle_ = nullptr;     // where the end of the last call was told to the host, if that was beside its stream
  bool told_idle_ = false;
  uint32_t calls_ = 0;
};

}  // namespace ark
