// The host's side of a request ring: one thread takes requests in order and passes them to a function.
//
// The caller owns the ring's zeroed memory, which must outlive this object. Kernels post to it (channel_proxy.cuh in
// benchmarks/dma), with the memory ordering of protocol/request_ring.hpp. The function runs after the acquire of its
// request, and its place is freed when the function returns. The thread spins while requests arrive and for `spin`
// after the last, then sleeps `nap` between looks. It waits for nothing else, so stop() takes at most one call of the
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

  // If `serve` throws, the thread takes no more requests: posters reach their time limits, and check() rethrows.
  RequestServer(protocol::RequestRing& ring, Serve serve, Pace pace);
  RequestServer(protocol::RequestRing& ring, Serve serve) : RequestServer(ring, std::move(serve), Pace{}) {}
  ~RequestServer();
  RequestServer(const RequestServer&) = delete;
  RequestServer& operator=(const RequestServer&) = delete;

  // Stops serving and leaves requests that were not taken. Idempotent, and callable from any thread.
  void stop();
  void check() const;  // rethrows what `serve` threw
  uint64_t served() const { return served_.load(std::memory_order_acquire); }

 private:
  void run();

  protocol::RequestRing& ring_;
  const Serve serve_;
  const Pace pace_;
  std::atomic<bool> over_{false};
  std::atomic<uint64_t> served_{0};
  mutable std::mutex mutex_;  // guards the members below
  std::exception_ptr failure_;
  std::thread thread_;
};

}  // namespace ark
