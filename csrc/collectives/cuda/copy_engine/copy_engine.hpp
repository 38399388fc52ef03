// Large collectives by copy engines, which take no SM from computation while they move bytes. All ranks must call the
// same function for the same number of bytes.
//
// Nearly all data is pushed, because two ranks that read from each other at once get half of the link's bandwidth each.
// Parts to be added go into slots of their owner. So do messages, unless the receiver's tensor is registered: then they
// go straight to their place.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "collectives/cuda/copy_engine/stream_words.hpp"
#include "cuda/add.cuh"
#include "health/device_watch.hpp"

namespace ark {

// Pushed and pulled sums. Copying from a slot to the tensor is a copy within the GPU, which the driver always runs on
// SMs. So ranks pull sums of all_reduces below pull_below from the owner's slots instead: slower alone, faster
// alongside computation.
//
// Streams. All copies over the link are on one stream, to one peer at a time, starting with the next rank: two
// concurrent copies halve an engine's speed. In calls with many copies, waits and signals have streams of their own,
// since in line each would leave the link idle for some microseconds. With few copies the extra streams cost more than
// they save. These streams also cost the issuing thread time, which limits an eager DDP step. So eager all_reduces of
// up to in_line_to bytes run on the caller's stream alone (copy_engine_call.hpp). Alongside computation each kernel
// waits for free SMs. So kWorkers streams run kernels, and several pieces wait in parallel; more streams would block
// each other in the device's few hardware queues.
//
// Turns. With three or more ranks, ranks drift until two use the same link. So each link has a word "turn", which
// starts at the rank before the link's own rank. Each rank passes it to the rank before it after its copy, or at once
// if it has nothing to copy. It is passed while the last tail_bytes are in flight, which hides the time of passing.
// Turns apply only where all ranks run the same rounds: not in broadcasts, where each link has one user, and not for
// messages that only two ranks know about.
//
// Slots and words. Every call uses the slots in turn from the first one, so that a graph's constants fit whatever ran
// before; a slot belongs to one worker. Words (stream_words.hpp) are set at the rank that waits: "arrived" after a part
// to be added, "came" after a piece of a message, "free" and "taken" by the reader of a slot. The last two start at 1
// and are awaited before the slot is rewritten. No cycle of waits exists: a rank's step j depends only on earlier steps
// of all ranks, or on earlier work of its own in that step (for a turn: the previous copy). This holds for the order in
// which a rank submits operations to all its streams. So the streams may share one hardware queue
// (CUDA_DEVICE_MAX_CONNECTIONS=1), where a wait blocks everything submitted after it.
//
// Registered outputs. Copies are enqueued before a rank could ask for the receiver's address. So, as with NCCL, all
// ranks must pass the same place of the same window, which the device checks. A receiver sends its senders a mark (a
// hash of window, place, bytes and operation), and a sender writes only after it has seen its own mark. Ranks that
// disagree wait, write nothing, and diagnose() finds the reason. Once a group has registered memory, plain tensors
// exchange marks too, because the other rank's tensor may be registered. A mark is sent again only after all data of
// the call arrived, which was sent after the mark was seen.
//
// Failures. Waits have no time limit. Status words show that a collective runs and how far it is. If nothing moves for
// the timeout, the watching thread (health/device_watch.hpp) fails the group and then calls release_all() at every
// look, because a released stream resets its word and reaches the next wait. Results are then garbage, and later calls
// raise. The watching thread makes no driver calls: a thread in cuMemcpyDtoH to pageable memory holds a context lock
// while it waits for these very streams.
//
// Memory ordering. A copy crosses the link to the waiter's GPU, its word goes to host memory. After the copy the driver
// issues a fence like __threadfence_system() before it writes the word (cuStreamWriteValue32's default), so the copy is
// visible to the waiter's GPU before the word is. Hence CU_STREAM_WAIT_VALUE_FLUSH, for remote writes that are not yet
// visible, is not needed. For "free" and "taken" stream order suffices, because the reads have ended. The driver
// documents stream memory operations on memory registered with cuMemHostRegister. That several processes may register
// one page is assumed, as NCCL's shared-memory transport does for kernels and copies. The host's accesses race with the
// streams' by intent: words are aligned 32-bit values, and a 1 that a stream's 0 overwrites is stored again.
class CopyEngine {
 public:
  // Bytes of symmetric memory to give it, at most `limit` (ARK_BUFFER_MB). Less memory means smaller pieces; 0: too
  // little.
  static uint64_t memory_bytes(int ranks, uint64_t limit);

