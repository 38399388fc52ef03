// The poll loop of exchange.hpp. It calls lower ranks, accepts and checks higher ones, and probes silent peers, all
// without blocking. Each pair ends as connected or apart; the loop ends then, at the deadline, or when a peer is lost.
#include "shm/exchange.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>
#include <optional>

#include "shm/hello_message.hpp"
#include "util/error.hpp"

namespace ark {

namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;
using Kind = HelloMessage::Kind;

constexpr Milliseconds kTick{50};             // how often interruption is checked
constexpr Milliseconds kHelloPatience{2000};  // a hello follows its connection at once
constexpr Milliseconds kBusyPause{2};         // the listener's queue was full
constexpr Milliseconds kRetryPause{10};       // the listener dropped the call
constexpr Milliseconds kKnockAfter{100};      // time for callers to connect
constexpr Milliseconds kKnockEvery{250};
constexpr int kMaxCalls = 20;        // most calls that the listener may close before the pair is apart
constexpr size_t kMaxPending = 256;  // most connections without a hello; the oldest is dropped first

enum class Pair { open, done, apart };

struct Call {  // a call to a lower rank
  UniqueFd fd;
  MessageReceiver answer{HelloMessage::kEncodedBytes};
  Clock::time_point next;  // without an fd: the earliest time of the next call
  int made = 0;
};

struct Pending {  // an accepted connection
  UniqueFd fd;
  MessageReceiver hello{HelloMessage::kEncodedBytes};
  Clock::time_point deadline;
  PeerCredentials who;
};

class Exchange {
 public:
  Exchange(const ExchangeOptions& options, SharedMemory own, UniqueFd listener)
      : options_(options),
        rank_(options.rank),
        size_(static_cast<int>(options.records.size())),
        listener_(std::move(listener)),
        pairs_(size_, Pair::open),
        calls_(rank_) {
    Neighbourhood& all = result_.neighbourhood;
    all.segments.resize(size_);
    all.connections.resize(size_);
    all.pids.assign(size_, 0);
    all.pids[rank_] = static_cast<int>(mine().pid);
    all.segments[rank_] = std::move(own);
    pairs_[rank_] = Pair::done;
  }

  ExchangeResult run() {
    next_knock_ = Clock::now() + kKnockAfter;
    while (result_.lost < 0 && !finished()) {
      options_.check();
      if (Clock::now() >= options_.deadline) {
        for (int r = 0; r < size_; ++r)
          if (pairs_[r] == Pair::open) result_.silent.push_back(r);
        break;
      }
      place_calls();
      knock();
      if (result_.lost < 0) wait_and_serve();
    }
    result_.apart = std::find(pairs_.begin(), pairs_.end(), Pair::apart) != pairs_.end();
    return std::move(result_);
  }

 private:
  const HandleRecord& mine() const { return options_.records[rank_]; }
  bool finished() const { return std::find(pairs_.begin(), pairs_.end(), Pair::open) == pairs_.end(); }

  void set_apart(int peer, const std::string& why) {
    if (pairs_[peer] != Pair::open) return;
    pairs_[peer] = Pair::apart;
    options_.on_apart(peer, why);
  }

  // No process listens at the peer's name. A peer that gives up publishes its outcome before it stops listening.
  void no_listener(int peer) {
    const uint64_t theirs = options_.records[peer].network_space;
    if (mine().network_space == 0 || theirs != mine().network_space)
      set_apart(peer, "its local socket cannot be reached from rank " + std::to_string(rank_));
    else if (options_.has_spoken(peer))
      set_apart(peer, "");
    else
      result_.lost = peer;
  }

  std::vector<uint8_t> hello_to(int peer, Kind kind) const {
    HelloMessage hello;
    hello.kind = kind;
    hello.nonce = mine().nonce;
    hello.from = static_cast<uint32_t>(rank_);
    hello.to = static_cast<uint32_t>(peer);
    hello.size = static_cast<uint32_t>(size_);
    hello.segment_bytes = kind == Kind::refuse ? 0 : mine().segment_bytes;
    return hello.encode();
  }

  int own_fd() const { return result_.neighbourhood.segments[rank_].fd(); }

