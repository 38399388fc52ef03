// The host's side of request rings: one thread takes each ring's requests in order and passes them to a function.
//
// The caller owns the rings' zeroed memory, which must outlive this object. Kernels post to them (cuda/between.cuh),
// with the memory ordering of protocol/request_ring.hpp. The function runs after the acquire of its request, and its
// place is freed when the function returns. The thread spins while requests arrive and for `spin` after the last, then
// sleeps `nap` between looks. It waits for nothing else, so stop() takes at most one call of the function.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "protocol/request_ring.hpp"

namespace ark {

class RequestServer {
 public:
  struct Pace {
    std::chrono::microseconds spin{2000}, nap{50};
  };
  using Serve = std::function<void(const protocol::Request&)>;
  using ServeRing = std::function<void(size_t ring, const protocol::Request&)>;

  // If `serve` throws, the thread takes no more requests: posters reach their time limits, and check() rethrows.
  // `pause`, if given, is called before each nap, and ends the thread in the same way.
  RequestServer(std::span<protocol::RequestRing> rings, ServeRing serve, Pace pace, std::function<void()> pause = {});
  RequestServer(protocol::RequestRing& ring, Serve serve, Pace pace)
      : RequestServer(
            {&ring, 1}, [serve = std::move(serve)](size_t, const protocol::Request& one) { serve(one); }, pace) {}
  RequestServer(protocol::RequestRing& ring, Serve serve) : RequestServer(ring, std::move(serve), Pace{}) {}
  ~RequestServer();
  RequestServer(const RequestServer&) = delete;
  RequestServer& operator=(const RequestServer&) = delete;

  // Stops serving and leaves requests that were not taken. Idempotent, and callable from any thread.
  void stop();
  // Serves what has been posted, then stops. Nobody may post any more.
  void finish();
  void check() const;  // rethrows what `serve` threw
  uint64_t served() const { return served_.load(std::memory_order_acquire); }

 private:
  void run();
  bool serve_next(size_t ring);

  const std::span<protocol::RequestRing> rings_;
  const ServeRing serve_;
  const Pace pace_;
  const std::function<void()> pause_;
  std::vector<uint64_t> numbers_;  // by ring: the next request
  std::atomic<bool> over_{false}, ending_{false};
  std::atomic<uint64_t> served_{0};
  mutable std::mutex mutex_;  // guards the members below
  std::exception_ptr failure_;
  std::thread thread_;
};

}  // namespace ark
