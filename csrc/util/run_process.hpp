// Runs a program from an argument vector, with a time limit and without a shell, and captures its output.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace ark::jit {

struct ProcessResult {
  enum class End : uint8_t {
    exited,      // `code` is its exit status
    killed,      // by signal `code`
    timed_out,   // and was killed
    stopped,     // by stop_processes()
    not_started  // `code` is errno
  };
  End end = End::not_started;
  int code = 0;
  std::string output;  // stdout and stderr, the first megabyte
};

// Runs arguments[0] in `folder`, in its own process group, so that its children end with it. It inherits our
// environment with LC_ALL=C, so that messages and --version do not vary.
ProcessResult run_process(const std::vector<std::string>& arguments, const std::string& folder,
                          std::chrono::milliseconds limit);

// Call it before this process ends: kills every running program within a tenth of a second and prevents new ones.
void stop_processes();

}  // namespace ark::jit
