// See failure_log.hpp.
#include "health/failure_log.hpp"

#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <utility>

#include "health/start_thread.hpp"

namespace ark {

struct FailureLog::State {
  Tell tell;
  pid_t owner = ::getpid();
  std::mutex mutex;
  std::condition_variable changed;
  int threads = 0;  // that are telling

  void count(int change) {
    const std::lock_guard lock(mutex);
    threads += change;
    changed.notify_all();
  }
  void say(const Error& error) const {
    try {
      tell(error);
    } catch (const std::exception&) {  // a device that has failed, or a dump that could not be written
    }
  }
};

FailureLog::FailureLog(Tell tell) : state_(std::make_shared<State>()) {
  state_->tell = std::move(tell);
}

void FailureLog::add(const Error& error) {
  if (state_->tell) untold_.push_back(error);
}

void FailureLog::start() {
  while (!untold_.empty()) {
    state_->count(1);
    try {
      start_thread("the thread that tells of a failure", [state = state_, error = untold_.front()] {
        state->say(error);
        state->count(-1);
      }).detach();
    } catch (const Error&) {
      return state_->count(-1);
    }
    untold_.erase(untold_.begin());
  }
}

FailureLog::~FailureLog() {
  if (state_->owner != ::getpid()) return;  // a forked child has no such threads
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [&] { return state_->threads == 0; });
  lock.unlock();
  for (const Error& error : untold_) state_->say(error);
}

}  // namespace ark
