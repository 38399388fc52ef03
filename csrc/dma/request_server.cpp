// The thread of a request server: it takes a request, calls the function, and frees the request's place. An exception
// of the function ends the thread and is kept for check(), because kernels cannot receive it.
#include "dma/request_server.hpp"

#include <utility>

#include "util/start_thread.hpp"

namespace ark {

using Moment = std::chrono::steady_clock;

RequestServer::RequestServer(std::span<protocol::RequestRing> rings, ServeRing serve, Pace pace,
                             std::function<void()> pause)
    : rings_(rings), serve_(std::move(serve)), pace_(pace), pause_(std::move(pause)), numbers_(rings.size()) {
  thread_ = start_thread("the thread that serves a GPU's requests", [this] { run(); });
}

RequestServer::~RequestServer() {
  stop();
}

void RequestServer::stop() {
  over_.store(true, std::memory_order_relaxed);
  std::thread ending;
  {
    std::lock_guard lock(mutex_);
    std::swap(ending, thread_);
  }
  if (ending.joinable()) ending.join();
}

void RequestServer::finish() {
  ending_.store(true, std::memory_order_release);
  std::thread ending;
  {
    std::lock_guard lock(mutex_);
    std::swap(ending, thread_);
  }
  if (ending.joinable()) ending.join();
}

void RequestServer::check() const {
  std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
}

bool RequestServer::serve_next(size_t ring) {
  protocol::Request request;
  if (!protocol::take(rings_[ring], numbers_[ring], request)) return false;
  serve_(ring, request);
  protocol::served(rings_[ring], numbers_[ring]++);
  served_.fetch_add(1, std::memory_order_release);
  return true;
}

void RequestServer::run() {
  constexpr int kLooksPerClockRead = 64;
  auto last = Moment::now();
  int looks = 0;
  try {
    while (!over_.load(std::memory_order_relaxed)) {
      const bool ending = ending_.load(std::memory_order_acquire);  // before the last look at the rings
      bool served = false;
      for (size_t ring = 0; ring < rings_.size(); ++ring) served |= serve_next(ring);
      if (served) {
        last = Moment::now();
        looks = 0;
      } else if (ending) {
        break;
      } else if (++looks % kLooksPerClockRead == 0 && Moment::now() - last > pace_.spin) {
        if (pause_) pause_();
        std::this_thread::sleep_for(pace_.nap);
        looks = kLooksPerClockRead - 1;  // read the clock again on the next look
      }
    }
  } catch (...) {
    const std::lock_guard lock(mutex_);
    failure_ = std::current_exception();
  }
}

}  // namespace ark
