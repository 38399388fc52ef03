// The host's side of a request ring: one thread takes requests in order and hands them to a function.
//
// The ring's memory is the caller's, zeroed, and outlives this object; kernels post to it (the channel_proxy.cuh of
// benchmarks/dma). Ordering is that of protocol/request_ring.hpp; the function is called behind the acquire of its
// request, and the place is given back when it has returned. The thread spins while requests come and for `spin` behind
// the last, then sleeps `nap` between looks; it waits for nothing else, so stop() is bounded by the longest call of the
// function.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include "protocol/request_ring.hpp"

namespace ark {

class RequestServer {
 public:
  struct Pace {
    std::chrono::microseconds spin{2000}, nap{50};
  };
  using Serve = std::function<void(const protocol::Request&)>;

  // When `serve` throws, no further request is taken: posters run into their bounds, and check() throws the same.
  RequestServer(protocol::RequestRing& ring, Serve serve, Pace pace);
  RequestServer(protocol::RequestRing& ring, Serve serve) : RequestServer(ring, std::move(serve), Pace{}) {}
  ~RequestServer();
  RequestServer(const RequestServer&) = delete;
  RequestServer& operator=(const RequestServer&) = delete;

  // No request is served any more; those that were not taken are left. May be called often, and from any thread.
  void stop();
  void check() const;  // throws what `serve` threw
  uint64_t served() const { return served_.load(std::memory_order_acquire); }

 private:
  void run();

  protocol::RequestRing& ring_;
  const Serve serve_;
  const Pace pace_;
  std::atomic<bool> over_{false};
  std::atomic<uint64_t> served_{0};
  mutable std::mutex mutex_;  // of what follows
  std::exception_ptr failure_;
  std::thread thread_;
};

}  // namespace ark