  void place_calls() {
    const auto now = Clock::now();
    for (int peer = 0; peer < rank_ && result_.lost < 0; ++peer) {
      Call& call = calls_[peer];
      if (pairs_[peer] != Pair::open || call.fd || now < call.next) continue;
      ConnectAttempt attempt = connect_to(options_.records[peer].socket_name);
      switch (attempt.status) {
        case ConnectAttempt::Status::busy: call.next = now + kBusyPause; break;
        case ConnectAttempt::Status::refused: no_listener(peer); break;
        case ConnectAttempt::Status::failed:
          set_apart(peer, std::string("cannot connect to its local socket: ") + std::strerror(attempt.error));
          break;
        case ConnectAttempt::Status::connected: speak(peer, std::move(attempt.fd)); break;
      }
    }
  }

  void speak(int peer, UniqueFd fd) {
    Call& call = calls_[peer];
    const PeerCredentials who = credentials_of(fd.get());
    if (who.uid != mine().uid) {
      set_apart(peer, "user " + std::to_string(who.uid) + " listens at its local socket");
      return;
    }
    if (who.pid > 0) result_.neighbourhood.pids[peer] = who.pid;
    if (send_message(fd.get(), hello_to(peer, Kind::call), own_fd()) != 0) {
      dropped(peer);
      return;
    }
    call.fd = std::move(fd);
    call.answer = MessageReceiver(HelloMessage::kEncodedBytes);
  }

  // The listener closed the call without an answer. Either it died, and the next call is refused, or this process was
  // too slow.
  void dropped(int peer) {
    Call& call = calls_[peer];
    call.fd.reset();
    call.next = Clock::now() + kRetryPause;
    if (++call.made >= kMaxCalls) set_apart(peer, "it keeps closing the connection");
  }

  void hear_answer(int peer) {
    Call& call = calls_[peer];
    switch (call.answer.receive(call.fd.get())) {
      case MessageReceiver::Status::incomplete: return;
      case MessageReceiver::Status::ended: dropped(peer); return;
      case MessageReceiver::Status::oversized: set_apart(peer, "its answer is too long"); return;
      case MessageReceiver::Status::complete: break;
    }
    std::optional<HelloMessage> hello;
    try {
      hello = HelloMessage::decode(call.answer.message());
    } catch (const Error& error) {
      set_apart(peer, error.what());
    }
    if (hello && (!is_genuine(*hello) || hello->kind == Kind::call || static_cast<int>(hello->from) != peer))
      set_apart(peer, "its answer is not from this group");
    else if (hello && hello->kind == Kind::refuse)
      set_apart(peer, "");
    else if (hello)
      take_segment(peer, call.answer);
    result_.neighbourhood.connections[peer] = std::move(call.fd);  // also if the pair failed: shows whether it lives
  }

  bool is_genuine(const HelloMessage& hello) const {
    return equal_constant_time(hello.nonce, mine().nonce) && hello.to == static_cast<uint32_t>(rank_) &&
           hello.size == static_cast<uint32_t>(size_) &&
           (hello.kind == Kind::refuse || hello.segment_bytes == options_.records[hello.from].segment_bytes);
  }

  // Marks the pair done or apart. Throws if the segment cannot be attached.
  bool take_segment(int peer, MessageReceiver& message) {
    UniqueFd fd = message.take_fd();
    if (!fd || message.has_surplus_fds() || message.has_cut_control_data()) {
      set_apart(peer,
                "the descriptor of its segment did not arrive; this process may have too many files open "
                "(ulimit -n)");
      return false;
    }
    // A failure here is a shortage in this process or an invalid segment. That is an error for all ranks, not a reason
    // to continue without sharing.
    result_.neighbourhood.segments[peer] = SharedMemory::attach(std::move(fd), options_.records[peer].segment_bytes);
    pairs_[peer] = Pair::done;
    return true;
  }

  // Detects deaths that poll does not show: callers that died before they called, and peers that died after their pair
  // was done while this rank waits for others.
  void knock() {
    const auto now = Clock::now();
    if (now < next_knock_ || result_.lost >= 0) return;
    next_knock_ = now + kKnockEvery;
    for (int peer = 0; peer < size_ && result_.lost < 0; ++peer) {
      const UniqueFd& kept = result_.neighbourhood.connections[peer];
      if (kept && has_ended(kept.get()) && !options_.has_spoken(peer)) result_.lost = peer;
      if (peer > rank_ && pairs_[peer] == Pair::open && result_.lost < 0 &&
          connect_to(options_.records[peer].socket_name).status == ConnectAttempt::Status::refused)
        no_listener(peer);
    }
  }

