// A channel of copies that the host posted ahead. A kernel raises a flag; a stream that waits for it copies and raises
// the receiver's flag. No SM moves data. Source and destination are those of the posted copy (copy_poster.hpp).
//
// Ordering: flag.hpp. After the team's stores to the source and its barrier, the leader raises the flag (release at
// system scope). The driver orders the copy after the wait that saw it, and the receiver's flag after the copy. The
// receiver lowers its flag before it returns the credit with release.
//
// Liveness: a stream's wait has no bound. Its flags are in memory that the host can write, so an abort raises all of
// them.
#pragma once

#include "channel.cuh"
#include "flag.hpp"

namespace ark::device {

// Flags that accompany a ChannelEnd, [depth] each.
struct PostedFlags {
  protocol::Flag* go;       // in host memory: message n of this end raises go[n % depth]
  protocol::Flag* arrived;  // own memory: raised by the peer's stream
};

#if defined(__CUDACC__)

template <class Team>
class PostedSender : public Sender<Team> {
 public:
  __device__ __forceinline__ PostedSender(const ChannelEnd& end, const PostedFlags& flags)
      : Sender<Team>(end), go_(flags.go) {}

  // Does nothing, because the copy was specified when it was posted. Part of the common API.
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
