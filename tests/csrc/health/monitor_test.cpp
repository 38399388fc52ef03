// Tests PeerMonitor between real processes that die, leave, fork and send garbage.
#include "health/monitor.hpp"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "support/processes.hpp"

namespace ark::test {
namespace {

// pairs[a][b] is rank a's end of its connection to rank b.
std::vector<std::vector<UniqueFd>> connect_all(int size) {
  std::vector<std::vector<UniqueFd>> ends(size);
  for (auto& row : ends) row.resize(size);
  for (int a = 0; a < size; ++a)
    for (int b = a + 1; b < size; ++b) {
      int pair[2];
      if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0)
        throw system_error("socketpair", errno);
      ends[a][b].reset(pair[0]);
      ends[b][a].reset(pair[1]);
    }
  return ends;
}

// Every test runs rank 0 and the peers in processes of their own, so that no thread exists before a fork.
std::vector<UniqueFd> take_row(std::vector<std::vector<UniqueFd>>& ends, int rank) {
  std::vector<UniqueFd> mine = std::move(ends[rank]);
  ends.clear();
  return mine;
}

bool wait_until(const std::function<bool()>& condition, double limit = 5) {
  const auto start = Clock::now();
  while (!condition()) {
    if (seconds_since(start) > limit) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

using Body = std::function<std::string(int rank, std::vector<UniqueFd> connections)>;

std::string run_rank_zero(int size, const Body& body, const std::function<void(Ranks&)>& meanwhile = {},
                          bool peers_are_stuck = false) {
  auto ends = connect_all(size);
  Ranks ranks(size, [&](int rank) { return body(rank, take_row(ends, rank)); });
  ends.clear();
  if (meanwhile) meanwhile(ranks);
  return ranks.wait(20, peers_are_stuck ? 1 : -1)[0].text;
}

TEST(PeerMonitor, AKilledPeerIsLostAndReportedOnce) {
  const std::string said = run_rank_zero(3, [](int rank, std::vector<UniqueFd> connections) -> std::string {
    std::atomic<int> calls{0}, last{-1};
    PeerMonitor monitor(rank, std::move(connections), [&](int peer) {
      last = peer;
      ++calls;
    });
    if (rank == 2) ::kill(::getpid(), SIGKILL);
    if (rank == 1) {
      std::this_thread::sleep_for(milliseconds(400));
      monitor.say_goodbye();
      return "left";
    }
    if (!wait_until([&] { return monitor.lost(2); })) return "not noticed";
    if (monitor.departed(2) || monitor.lost(1) || monitor.departed(1) || monitor.lost(0)) return "wrong rank";
    if (!wait_until([&] { return monitor.departed(1); })) return "departure not noticed";
    std::this_thread::sleep_for(milliseconds(100));
    if (monitor.lost(1)) return "a departure was taken for a loss";
    if (calls != 1 || last != 2) return "called back " + std::to_string(calls) + " times";
    return "right";
  });
  EXPECT_EQ(said, "right");
}

TEST(PeerMonitor, AnExitWithoutGoodbyeIsALoss) {
  const std::string said = run_rank_zero(2, [](int rank, std::vector<UniqueFd> connections) -> std::string {
    if (rank == 1) return "left without a word";
    PeerMonitor monitor(rank, std::move(connections));
    return wait_until([&] { return monitor.lost(1); }) ? "right" : "not noticed";
  });
  EXPECT_EQ(said, "right");
}

TEST(PeerMonitor, AStoppedPeerIsNotLost) {
  const std::string said = run_rank_zero(
      2,
      [](int rank, std::vector<UniqueFd> connections) -> std::string {
        PeerMonitor monitor(rank, std::move(connections));
        if (rank == 1) {
          ::raise(SIGSTOP);
          return "went on";
        }
        std::this_thread::sleep_for(milliseconds(300));
        return monitor.lost(1) || monitor.departed(1) ? "lost" : "right";
      },
      {}, true);
  EXPECT_EQ(said, "right");
}

TEST(PeerMonitor, GoodbyeThatCameBeforeTheMonitor) {
  const std::string said = run_rank_zero(2, [](int rank, std::vector<UniqueFd> connections) -> std::string {
    if (rank == 1) {
      PeerMonitor monitor(rank, std::move(connections));
      monitor.say_goodbye();
      monitor.say_goodbye();
      return "left";
    }
    std::this_thread::sleep_for(milliseconds(200));
    PeerMonitor monitor(rank, std::move(connections));
    return wait_until([&] { return monitor.departed(1); }) && !monitor.lost(1) ? "right" : "not noticed";
  });
  EXPECT_EQ(said, "right");
}

TEST(PeerMonitor, ForeignBytesAreIgnored) {
  const std::string said = run_rank_zero(
      2,
      [](int rank, std::vector<UniqueFd> connections) -> std::string {
        if (rank == 1) {
          std::vector<char> noise(100000, 'x');
          size_t sent = 0;
          while (sent < 3000000) {
            const ssize_t now = ::send(connections[0].get(), noise.data(), noise.size(), MSG_NOSIGNAL);
            if (now > 0)
              sent += static_cast<size_t>(now);
            else if (errno != EAGAIN)
              return "cannot send";
          }
          ::pause();
        }
        PeerMonitor monitor(rank, std::move(connections));
        std::this_thread::sleep_for(milliseconds(300));
        return monitor.lost(1) || monitor.departed(1) ? "taken for something" : "right";
      },
      {}, true);
  EXPECT_EQ(said, "right");
}

// A DataLoader's worker holds copies of its parent's descriptors. They must not make a dead parent look alive.
TEST(PeerMonitor, AChildOfTheDeadPeerDoesNotHideTheLoss) {
  const std::string said = run_rank_zero(2, [](int rank, std::vector<UniqueFd> connections) -> std::string {
    PeerMonitor monitor(rank, std::move(connections));
    if (rank == 1) {
      const pid_t parent = ::getpid();
      if (::fork() == 0) {
        for (int i = 0; i < 3000 && ::getppid() == parent; ++i) std::this_thread::sleep_for(milliseconds(1));
        std::this_thread::sleep_for(milliseconds(3000));
        ::_exit(0);
      }
      std::this_thread::sleep_for(milliseconds(50));
      ::kill(parent, SIGKILL);
    }
    const auto start = Clock::now();
    if (!wait_until([&] { return monitor.lost(1); })) return "not noticed";
    return seconds_since(start) < 1.5 ? "right" : "late";
  });
  EXPECT_EQ(said, "right");
}

TEST(PeerMonitor, InertInAForkedChildWhichMayHaveItsOwn) {
  const std::string said = run_rank_zero(2, [](int rank, std::vector<UniqueFd> connections) -> std::string {
    std::atomic<int> calls{0};
    auto monitor = std::make_unique<PeerMonitor>(rank, std::move(connections), [&](int) { ++calls; });
    if (rank == 1) {
      wait_until([&] { return monitor->departed(0); });
      monitor->say_goodbye();
      return "left";
    }
    // Lets the thread become idle: AddressSanitizer's allocator (GCC 12) breaks after a fork while another thread is in
    // it.
    std::this_thread::sleep_for(milliseconds(100));
    const pid_t child = ::fork();
    if (child == 0) {
      monitor->say_goodbye();  // must not reach the peer
      monitor.reset();         // must not end the parent's connection
      auto pair = connect_all(2);
      PeerMonitor own(0, std::move(pair[0]));
      pair.clear();
      ::_exit(wait_until([&] { return own.lost(1); }) ? 0 : 1);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    if (status != 0) return "the child's own monitor failed";
    std::this_thread::sleep_for(milliseconds(100));
    if (monitor->lost(1) || monitor->departed(1)) return "the child disturbed the peer";
    monitor->say_goodbye();
    if (!wait_until([&] { return monitor->departed(1); })) return "no longer watching";
    return calls == 0 ? "right" : "called back";
  });
  EXPECT_EQ(said, "right");
}

double cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  auto seconds = [](const timeval& t) { return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec); };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

TEST(PeerMonitor, IdlesWithoutCpuAlsoAfterALoss) {
  const std::string said = run_rank_zero(
      3,
      [](int rank, std::vector<UniqueFd> connections) -> std::string {
        if (rank == 2) return "left";
        PeerMonitor monitor(rank, std::move(connections));
        if (rank == 1) ::pause();
        if (!wait_until([&] { return monitor.lost(2); })) return "not noticed";
        const double before = cpu_seconds();
        std::this_thread::sleep_for(milliseconds(500));
        const double used = cpu_seconds() - before;
        return used < 0.05 ? "right" : "used " + std::to_string(used) + " s";
      },
      {}, true);
  EXPECT_EQ(said, "right");
}

// Groups come and go on several threads while peers leave. No callback may run after a destructor returned.
TEST(PeerMonitor, ManyGroupsComeAndGo) {
  Ranks ranks(1, [](int) -> std::string {
    std::atomic<int> late{0}, losses{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t)
      threads.emplace_back([&, t] {
        for (int i = 0; i < 200; ++i) {
          auto ends = connect_all(3);
          std::atomic<bool> alive{true};
          {
            PeerMonitor monitor(0, std::move(ends[0]), [&](int) {
              if (!alive) ++late;
              ++losses;
            });
            ends[1].clear();  // lost
            if ((i + t) % 3 == 0 && !wait_until([&] { return monitor.lost(1); })) ++late;
            monitor.say_goodbye();
          }
          alive = false;
          char bytes[8];  // the last peer sees the goodbye, then the end of the connection
          if (!wait_until([&] { return ::recv(ends[2][0].get(), bytes, sizeof bytes, 0) == 0; })) ++late;
        }
      });
    for (auto& thread : threads) thread.join();
    return late == 0 && losses >= 4 * 66 ? "right" : "late " + std::to_string(late);
  });
  EXPECT_EQ(ranks.wait()[0].text, "right");
}

TEST(PeerMonitor, DescriptorsStayFlat) {
  Ranks ranks(1, [](int) -> std::string {
    auto count = [] {
      int files = 0;
      for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++files;
      return files;
    };
    int first = 0;
    for (int i = 0; i < 300; ++i) {
      auto ends = connect_all(4);
      PeerMonitor monitor(0, std::move(ends[0]));
      ends.clear();
      if (!wait_until([&] { return monitor.lost(3); })) return "not noticed";
      if (i == 0) first = count();
      if (count() != first) return "descriptors grow";
    }
    return "right";
  });
  EXPECT_EQ(ranks.wait()[0].text, "right");
}

// exit() with live groups ends the process with its own exit code, also if several threads run destructors.
TEST(PeerMonitor, ExitWithoutDestroying) {
  for (int i = 0; i < 20; ++i) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      auto ends = connect_all(3);
      auto* monitor = new PeerMonitor(0, std::move(ends[0]), [](int) {});
      ends.clear();
      if (i % 2) wait_until([&] { return monitor->lost(1); });
      std::exit(7);
    }
    int status = 0;
    const auto start = Clock::now();
    while (::waitpid(child, &status, WNOHANG) == 0) {
      ASSERT_LT(seconds_since(start), 10) << "hangs in exit";
      std::this_thread::sleep_for(milliseconds(1));
    }
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << status;
  }
}

}  // namespace
}  // namespace ark::test
