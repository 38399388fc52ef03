// A channel of requests. A kernel puts 16 bytes into a ring in host memory, and a host thread starts a copy engine
// (proxy.hpp). It is for peers whose memory cannot be mapped, and costs an extra trip to the host.
//
// Ordering: protocol/request_ring.hpp. After the team's stores to the source and its barrier, the leader posts (release
// at system scope). The host thread acquires the request and enqueues the copy, then the `arrived` word on the same
// stream.
//
// Liveness: a poster waits only for the host thread, with the usual bound. The host thread waits for nobody.
#pragma once

#include "channel.cuh"
#include "protocol/request_ring.hpp"

namespace ark::device {

// The ring that accompanies a ChannelEnd, and the start of its windows as mapped by this GPU.
struct ProxyRing {
  protocol::RequestRing* ring;  // host memory as mapped here
  uint64* head;                 // own memory, shared by all channels of this ring
  const char* from_window;
  char* to_window;
  uint32 channel;
};

#if defined(__CUDACC__)

template <class Team>
class ProxySender : public Sender<Team> {
 public:
  __device__ __forceinline__ ProxySender(const ChannelEnd& end, const ProxyRing& proxy)
      : Sender<Team>(end), proxy_(proxy) {}

  __device__ __forceinline__ bool put(void* to, const void* from, uint64 bytes) {
    return post(protocol::Request::put, to, from, bytes);
  }
  __device__ __forceinline__ bool signal() {
    this->writer_.count();
    return post(protocol::Request::signal, proxy_.to_window, proxy_.from_window, 0);
  }
  __device__ __forceinline__ bool put_with_signal(void* to, const void* from, uint64 bytes) {
    this->writer_.count();
    return post(protocol::Request::put_with_signal, to, from, bytes);
  }

 private:
  __device__ __forceinline__ bool post(protocol::Request::Kind kind, void* to, const void* from, uint64 bytes) {
    bool good = true;
    Team::sync();
    if (Team::rank() == 0) {
      const uint64 number = protocol::take_number(*proxy_.head);
      good = await(this->end_, number, [&] { return protocol::has_room(*proxy_.ring, number, known_); });
      if (good) {
        const protocol::Request request{kind, proxy_.channel, offset(to, proxy_.to_window),
                                        offset(from, proxy_.from_window), bytes};
        protocol::post(*proxy_.ring, number, request);
      }
    }
    return Team::all(good);
  }
  static __device__ __forceinline__ uint64 offset(const void* at, const void* window) {
    return static_cast<uint64>(static_cast<const char*>(at) - static_cast<const char*>(window));
  }

  const ProxyRing proxy_;
  uint64 known_ = 0;  // last known value of `served`
};

#endif

}  // namespace ark::device
