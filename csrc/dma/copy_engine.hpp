// All-reduce of large buckets by copy engines: they scatter the parts and gather the results, one short kernel adds.
// While they move bytes no SM is taken from whatever computes beside them.
//
// A bucket goes in pieces of at most kPieceBytes a rank through two sets of staging slots, on four streams: scatter
// (one peer at a time: several at once halve a copy engine's speed), add, gather, and copy-out of what peers delivered.
//
// Hand-overs are words in symmetric memory, written and awaited by stream memory operations, which no SM executes.
// Their values are constants once captured in a graph, so they are not counters: a word is 1 when something is there,
// and whoever waited for it puts 0 back. Two kinds alternate strictly: "arrived" is set by the sender behind its copy
// (a stream's operations are ordered, and the driver orders a write behind copies of its stream), "free" by the
// receiver behind the kernel or copy that read the slot; the sender waits for "free" before it copies again. Free words
// are 1 at first.
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
  static constexpr uint64_t kPieceBytes = 16 << 20;  // of one part
  static uint64_t memory_bytes(int ranks);           // symmetric memory to give it

  // memory[r]: rank r's, as mapped here, prepared by prepare() before it was handed to the peers.
  CopyEngine(int rank, int device, std::vector<DeviceMemory> memory, device::EngineStatus* status);
  ~CopyEngine();
  CopyEngine(const CopyEngine&) = delete;

  static void prepare(const DeviceMemory& own, int ranks);

  // parts[r]: rank r's contribution, out: the sum; all of `bytes`.
  using Add = std::function<void(const void* const* parts, void* out, uint64_t bytes, CUstream stream)>;
  void all_reduce(const void* in, void* out, uint64_t bytes, uint64_t element_bytes, CUstream stream, const Add& add);

  void release_all();  // the group has failed: lets every wait end; called again and again by the watching thread

 private:
  enum Word { arrived_scatter, free_scatter, arrived_gather, free_gather, kWords };

  CUdeviceptr word(int owner, Word which, int writer, int set) const;
  char* slot(int owner, bool gather, int source, int set) const;
  void await(CUstream stream, Word which, const std::vector<int>& peers, int set);
  void tell(CUstream stream, Word which, int peer, int set);
  void copy(CUstream stream, void* to, const void* from, uint64_t bytes);
  void follow(CUstream stream, CUstream before);  // stream waits for all that `before` has been given

  const int rank_, size_, device_;
  std::vector<DeviceMemory> memory_;
  device::EngineStatus* const status_;  // as the device sees it
  CUstream scatter_ = nullptr, add_ = nullptr, gather_ = nullptr, out_ = nullptr, release_ = nullptr;
  CUevent event_ = nullptr;
};

}  // namespace ark
