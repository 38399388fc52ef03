// Computes the deadlines of a launch of many steps. See launch_wait.hpp.
#include "compiler/runtime/launch_wait.hpp"

#include <algorithm>

namespace ark::compiler {

namespace {

// A hundred years; the clock's nanoseconds overflow not far beyond.
constexpr std::chrono::nanoseconds kLongest = std::chrono::hours(24 * 365 * 100);

std::chrono::nanoseconds times(std::chrono::nanoseconds one, uint32_t count) {
  return one > kLongest / count ? kLongest : one * count;
}

}  // namespace

LaunchWait::LaunchWait(Time begin, uint32_t steps, std::chrono::nanoseconds limit)
    : begin_(begin), one_(limit), whole_(times(limit, std::max(steps, 1u))) {}

LaunchWait::Next LaunchWait::at(Time now, bool stopping) {
  if (one_.count() <= 0) return Next::wait;
  if (stopping && !stopping_) {
    stopping_ = true;
    asked_ = now;
  }
  if (stopping_) {
    if (now - asked_ < times(one_, 2)) return Next::wait;
    overdue_ = true;
    return Next::give_up;
  }
  if (now - begin_ < whole_) return Next::wait;
  overdue_ = true;
  return Next::stop;
}

}  // namespace ark::compiler