  void wait_and_serve() {
    std::vector<pollfd> polled;
    polled.push_back({listener_.get(), POLLIN, 0});
    auto wake = std::min(Clock::now() + kTick, options_.deadline);
    std::vector<int> called;
    for (int peer = 0; peer < rank_; ++peer) {
      if (pairs_[peer] != Pair::open) continue;
      if (!calls_[peer].fd) wake = std::min(wake, calls_[peer].next);
      if (!calls_[peer].fd) continue;
      called.push_back(peer);
      polled.push_back({calls_[peer].fd.get(), POLLIN, 0});
    }
    for (const Pending& pending : pending_) {
      polled.push_back({pending.fd.get(), POLLIN, 0});
      wake = std::min(wake, pending.deadline);
    }
    const auto left = std::chrono::ceil<Milliseconds>(wake - Clock::now());
    if (::poll(polled.data(), polled.size(), static_cast<int>(std::max<int64_t>(0, left.count()))) < 0 &&
        errno != EINTR)
      throw system_error("cannot wait for the other ranks' sockets", errno);

    size_t at = 1;
    for (int peer : called)
      if (polled[at++].revents != 0) hear_answer(peer);
    const auto now = Clock::now();
    for (auto pending = pending_.begin(); pending != pending_.end();) {
      const bool ready = polled[at++].revents != 0;
      const bool keep = ready ? hear_hello(*pending) : now < pending->deadline;
      pending = keep ? std::next(pending) : pending_.erase(pending);
    }
    if (polled[0].revents != 0) accept_all();
  }

  void accept_all() {
    for (size_t i = 0; i < kMaxPending; ++i) {  // bounded: a flood must not delay the calls
      UniqueFd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!fd) {
        if (errno == EAGAIN) return;
        if (errno == EINTR || errno == ECONNABORTED) continue;
        stop_listening(errno);
        return;
      }
      const PeerCredentials who = credentials_of(fd.get());
      if (who.uid != mine().uid) continue;
      if (pending_.size() >= kMaxPending) pending_.pop_front();
      pending_.push_back(
          {std::move(fd), MessageReceiver(HelloMessage::kEncodedBytes), Clock::now() + kHelloPatience, who});
      if (!hear_hello(pending_.back())) pending_.pop_back();
    }
  }

  // This process has no descriptor left to accept with. Callers learn it from the outcome, which on_apart publishes,
  // and are refused.
  void stop_listening(int error) {
    for (int peer = rank_ + 1; peer < size_; ++peer)
      set_apart(peer, std::string("cannot accept its connection: ") + std::strerror(error));
    listener_.reset();
  }

  // Returns false if the connection is finished or invalid.
  bool hear_hello(Pending& pending) {
    switch (pending.hello.receive(pending.fd.get())) {
      case MessageReceiver::Status::incomplete: return true;
      case MessageReceiver::Status::ended:
      case MessageReceiver::Status::oversized: return false;
      case MessageReceiver::Status::complete: break;
    }
    std::optional<HelloMessage> hello;
    try {
      hello = HelloMessage::decode(pending.hello.message());
    } catch (const Error&) {
      return false;
    }
    // decode() has checked from < size, so is_genuine() may read that rank's record once the size matches.
    if (hello->kind != Kind::call || hello->size != static_cast<uint32_t>(size_) || !is_genuine(*hello)) return false;
    answer(static_cast<int>(hello->from), pending);
    return false;
  }

  // A caller that was too slow may call again; the newer connection counts.
  void answer(int peer, Pending& pending) {
    Neighbourhood& all = result_.neighbourhood;
    const bool willing = pairs_[peer] != Pair::apart && take_segment(peer, pending.hello);
    const int fd = willing ? own_fd() : -1;
    if (send_message(pending.fd.get(), hello_to(peer, willing ? Kind::answer : Kind::refuse), fd) != 0) {
      if (willing) pairs_[peer] = Pair::open;  // the caller is gone or will call again
      return;
    }
    if (pending.who.pid > 0) all.pids[peer] = pending.who.pid;
    all.connections[peer] = std::move(pending.fd);
  }

  const ExchangeOptions& options_;
  const int rank_;
  const int size_;
  UniqueFd listener_;
  std::vector<Pair> pairs_;
  std::vector<Call> calls_;  // one per lower rank
  std::list<Pending> pending_;
  Clock::time_point next_knock_;
  ExchangeResult result_;
};

}  // namespace

ExchangeResult exchange(const ExchangeOptions& options, SharedMemory own, UniqueFd listener) {
  return Exchange(options, std::move(own), std::move(listener)).run();
}

}  // namespace ark
