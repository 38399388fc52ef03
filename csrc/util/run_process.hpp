// Runs a program with a vector of arguments, a time limit and no shell, and takes what it says.
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

// The program is the path arguments[0], started in `folder`, in a process group of its own, so that what it starts ends
// with it. Its environment is ours, but for LC_ALL=C: messages and --version are the same everywhere.
ProcessResult run_process(const std::vector<std::string>& arguments, const std::string& folder,
                          std::chrono::milliseconds limit);

// When this process is about to end: every program that runs is killed within a tenth of a second, and no other starts.
void stop_processes();

}  // namespace ark::jit
