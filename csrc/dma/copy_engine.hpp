// All-reduce of large buckets by copy engines: they scatter the parts and fetch the results, one short kernel adds.
// While they move bytes no SM is taken from whatever computes beside them, and nothing is copied twice: contributions
// are pushed from the user's buffer into the owner's slots, results are pulled from the owner's slots into the user's
// buffer (an engine needs 8 us more to read a piece over the link than to write it, H200; but to hand sums out would
// take a second copy within the receiver's GPU, which may be an SM's work).
//
// A bucket goes in pieces through kSets sets of slots. All copies of a rank are on one stream, the parts of piece i + 1
// before the sums of piece i: two copies at once, or copies to two peers at once, halve a copy engine's speed. The
// adding kernels have a stream of their own.
//
// Hand-overs are words in symmetric memory, written and awaited by stream memory operations, which no SM executes.
// Their values are constants once captured in a graph, so they are not counters: a word is 1 when something is there,
// and whoever waited for it puts 0 back. Two kinds alternate strictly: "arrived" is set by the sender behind its copy,
// or by the owner behind the kernel that made the sum (a stream's operations are ordered, and the driver orders a write
// behind copies and kernels of its stream), "free" by whoever read the slot, behind its kernel or copy; a slot is
// written again behind a wait for "free". Free words are 1 at first.
//
// Such waits have no bound of their own. Words in host memory say that an all-reduce is under way and count the pieces
// added; the watching thread (health/device_watch.hpp) fails the group when nothing was added for the timeout, and then
// sets all words until the streams have drained: results are garbage then, and every later call raises.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "cuda/add.cuh"
#include "jit/driver.hpp"
#include "memory/device_memory.hpp"

namespace ark {

class CopyEngine {
 public:
  // Symmetric memory to give it, of at most `limit` bytes (ARK_BUFFER_MB): with less, smaller pieces; 0: too little.
  static uint64_t memory_bytes(int ranks, uint64_t limit);

  // memory[r]: rank r's, as mapped here, prepared by prepare() before it was handed to the peers; `bytes` of each.
  CopyEngine(int rank, int device, std::vector<DeviceMemory> memory, uint64_t bytes, device::EngineStatus* status);
  ~CopyEngine();
  CopyEngine(const CopyEngine&) = delete;

  static void prepare(const DeviceMemory& own, int ranks);

  // parts[r]: rank r's contribution; out, handed_out: the sum; all of `bytes`.
  using Add =
      std::function<void(const void* const* parts, void* out, void* handed_out, uint64_t bytes, CUstream stream)>;
  void all_reduce(const void* in, void* out, uint64_t bytes, uint64_t element_bytes, CUstream stream, const Add& add);

  void release_all();  // the group has failed: lets every wait end; called again and again by the watching thread

 private:
  enum Word { arrived_part, free_part, arrived_sum, free_sum, kWords };

  // Words that a stream writes and awaits, by one call of the driver.
  class Words {
   public:
    explicit Words(CUstream stream) : stream_(stream) {}
    void await(CUdeviceptr word);  // until it is 1; puts 0 back
    void tell(CUdeviceptr word);   // makes it 1
    void enqueue();

   private:
    void add(CUstreamBatchMemOpType operation, CUdeviceptr address, uint32_t value, unsigned flags);
    const CUstream stream_;
    std::vector<CUstreamBatchMemOpParams> operations_;
  };

  CUdeviceptr word(int owner, Word which, int writer, int set) const;
  char* slot(int owner, int source, int set) const;  // source owner: the sum
  void copy(CUstream stream, void* to, const void* from, uint64_t bytes);
  void follow(CUstream stream, CUstream before);  // stream waits for all that `before` has been given

  const int rank_, size_, device_;
  const uint64_t most_piece_;  // of one part
  std::vector<DeviceMemory> memory_;
  device::EngineStatus* const status_;  // as the device sees it
  CUstream copy_ = nullptr, add_ = nullptr, release_ = nullptr;
  CUevent event_ = nullptr;
};

}  // namespace ark
