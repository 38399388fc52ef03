// How long the host waits for a launch of many steps. Waits inside the launch have limits of their own, but work before
// it on the stream, or a GPU that makes no progress, could hold it up forever. So the host has a limit too: one wait's
// limit per step. After that it asks the launch to stop, as on Ctrl-C, and gives up after the time of two more waits.
#pragma once

#include <chrono>
#include <cstdint>

namespace ark::compiler {

class LaunchWait {
 public:
  using Time = std::chrono::steady_clock::time_point;
  enum class Next : uint8_t { wait, stop, give_up };

  // `limit`: of one wait in the launch; zero: neither has a limit.
  LaunchWait(Time begin, uint32_t steps, std::chrono::nanoseconds limit);

  // `stopping`: the launch has been asked to stop.
  Next at(Time now, bool stopping);
  bool overdue() const { return overdue_; }  // at() returned stop or give_up
  std::chrono::nanoseconds limit() const { return whole_; }

 private:
  const Time begin_;
  const std::chrono::nanoseconds one_, whole_;
  Time asked_{};
  bool stopping_ = false, overdue_ = false;
};

}  // namespace ark::compiler
