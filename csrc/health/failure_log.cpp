// Starts a thread per reported failure. The threads' state outlives the log object, so a report may finish after its
// group. A report whose thread cannot start runs in the destructor instead.
#include "health/failure_log.hpp"

#include <unistd.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <utility>

#include "util/start_thread.hpp"

namespace ark {

struct FailureLog::State {
  Tell tell;
  pid_t owner = ::getpid();
  std::mutex mutex;
  std::condition_variable changed;
  std::map<int, std::string> telling;  // by thread
  int threads = 0;                     // number started so far

  int begin(const Error& error) {
    const std::lock_guard lock(mutex);
    telling.emplace(threads, error.what());
    return threads++;
  }
  void end(int thread) {
    const std::lock_guard lock(mutex);
    telling.erase(thread);
    changed.notify_all();
  }
  void say(const Error& error) const {
    try {
      tell(error);
    } catch (const std::exception&) {  // a failed device, or a dump that could not be written
    }
  }
};

FailureLog::FailureLog(Tell tell) : state_(std::make_shared<State>()) {
  state_->tell = std::move(tell);
}

void FailureLog::add(const Error& error) {
  if (state_->tell) untold_.push_back(std::make_shared<const Error>(error));
}

void FailureLog::start() {
  while (!untold_.empty()) {
    const int thread = state_->begin(*untold_.front());
    try {
      start_thread("the thread that tells of a failure", [state = state_, error = untold_.front(), thread] {
        state->say(*error);
        state->end(thread);
      }).detach();
    } catch (const Error&) {
      return state_->end(thread);
    }
    untold_.erase(untold_.begin());
  }
}

std::optional<std::string> FailureLog::wait_told(std::chrono::steady_clock::time_point until) const {
  if (state_->owner != ::getpid()) return std::nullopt;
  std::unique_lock lock(state_->mutex);
  if (state_->changed.wait_until(lock, until, [&] { return state_->telling.empty(); })) return std::nullopt;
  return state_->telling.begin()->second;
}

FailureLog::~FailureLog() {
  if (state_->owner != ::getpid()) return;  // a forked child has no such threads
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [&] { return state_->telling.empty(); });
  lock.unlock();
  for (const auto& error : untold_) state_->say(*error);
}

}  // namespace ark
