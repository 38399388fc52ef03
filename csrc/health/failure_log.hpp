// Tells of failures by threads of their own: for one who may not wait while telling may take as long as it likes (it
// asks the driver, it writes a file). There are few: a group fails once.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "error.hpp"

namespace ark {

class FailureLog {
 public:
  using Tell = std::function<void(const Error&)>;

  explicit FailureLog(Tell tell);  // may be empty
  ~FailureLog();                   // when all is told

  // By one thread at a time. Where no thread can be started, start() is to be called again.
  void add(const Error& error);
  void start();

 private:
  struct State;
  const std::shared_ptr<State> state_;
  std::vector<Error> untold_;
};

}  // namespace ark
