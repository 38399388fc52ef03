// The channel of copies that the host has posted ahead: a kernel raises a flag, a stream that waits for it copies and
// raises the receiver's. No SM moves a byte; from and to are those of the posted copy (copy_poster.hpp).
//
// Ordering: flag.hpp. The team's stores to the source, its barrier, the leader's raise (release at system
// scope); the driver orders the copy behind the wait that saw it, and the receiver's flag behind the copy. The receiver
// lowers its flag before it gives the credit, with release.
//
// Liveness: a stream's wait has no bound. Its flags are in memory that the host writes, and whoever aborts raises all.
#pragma once

#include "channel.cuh"
#include "flag.hpp"

namespace ark::device {

// Beside a ChannelEnd, [depth] each.
struct PostedFlags {
  protocol::Flag* go;       // in host memory: message n of this end raises go[n % depth]
  protocol::Flag* arrived;  // own: raised by the peer's stream
};

#if defined(__CUDACC__)

template <class Team>
class PostedSender : public Sender<Team> {
 public:
  __device__ __forceinline__ PostedSender(const ChannelEnd& end, const PostedFlags& flags)
      : Sender<Team>(end), go_(flags.go) {}

  // What is copied was said when the copy was posted; here for the one API.
  __device__ __forceinline__ bool put(void*, const void*, uint64) { return true; }
  __device__ __forceinline__ bool signal() {
    Team::sync();
    if (Team::rank() == 0) protocol::raise(go_[this->writer_.slot()]);
    this->writer_.count();
    return true;
  }
  __device__ __forceinline__ bool put_with_signal(void*, const void*, uint64) { return signal(); }

 private:
  protocol::Flag* const go_;
};

template <class Team>
class PostedReceiver : public Receiver<Team> {
 public:
  __device__ __forceinline__ PostedReceiver(const ChannelEnd& end, const PostedFlags& flags)
      : Receiver<Team>(end), arrived_(flags.arrived) {}

  __device__ __forceinline__ const char* wait(void* = nullptr, uint64 = 0) {
    const protocol::Flag& flag = arrived_[this->reader_.slot()];
    bool good = true;
    if (Team::rank() == 0) good = await(this->end_, this->reader_.received(), [&] { return is_raised(flag); });
    return Team::all(good) ? this->slot() : nullptr;
  }
  __device__ __forceinline__ void release() {
    Team::sync();
    if (Team::rank() == 0) lower(arrived_[this->reader_.slot()]);
    this->reader_.count();
    if (Team::rank() == 0) protocol::store_release(*this->end_.to_credit, this->reader_.received());
  }

 private:
  protocol::Flag* const arrived_;
};

#endif

}  // namespace ark::device
