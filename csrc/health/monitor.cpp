// The watching thread of monitor.hpp.
//
// Lock order: g_creation guards the pointer to the process's watcher, Watcher::mutex_ its list of groups, Group::mutex
// the handling of a group's events against its destruction. None is held over poll. A group's descriptors are closed
// under Group::mutex after it left the list, so the thread never reads from a reused descriptor number.
#include "health/monitor.hpp"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "util/error.hpp"
#include "util/local_socket.hpp"
#include "util/start_thread.hpp"

namespace ark {

namespace {

constexpr char kGoodbye = 'G';

enum State : uint8_t { present, said_goodbye, ended, vanished };  // vanished: ended without a goodbye

// Returns a pidfd, readable once the process has ended; empty if the kernel or container has none. Then the socket must
// do.
UniqueFd open_process(int socket) {
  const PeerCredentials who = credentials_of(socket);
  if (who.pid <= 0 || who.pid == ::getpid()) return {};
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, who.pid, 0)));
}

}  // namespace

namespace detail {

struct PeerGroup {
  pid_t owner = ::getpid();
  std::vector<UniqueFd> connections;
  std::vector<UniqueFd> processes;  // pidfds, if the kernel supports them
  std::vector<std::atomic<uint8_t>> states;
  std::function<void(int)> on_lost;
  std::mutex mutex;
  bool closed = false;

  bool is_watched(size_t peer) const {
    return connections[peer] && states[peer].load(std::memory_order_relaxed) < ended;
  }

  // Handles an event of this peer; `process_ended`: from its pidfd.
  void handle(size_t peer, bool process_ended) {
    std::lock_guard lock(mutex);
    if (closed || !is_watched(peer)) return;
    bool over = process_ended;
    std::array<char, 256> bytes;
    for (int i = 0; i < 16; ++i) {  // bounded: other input from a peer is read in small amounts and ignored
      const ssize_t got = ::recv(connections[peer].get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && errno == EAGAIN) break;
      if (got <= 0) {
        over = true;
        break;
      }
      if (std::find(bytes.begin(), bytes.begin() + got, kGoodbye) != bytes.begin() + got)
        states[peer].store(said_goodbye, std::memory_order_release);
    }
    if (!over) return;
    const bool expected = states[peer].load(std::memory_order_relaxed) == said_goodbye;
    states[peer].store(expected ? ended : vanished, std::memory_order_release);
    if (!expected && on_lost) on_lost(static_cast<int>(peer));
  }

  void close_all() {
    std::lock_guard lock(mutex);
    closed = true;
    for (UniqueFd& connection : connections) {
      // The thread may still hold the socket inside poll, so shut it down to end it for the peer now.
      if (connection) ::shutdown(connection.get(), SHUT_RDWR);
      connection.reset();
    }
    for (UniqueFd& process : processes) process.reset();
  }
};

}  // namespace detail