  // Every rank's words in host memory, as this rank's device and its host see them.
  struct Words {
    std::vector<CUdeviceptr> of;
    std::vector<uint32_t*> host;
  };
  static size_t words_bytes(int ranks);
  static void prepare(uint32_t* own, int rank, int ranks);  // for zeroed words, before peers map them

  // memory[r]: rank r's `bytes` as mapped here. `status`, `host_status`: as the device and the host see it. `held`:
  // kept as long as the engine, because graphs hold addresses of words.
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
  // The place of outputs in a group with registered memory. The bits above a mark tell the host which ranks it is
  // awaited from.
  static constexpr int kMarkShift = 32 - device::kMaxRanks;
  static constexpr uint32_t kMarkBits = (uint32_t{1} << kMarkShift) - 1;
  struct Outputs {
    uint32_t mark = 0;      // never 0 in its kMarkBits; equal on two ranks if their arguments match
    std::vector<char*> at;  // rank r's output as mapped here; empty: not registered
  };
  // Null if the group has registered nothing.
  using MaybeOutputs = const Outputs*;

  // parts[r]: rank r's contribution. The result goes to `sum` and, if not null, `handed_out`. All have `bytes` bytes.
  using Add =
      std::function<void(const void* const* parts, void* sum, void* handed_out, uint64_t bytes, CUstream stream)>;
  void all_reduce(const void* in, void* out, uint64_t bytes, uint64_t element_bytes, CUstream stream, const Add& add,
                  MaybeOutputs outputs);
  // ins[r]: this rank's contribution of `bytes` to rank r's result.
  void reduce_scatter(const void* const* ins, void* out, uint64_t bytes, uint64_t element_bytes, CUstream stream,
                      const Add& add);
  // sends[r] goes to rank r, receives[r] comes from rank r; own entries too. Registered: at[r] is the place of this
  // rank's message in rank r's output. `all`: every rank of the group makes this call now.
  void move(const Message* sends, const Place* receives, bool all, CUstream stream, MaybeOutputs outputs);
  void broadcast(void* data, uint64_t bytes, int root, CUstream stream, MaybeOutputs outputs);  // from rank to rank

  uint64_t pull_below = 128 << 20;  // all_reduces below this size pull sums, unless registered; tests change it

  uint64_t in_line_to = 0;  // eager all_reduces up to here that use no slot twice

  uint64_t tail_bytes = 4 << 20;  // bytes still in flight when a turn is passed
  uint64_t apart_from = 8;        // number of copies from which waits and signals have their own streams

  // After a failure, the watching thread calls this repeatedly. It ends the waits that it finds, for a few milliseconds
  // or until none are left. Makes no driver calls.
  void release_all();
  // Explains a collective that does not move. Names no rank if the cause is unknown or the collective moves.
  EngineDiagnosis diagnose() const;

 private:
  // Initially 0, 0, 1, 1; for turns, 1 at the rank before the receiver (indexed like a teller); then marks.
  enum Word { arrived, came, free_slot, taken, turn, entered, kWords };
  enum Bank { parts, messages, sums };
  static constexpr int kSlots = 4, kWorkers = 2;  // most slots per bank
  static_assert(kSlots % kWorkers == 0);
  class Call;

  // With three or more ranks each copy waits for its turn, so use few large ones.
  static int slots_of(int ranks) { return ranks <= 2 ? kSlots : 2; }
  static uint64_t slot_count(int ranks);
  CUdeviceptr word(int waiter, Word which, int teller, uint64_t piece) const;
  static size_t place_of(Word which, int teller, uint64_t slot, int ranks) {
    return (static_cast<size_t>(which) * ranks + teller) * kSlots + slot;
  }
  char* slot(int owner, Bank bank, int writer, uint64_t piece) const;
  CUdeviceptr told(uint32_t device::EngineStatus::*word) const {  // a word that the host reads
    return reinterpret_cast<CUdeviceptr>(&(status_->*word));
  }
  void copy(CUstream stream, void* to, const void* from, uint64_t bytes);
  void follow(CUstream stream, CUstream before);  // makes `stream` wait for everything in `before` so far
  uint64_t piece_of(uint64_t bytes, uint64_t unit, uint64_t wanted, bool slots) const;
  int before(int rank) const { return (rank + size_ - 1) % size_; }
  int unused_turn() const;  // the rank that did not use its turn, or -1
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
  CUevent done_[kSlots] = {};  // a piece's sum, until it is sent
  CUevent idle_ = nullptr;     // where the last call reported its end to the host, if not on its own stream
  bool told_idle_ = false;
  uint32_t calls_ = 0;
};

}  // namespace ark
