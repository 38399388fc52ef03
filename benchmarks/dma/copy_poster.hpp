// Copies posted ahead on a stream, each released by a flag that a kernel raises (channel_copy_engine.cuh).
//
// Message n waits for go[n % slots], copies, and raises arrived[n % slots] in the peer's memory. The values are
// constants, so post() may be captured in a graph: every replay starts with the flags lowered, as the last one left
// them. The go flags are in host memory, so that release_all() can end every wait without the device. Ordering:
// flag.hpp.
//
// A stream holds some thousand operations, and a post takes three. With more than kMostPosted unreleased posts, post()
// may block until kernels release some.
#pragma once

#include <chrono>
#include <memory>

#include "cuda/device_memory.hpp"
#include "flag.hpp"

namespace ark {

class CopyPoster {
 public:
  static constexpr uint64_t kMostPosted = 192;

  // `arrived` is [slots] in the peer's memory as mapped here. A null `stream` creates one of its own.
  CopyPoster(int device, uint32_t slots, protocol::Flag* arrived, CUstream stream = nullptr);
  ~CopyPoster();  // releases everything that still waits
  CopyPoster(const CopyPoster&) = delete;
  CopyPoster& operator=(const CopyPoster&) = delete;

  // Posts the next message's copy. Both ends must stay valid until it has run. A graph to be replayed must post a
  // multiple of `slots` messages.
  void post(void* to, const void* from, uint64_t bytes);

  protocol::Flag* go() const { return static_cast<protocol::Flag*>(flags_->device()); }  // for kernels
  CUstream stream() const { return stream_; }
  void synchronize();

  // Abort: raises every flag until nothing waits. Returns false if the stream is not empty within the limit. The copies
  // then move whatever their sources hold, so the channel must not be used again.
  bool release_all(std::chrono::milliseconds limit);

 private:
  const int device_;
  const uint32_t slots_;
  protocol::Flag* const arrived_;
  std::unique_ptr<PinnedMemory> flags_;
  const bool own_stream_;
  CUstream stream_;
  uint32_t next_ = 0;
};

}  // namespace ark
