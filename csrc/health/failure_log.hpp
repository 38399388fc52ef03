// Tells of failures by threads of their own: for one who may not wait while telling may take as long as it likes (it
// asks the driver, it writes a file). There are few: a group fails once.
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
  ~FailureLog();                   // when all is told: threads use what `tell` holds

  // By one thread at a time. Where no thread can be started, start() is to be called again.
  void add(const Error& error);
  void start();

  // For one who may not wait as long as telling takes: nothing when all that was started is told by then; else what is
  // not, and this object, with what `tell` holds, must be given up rather than destroyed. Any thread may call.
  std::optional<std::string> wait_told(std::chrono::steady_clock::time_point until) const;

 private:
  struct State;
  const std::shared_ptr<State> state_;
  std::vector<std::shared_ptr<const Error>> untold_;  // a thread has its own share: no two touch one text
};

}  // namespace ark
