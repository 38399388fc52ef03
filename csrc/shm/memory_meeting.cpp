// Runs the steps of memory_meeting.hpp. Each rank writes its outcome to a slot of its shared page and publishes the
// step's number with release. After all ranks have, the result is computed from the slots alone, so it is the same
// everywhere.
#include "shm/memory_meeting.hpp"

#include <cstring>
#include <optional>
#include <thread>

#include "protocol/atomics.hpp"
#include "util/error.hpp"
#include "util/local_socket.hpp"

namespace ark {

namespace {

using Clock = std::chrono::steady_clock;

// Prefixes the keys of one meeting.
class NamedStore : public KeyValueStore {
 public:
  NamedStore(KeyValueStore& store, const std::string& name) : store_(store), prefix_(name + "/") {}
  void set(const std::string& key, const std::vector<uint8_t>& value) override { store_.set(prefix_ + key, value); }
  std::vector<uint8_t> get(const std::string& key, std::chrono::milliseconds timeout) override {
    return store_.get(prefix_ + key, timeout);
  }
  std::optional<std::vector<uint8_t>> find(const std::string& key) override { return store_.find(prefix_ + key); }

 private:
  KeyValueStore& store_;
  const std::string prefix_;
};

// A failure that follows from a peer's failure.
class PeerFailed : public Error {
 public:
  using Error::Error;
};

template <size_t bytes>
void put(char (&to)[bytes], const std::string& text) {
  std::strncpy(to, text.c_str(), bytes - 1);
  to[bytes - 1] = 0;
}
template <size_t bytes>
std::string get(const char (&from)[bytes]) {
  return {from, strnlen(from, bytes)};
}

}  // namespace

struct MemoryMeeting::Slot {
  alignas(8) unsigned char card[kCardBytes];
  uint32_t failed;  // 1: here; 2: because a peer failed
  ErrorKind kind;
  char text[448];
  char remedy[256];
};

// At the head of every rank's segment.
struct MemoryMeeting::Page {
  uint32_t stage;
  uint32_t left;  // step in which this rank gave up; 0: none
  Slot slots[2];  // by the step's parity
  // Why it left, and the rank that it waited for.
  ErrorKind parting_kind;
  int32_t parting_peer;
  char parting[256];
};

MemoryMeeting::MemoryMeeting(const Options& options, Neighbourhood hood) : options_(options), hood_(std::move(hood)) {}

std::unique_ptr<MemoryMeeting> MemoryMeeting::join(KeyValueStore& store, const Options& options, std::string& why) {
  Neighbourhood hood;
  if (options.size == 1) {
    hood.segments.push_back(SharedMemory::create("ark-rank-0", sizeof(Page)));
  } else {
    ConnectOptions connecting;
    connecting.rank = options.rank;
    connecting.size = options.size;
    connecting.segment_bytes = sizeof(Page);
    connecting.timeout = options.timeout;
    connecting.interrupted = [&] {
      options.check();
      return false;
    };
    NamedStore named(store, options.name);
    ConnectResult result = connect(named, connecting);
    if (!result.neighbourhood) {
      why = result.reason;
      return nullptr;
    }
    hood = std::move(*result.neighbourhood);
  }
  return std::unique_ptr<MemoryMeeting>(new MemoryMeeting(options, std::move(hood)));
}

MemoryMeeting::Page& MemoryMeeting::page(int rank) const {
  return *reinterpret_cast<Page*>(hood_.segments[rank].data());
}

MemoryMeeting::Slot& MemoryMeeting::slot(int rank, uint32_t stage) const {
  return page(rank).slots[stage & 1];
}

void* MemoryMeeting::card(int rank, uint32_t stage) const {
  return slot(rank, stage).card;
}

bool MemoryMeeting::step(const std::function<void()>& body, std::string& why) {
  if (over_) {
    throw Error(ErrorKind::closed, "this group can share no more memory: an attempt before did not end well",
                ErrorContext{options_.rank, -1, "", 0, "Create the group again."});
  }
  ++stage_;
  deadline_ = Clock::now() + options_.timeout;
  Slot& own = slot(options_.rank, stage_);
  std::memset(&own, 0, sizeof own);
  const auto fail = [&](const Error& error, uint32_t how = 1) {
    own.failed = how;
    own.kind = error.kind();
    put(own.text, error.message());
    put(own.remedy, error.context().remedy);
  };
  try {
    body();
  } catch (const PeerFailed& error) {
    fail(error, 2);
  } catch (const Error& error) {
    fail(error);
  } catch (const std::exception& error) {
    fail(Error(ErrorKind::invalid_argument, error.what()));
  }
  protocol::store_release(page(options_.rank).stage, stage_);
  try {
    await_all();
  } catch (const Error& error) {
    // Tells late ranks not to wait for this one.
    over_ = true;
    Page& own_page = page(options_.rank);
    own_page.parting_kind = error.kind();
    own_page.parting_peer = error.context().peer;
    put(own_page.parting, error.message());
    protocol::store_release(own_page.left, stage_);
    throw;
  }
  ended_ = stage_;
  // Uses only the slots, so every rank gets the same result.
  int unable = -1;
  for (int peer = 0; peer < options_.size; ++peer) {
    const Slot& said = slot(peer, stage_);
    if (said.failed != 1) continue;
    if (said.kind != ErrorKind::system)
      throw Error(said.kind, told_by(peer, said), ErrorContext{options_.rank, peer, "", 0, get(said.remedy)});
    if (unable < 0) unable = peer;
  }
  if (unable < 0) return true;
  why = told_by(unable, slot(unable, stage_));
  if (const std::string remedy = get(slot(unable, stage_).remedy); !remedy.empty()) why += ". " + remedy;
  return false;
}

void MemoryMeeting::step(const std::function<void()>& body) {
  std::string why;
  if (!step(body, why)) throw Error(ErrorKind::system, why, ErrorContext{options_.rank, -1, "", 0, ""});
}

std::string MemoryMeeting::told_by(int peer, const Slot& said) const {
  return (peer == options_.rank ? "" : "rank " + std::to_string(peer) + ": ") + get(said.text);
}

void MemoryMeeting::await_all() {
  for (int peer = 0; peer < options_.size; ++peer) {
    const Page& theirs = page(peer);
    while (protocol::load_acquire(theirs.stage) < stage_) pause(peer);
    check_there(peer);  // the peer arrived, but may have stopped waiting
  }
}

void MemoryMeeting::check_there(int peer) const {
  const uint32_t left = protocol::load_acquire(page(peer).left);
  if (left == 0 || left > stage_) return;
  // The peer may have noticed a lost third rank first, so the error names that one.
  const Page& theirs = page(peer);
  const ErrorKind kind = theirs.parting_kind;
  const int missing = theirs.parting_peer;
  const bool third = (kind == ErrorKind::peer_lost || kind == ErrorKind::timeout) && missing >= 0 && missing != peer &&
                     missing != options_.rank;
  throw Error(third ? kind : ErrorKind::mismatch, "rank " + std::to_string(peer) + " gave up: " + get(theirs.parting),
              ErrorContext{options_.rank, third ? missing : peer, "", 0, "Look at that rank's output."});
}

void MemoryMeeting::pause(int peer) {
  const ErrorContext blame{options_.rank, peer, "", 0, "Look at that rank's output."};
  if (options_.check) options_.check();
  check_there(peer);
  // A peer that finished this step may have ended its meeting since, so check its stage again.
  if (hood_.connections[peer] && has_ended(hood_.connections[peer].get()) &&
      protocol::load_acquire(page(peer).stage) < stage_)
    throw Error(ErrorKind::peer_lost, "rank " + std::to_string(peer) + " ended while it shared its memory", blame);
  if (Clock::now() > deadline_) {
    throw Error(
        ErrorKind::timeout,
        "rank " + std::to_string(peer) + " did not share its memory within " +
            std::to_string(options_.timeout.count()) + " ms",
        ErrorContext{options_.rank, peer, "", 0, "Look at that rank's output; every rank must make the same calls."});
  }
  std::this_thread::sleep_for(std::chrono::microseconds(200));
}

// The message is the step's number, which identifies leftovers of a failed step in a socket.
void MemoryMeeting::give(int peer, const UniqueFd& fd) {
  uint8_t message[sizeof stage_];
  std::memcpy(message, &stage_, sizeof stage_);
  const int error = send_message(hood_.connections[peer].get(), message, fd.get());
  if (error != 0) throw system_error("cannot hand memory to rank " + std::to_string(peer), error);
}

UniqueFd MemoryMeeting::take(int peer) {
  for (;;) {
    MessageReceiver receiver(sizeof stage_, true);
    for (;;) {
      const auto status = receiver.receive(hood_.connections[peer].get());
      if (status == MessageReceiver::Status::complete) break;
      if (status != MessageReceiver::Status::incomplete) {
        throw Error(ErrorKind::peer_lost, "rank " + std::to_string(peer) + " ended while it shared its memory",
                    ErrorContext{options_.rank, peer, "", 0, "Look at that rank's output."});
      }
      if (protocol::load_acquire(page(peer).stage) >= stage_ && slot(peer, stage_).failed != 0)
        throw PeerFailed(ErrorKind::system, "rank " + std::to_string(peer) + " failed");
      pause(peer);
    }
    uint32_t from = 0;
    std::memcpy(&from, receiver.message().data(), sizeof from);
    if (from != stage_) continue;
    UniqueFd fd = receiver.take_fd();
    if (fd) return fd;
    throw Error(ErrorKind::system,
                "rank " + std::to_string(peer) + " sent no descriptor, or this process may open no more files",
                ErrorContext{options_.rank, peer, "", 0, "Raise the limit of open files (ulimit -n)."});
  }
}

}  // namespace ark
