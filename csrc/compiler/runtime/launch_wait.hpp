// How long a host waits for a launch of many steps, which by itself ends: each wait in it has a limit.
//
// What may not end is what the launch cannot see: work before it on its stream, or a GPU that does not get on. So the
// host has a limit too: of all steps as long as one wait may take, then it asks the launch to stop, as after Ctrl-C;
// and when the step that runs then has had the time of two, the host gives up.
#pragma once

#include <chrono>
#include <cstdint>

namespace ark::compiler {

class LaunchWait {
 public:
  using Time = std::chrono::steady_clock::time_point;
  enum class Next : uint8_t { wait, stop, give_up };

  // `limit`: of a wait of the launch; zero: none, nor has the host one.
  LaunchWait(Time begin, uint32_t steps, std::chrono::nanoseconds limit);

  // `stopping`: the launch has been asked to.
  Next at(Time now, bool stopping);
  bool overdue() const { return overdue_; }  // stop was said, or given up
  std::chrono::nanoseconds limit() const { return whole_; }

 private:
  const Time begin_;
  const std::chrono::nanoseconds one_, whole_;
  Time asked_{};
  bool stopping_ = false, overdue_ = false;
};

}  // namespace ark::compiler
