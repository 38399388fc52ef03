// Reports failures on separate threads, for callers that must not wait while a report takes its time (driver calls,
// writing a file). There are few, because a group fails once.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "util/error.hpp"

namespace ark {

class FailureLog {
 public:
  using Tell = std::function<void(const Error&)>;

  explicit FailureLog(Tell tell);  // may be empty
  ~FailureLog();                   // waits until all reports are done, because their threads use what `tell` holds

  // One thread at a time calls these. If no thread can start, call start() again.
  void add(const Error& error);
  void start();

  // Waits for all started reports until `until`. Returns one that is not done, if any; then this object, with what
  // `tell` holds, must be leaked instead of destroyed. Any thread may call it.
  std::optional<std::string> wait_told(std::chrono::steady_clock::time_point until) const;

 private:
  struct State;
  const std::shared_ptr<State> state_;
  std::vector<std::shared_ptr<const Error>> untold_;  // each thread has its own copy, so no two share a text
};

}  // namespace ark
