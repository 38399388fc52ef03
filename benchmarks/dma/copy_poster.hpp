// Copies posted ahead on a stream, each released by a flag that a kernel raises (channel_copy_engine.cuh).
//
// Message n waits for go[n % slots], copies, and raises arrived[n % slots] in the peer's memory. Values are constants,
// so post() may be captured in a graph, and every replay finds the flags as the last one left them: lowered. The go
// flags lie in host memory, so that release_all() can end every wait without the device's help. Ordering:
// flag.hpp.
//
// A stream holds some thousand operations, and a post is three: with more than kMostPosted posted and not yet released,
// post() may block until kernels release some.
#pragma once

#include <chrono>
#include <memory>

#include "cuda/device_memory.hpp"
#include "flag.hpp"

namespace ark {

class CopyPoster {
 public:
  static constexpr uint64_t kMostPosted = 192;

  // `arrived`: [slots] in the peer's memory as mapped here. `stream`: where to post; null: one of this object's own.
  CopyPoster(int device, uint32_t slots, protocol::Flag* arrived, CUstream stream = nullptr);
  ~CopyPoster();  // releases what still waits
  CopyPoster(const CopyPoster&) = delete;
  CopyPoster& operator=(const CopyPoster&) = delete;

  // The next message's copy; both ends stay valid until it has run. A graph that is to be replayed posts whole rounds
  // of slots.
  void post(void* to, const void* from, uint64_t bytes);

  protocol::Flag* go() const { return static_cast<protocol::Flag*>(flags_->device()); }  // for kernels
  CUstream stream() const { return stream_; }
  void synchronize();

  // Abort: raises every flag until nothing waits any more; false: the stream was not empty within the limit. Copies
  // then move whatever their sources hold, so the channel is not used again.
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
