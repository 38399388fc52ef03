// Test support: real processes, and a rendezvous store that survives when any of them is killed.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "shm/key_value.hpp"
#include "util/error.hpp"
#include "util/unique_fd.hpp"

namespace ark::test {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// A temporary directory, removed at the end by the process that created it.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "ark-test-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw system_error("mkdtemp " + pattern, errno);
    path_ = pattern;
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    if (::getpid() == owner_) std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  pid_t owner_ = ::getpid();
};

// One file per key, created by rename, so that readers see a complete value or none.
class DirectoryStore : public KeyValueStore {
 public:
  explicit DirectoryStore(std::filesystem::path directory) : directory_(std::move(directory)) {}

  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    const auto fresh = directory_ / ("new-" + std::to_string(::getpid()) + "-" + std::to_string(++count_));
    std::ofstream(fresh, std::ios::binary)
        .write(reinterpret_cast<const char*>(value.data()), static_cast<std::streamsize>(value.size()));
    std::filesystem::rename(fresh, path_of(key));
  }

  std::optional<std::vector<uint8_t>> find(const std::string& key) override {
    if (std::ifstream file(path_of(key), std::ios::binary); file)
      return std::vector<uint8_t>(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    if (!std::filesystem::exists(directory_)) throw Error(ErrorKind::system, "the store is gone");
    return std::nullopt;
  }

  std::vector<uint8_t> get(const std::string& key, milliseconds timeout) override {
    const auto until = Clock::now() + timeout;
    for (;;) {
      if (auto value = find(key)) return *value;
      if (Clock::now() >= until) throw Error(ErrorKind::timeout, "no key " + key);
      std::this_thread::sleep_for(milliseconds(1));
    }
  }

 private:
  std::filesystem::path path_of(std::string key) const {
    for (char& c : key)
      if (c == '/') c = '+';
    return directory_ / ("key-" + key);
  }
  std::filesystem::path directory_;
  static inline std::atomic<int> count_{0};  // two stores may serve two threads of one process
};

// Calls `before` before every set and find, to be slow, stopped or killed at a chosen point.
class WatchedStore : public DirectoryStore {
 public:
  using Hook = std::function<void(const char* operation, const std::string& key)>;
  WatchedStore(std::filesystem::path directory, Hook before)
      : DirectoryStore(std::move(directory)), before_(std::move(before)) {}
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    before_("set", key);
    DirectoryStore::set(key, value);
    before_("was set", key);
  }
  std::optional<std::vector<uint8_t>> find(const std::string& key) override {
    before_("find", key);
    return DirectoryStore::find(key);
  }

 private:
  Hook before_;
};

struct Result {
  std::string text;          // what the process returned, or "Error(kind, peer N): message"
  double seconds = 0;        // from start to its last message
  int status = 0;            // as from waitpid
  bool killed_late = false;  // it was still running at the limit
};

// Forks one process per rank. Each runs `body` and reports the string that it returns. Ranks still running after
// `limit` are killed, so that a test can fail but never hang.
class Ranks {
 public:
  Ranks(int count, const std::function<std::string(int)>& body) : start_(Clock::now()), results_(count) {
    for (int rank = 0; rank < count; ++rank) {
      int ends[2];
      if (::pipe2(ends, O_CLOEXEC) != 0) throw system_error("pipe", errno);
      std::fflush(nullptr);
      const pid_t pid = ::fork();
      if (pid == 0) {
        pipes_.clear();
        std::string text;
        try {
          text = body(rank);
        } catch (const Error& error) {
          text = std::string("Error(") + name_of(error.kind()) + ", peer " + std::to_string(error.context().peer) +
                 "): " + error.what();
        } catch (const std::exception& error) {
          text = std::string("unexpected: ") + error.what();
        }
        [[maybe_unused]] const ssize_t written = ::write(ends[1], text.data(), text.size());
        ::_exit(0);
      }
      ::close(ends[1]);
      pids_.push_back(pid);
      pipes_.emplace_back(ends[0]);
    }
  }

  pid_t pid(int rank) const { return pids_[rank]; }
  void signal(int rank, int number) { ::kill(pids_[rank], number); }

  // When only rank `stuck` is left, it is killed too.
  const std::vector<Result>& wait(double limit = 30, int stuck = -1) {
    std::vector<bool> open(pids_.size(), true);
    for (;;) {
      std::vector<pollfd> polled;
      std::vector<size_t> who;
      for (size_t r = 0; r < open.size(); ++r)
        if (open[r]) {
          polled.push_back({pipes_[r].get(), POLLIN, 0});
          who.push_back(r);
        }
      if (who.size() == 1 && static_cast<int>(who[0]) == stuck) {
        ::kill(pids_[stuck], SIGKILL);
        break;
      }
      if (polled.empty()) break;
      const double left = limit - seconds_since(start_);
      if (left <= 0 || ::poll(polled.data(), polled.size(), static_cast<int>(left * 1000) + 1) == 0) {
        for (size_t r : who) {
          results_[r].killed_late = true;
          ::kill(pids_[r], SIGKILL);
        }
        break;
      }
      for (size_t i = 0; i < who.size(); ++i) {
        if (polled[i].revents == 0) continue;
        char buffer[4096];
        const ssize_t got = ::read(pipes_[who[i]].get(), buffer, sizeof buffer);
        if (got > 0) {
          results_[who[i]].text.append(buffer, static_cast<size_t>(got));
          results_[who[i]].seconds = seconds_since(start_);
        } else {
          open[who[i]] = false;
        }
      }
    }
    for (size_t r = 0; r < pids_.size(); ++r) ::waitpid(pids_[r], &results_[r].status, 0);
    pids_.clear();
    return results_;
  }

  ~Ranks() {
    for (pid_t pid : pids_) {
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
  }

 private:
  Clock::time_point start_;
  std::vector<pid_t> pids_;
  std::vector<UniqueFd> pipes_;
  std::vector<Result> results_;
};

}  // namespace ark::test
