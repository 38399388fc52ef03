// The thread of a request server: it takes a request, calls the function, and frees the request's place. An exception
// of the function ends the thread and is kept for check(), because kernels cannot receive it.
#include "dma/request_server.hpp"

#include <utility>

#include "util/start_thread.hpp"

namespace ark {

using Moment = std::chrono::steady_clock;

RequestServer::RequestServer(protocol::RequestRing& ring, Serve serve, Pace pace)
    : ring_(ring), serve_(std::move(serve)), pace_(pace) {
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

void RequestServer::check() const {
  std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
}

void RequestServer::run() {
  constexpr int kLooksPerClockRead = 64;
  uint64_t number = 0;
  auto last = Moment::now();
  int looks = 0;
  while (!over_.load(std::memory_order_relaxed)) {
    protocol::Request request;
    if (protocol::take(ring_, number, request)) {
      try {
        serve_(request);
      } catch (...) {
        std::lock_guard lock(mutex_);
        failure_ = std::current_exception();
        return;
      }
      protocol::served(ring_, number);
      served_.store(++number, std::memory_order_release);
      last = Moment::now();
      looks = 0;
    } else if (++looks % kLooksPerClockRead == 0 && Moment::now() - last > pace_.spin) {
      std::this_thread::sleep_for(pace_.nap);
      looks = kLooksPerClockRead - 1;  // read the clock again on the next look
    }
  }
}

}  // namespace ark