namespace {

using detail::PeerGroup;

class Watcher {
 public:
  Watcher() : wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!wake_) throw system_error("cannot create the descriptor that wakes the peer monitor", errno);
  }

  void add(std::shared_ptr<PeerGroup> group) {
    std::lock_guard lock(mutex_);
    if (!thread_.joinable() && !stopping_) start();
    groups_.push_back(std::move(group));
    wake();
  }

  void remove(const std::shared_ptr<PeerGroup>& group) {
    std::lock_guard lock(mutex_);
    std::erase(groups_, group);
    wake();
  }

  // At exit. Groups that are still alive are no longer watched.
  void stop() {
    std::thread thread;
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
      wake();
      thread.swap(thread_);
    }
    if (!thread.joinable()) return;
    if (thread.get_id() == std::this_thread::get_id())
      thread.detach();  // exit() was called from on_lost
    else
      thread.join();
  }

  std::mutex& mutex() { return mutex_; }

  // In a forked child, which has no such thread: its copies of the sockets must not outlive the parent's.
  void forget_in_child() {
    for (auto& group : groups_) {
      for (UniqueFd& connection : group->connections) connection.reset();
      for (UniqueFd& process : group->processes) process.reset();
    }
    wake_.reset();
  }

 private:
  void start() {
    // Signals belong to the program's own threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      thread_ = start_thread("the thread that watches the peers", [this] { run(); });
    } catch (const std::system_error& error) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      throw system_error("cannot start the thread that watches peers", error.code().value(),
                         "Raise the limit of processes (ulimit -u).");
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_setname_np(thread_.native_handle(), "ark-monitor");
  }

  void wake() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof one);  // full: it is awake anyway
  }

  struct Watched {
    std::shared_ptr<PeerGroup> group;
    size_t peer;
    bool process;
  };

  void run() {
    std::vector<pollfd> polled;
    std::vector<Watched> watched;
    for (;;) {
      polled.assign(1, {wake_.get(), POLLIN, 0});
      watched.clear();
      {
        std::lock_guard lock(mutex_);
        if (stopping_) return;
        for (const auto& group : groups_)
          for (size_t peer = 0; peer < group->connections.size(); ++peer) {
            if (!group->is_watched(peer)) continue;
            polled.push_back({group->connections[peer].get(), POLLIN, 0});
            watched.push_back({group, peer, false});
            if (!group->processes[peer]) continue;
            polled.push_back({group->processes[peer].get(), POLLIN, 0});
            watched.push_back({group, peer, true});
          }
      }
      if (::poll(polled.data(), polled.size(), -1) < 0) {
        if (errno != EINTR) std::this_thread::sleep_for(std::chrono::milliseconds(10));  // out of memory: try again
        continue;
      }
      uint64_t count;
      [[maybe_unused]] const ssize_t drained = ::read(wake_.get(), &count, sizeof count);
      for (size_t i = 0; i < watched.size(); ++i)
        if (polled[i + 1].revents != 0) watched[i].group->handle(watched[i].peer, watched[i].process);
    }
  }

  std::mutex mutex_;
  std::vector<std::shared_ptr<PeerGroup>> groups_;
  UniqueFd wake_;
  std::thread thread_;
  bool stopping_ = false;
};

std::mutex g_creation;
Watcher* g_watcher = nullptr;  // never deleted, because the thread and a forked child may still use it

void lock_for_fork() {
  g_creation.lock();
  if (g_watcher != nullptr) g_watcher->mutex().lock();
}

void unlock_in_parent() {
  if (g_watcher != nullptr) g_watcher->mutex().unlock();
  g_creation.unlock();
}

void forget_in_child() {
  if (g_watcher != nullptr) {
    g_watcher->forget_in_child();
    g_watcher->mutex().unlock();
    g_watcher = nullptr;
  }
  g_creation.unlock();
}

void stop_at_exit() {
  Watcher* watcher;
  {
    std::lock_guard lock(g_creation);
    watcher = g_watcher;
  }
  if (watcher != nullptr) watcher->stop();
}

Watcher& watcher_of_this_process() {
  std::lock_guard lock(g_creation);
  static const bool registered = [] {
    ::pthread_atfork(lock_for_fork, unlock_in_parent, forget_in_child);
    std::atexit(stop_at_exit);
    return true;
  }();
  (void)registered;
  if (g_watcher == nullptr) g_watcher = new Watcher;
  return *g_watcher;
}

}  // namespace

PeerMonitor::PeerMonitor(int rank, std::vector<UniqueFd> connections, std::function<void(int)> on_lost)
    : group_(std::make_shared<PeerGroup>()) {
  const size_t size = connections.size();
  group_->states = std::vector<std::atomic<uint8_t>>(size);
  group_->processes.resize(size);
  group_->on_lost = std::move(on_lost);
  for (size_t peer = 0; peer < size; ++peer)
    if (connections[peer] && static_cast<int>(peer) != rank)
      group_->processes[peer] = open_process(connections[peer].get());
  group_->connections = std::move(connections);
  if (size > 1) watcher_of_this_process().add(group_);
}

PeerMonitor::~PeerMonitor() {
  if (::getpid() != group_->owner) return;  // a forked child: its copies are closed, and the locks are the parent's
  if (group_->connections.size() > 1) watcher_of_this_process().remove(group_);
  group_->close_all();
}

bool PeerMonitor::lost(int peer) const noexcept {
  return group_->states[peer].load(std::memory_order_relaxed) == vanished;
}

bool PeerMonitor::departed(int peer) const noexcept {
  const uint8_t state = group_->states[peer].load(std::memory_order_relaxed);
  return state == said_goodbye || state == ended;
}

void PeerMonitor::say_goodbye() noexcept {
  if (::getpid() != group_->owner) return;
  for (const UniqueFd& connection : group_->connections)
    if (connection) ::send(connection.get(), &kGoodbye, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
}

}  // namespace ark
