// posix_spawn, a pipe and a deadline.
#include "util/run_process.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <thread>

#include "util/unique_fd.hpp"

extern char** environ;

namespace ark::jit {

namespace {

using Clock = std::chrono::steady_clock;
constexpr size_t kMostOutput = size_t{1} << 20;
constexpr int kPollMs = 100;
// Relaxed, because nothing else depends on it.
std::atomic<bool> stopping{false};

std::vector<char*> pointers_to(const std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (const std::string& one : strings) pointers.push_back(const_cast<char*>(one.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

std::vector<std::string> plain_environment() {
  std::vector<std::string> all{"LC_ALL=C"};
  for (char** one = environ; one != nullptr && *one != nullptr; ++one)
    if (std::string(*one).rfind("LC_ALL=", 0) != 0) all.emplace_back(*one);
  return all;
}

// Reads until all writers are gone. Returns false at the deadline or after stop_processes().
bool drain(int fd, Clock::time_point deadline, std::string& output) {
  char buffer[4096];
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0 || stopping.load(std::memory_order_relaxed)) return false;
    pollfd one{fd, POLLIN, 0};
    const int ready = ::poll(&one, 1, static_cast<int>(left < kPollMs ? left : kPollMs));
    if (ready < 0 && errno != EINTR) return true;
    if (ready <= 0) continue;
    const ssize_t got = ::read(fd, buffer, sizeof(buffer));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return true;
    if (output.size() < kMostOutput) output.append(buffer, static_cast<size_t>(got));
  }
}

// Returns false if the process has not ended by the deadline.
bool wait_until(pid_t pid, Clock::time_point deadline, int& status) {
  auto pause = std::chrono::microseconds(100);
  for (;;) {
    const pid_t ended = ::waitpid(pid, &status, WNOHANG);
    // Another waiter (a SIGCHLD handler) may have reaped it. Its status is lost, but its output file tells the result.
    if (ended == pid) return true;
    if (ended < 0 && errno == ECHILD) {
      status = 0;
      return true;
    }
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(pause);
    if (pause < std::chrono::milliseconds(10)) pause *= 2;
  }
}

}  // namespace

ProcessResult run_process(const std::vector<std::string>& arguments, const std::string& folder,
                          std::chrono::milliseconds limit) {
  ProcessResult result;
  if (stopping.load(std::memory_order_relaxed)) {
    result.end = ProcessResult::End::stopped;
    return result;
  }
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    result.code = errno;
    return result;
  }
  const UniqueFd out(ends[0]);
  UniqueFd in(ends[1]);
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawnattr_init(&attributes);
  ::posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_adddup2(&actions, in.get(), 1);
  ::posix_spawn_file_actions_adddup2(&actions, in.get(), 2);
  ::posix_spawn_file_actions_addchdir_np(&actions, folder.c_str());
  sigset_t none;
  ::sigemptyset(&none);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setpgroup(&attributes, 0);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK);
  const std::vector<std::string> environment = plain_environment();
  pid_t pid = -1;
  result.code = ::posix_spawn(&pid, arguments.at(0).c_str(), &actions, &attributes, pointers_to(arguments).data(),
                              pointers_to(environment).data());
  ::posix_spawn_file_actions_destroy(&actions);
  ::posix_spawnattr_destroy(&attributes);
  if (result.code != 0) return result;
  in.reset();

  const auto deadline = Clock::now() + limit;
  int status = 0;
  bool ended = drain(out.get(), deadline, result.output);
  ended = ended && wait_until(pid, deadline, status);
  if (!ended) {
    ::kill(-pid, SIGKILL);
    wait_until(pid, Clock::now() + std::chrono::seconds(10), status);
    result.end = stopping.load(std::memory_order_relaxed) ? ProcessResult::End::stopped : ProcessResult::End::timed_out;
  } else if (WIFSIGNALED(status)) {
    result.end = ProcessResult::End::killed;
    result.code = WTERMSIG(status);
  } else {
    result.end = ProcessResult::End::exited;
    result.code = WEXITSTATUS(status);
  }
  return result;
}

void stop_processes() {
  stopping.store(true, std::memory_order_relaxed);
}

}  // namespace ark::jit
