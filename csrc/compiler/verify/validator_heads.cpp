// Tasks that one run does both of (Task::head): to the others they are two, which the other checks have looked at one
// by one. What is between them is gone. See validator.hpp.
#include <string>
#include <utility>

#include "compiler/verify/validator.hpp"
#include "util/error.hpp"

namespace ark::compiler {

namespace {

[[noreturn]] void heads_error(const std::string& what) {
  throw Error(ErrorKind::invalid_argument, what);
}

}  // namespace

void check_heads(const Plan& plan) {
  for (const Queue& queue : plan.queues) {
    int before = -1;
    for (const int index : queue.tasks) {
      const Task& task = plan.tasks[index];
      const int last = std::exchange(before, index);
      if (task.head < 0) continue;
      const auto name = [&] { return describe(plan, index) + " begins with "; };
      if (task.head != last) heads_error(name() + "a task that is not the one before it in its queue");
      const Task& head = plan.tasks[last];
      if (head.head >= 0) heads_error(name() + describe(plan, last) + ", which begins with another itself");
      if (task.replica || !head.replica)
        heads_error(name() + describe(plan, last) + ", which is not for its worker alone");
      if (!task.waits.empty() || !task.carried.empty())
        heads_error(name() + describe(plan, last) + ", and waits behind it for an event that nobody looks at there");
      if (!head.signals.empty())
        heads_error(name() + describe(plan, last) + ", which signals an event that nobody bumps there");
    }
  }
}

}  // namespace ark::compiler
