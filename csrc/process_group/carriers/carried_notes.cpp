// Sends and receives notes of failures. One receive from any rank is always posted; the listening thread handles a note
// and posts the next receive. Only the first note counts, the others just show that their senders know.
#include "process_group/carriers/carried_notes.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>

#include "process_group/carriers/carried_messages.hpp"
#include "util/start_thread.hpp"

namespace ark {

namespace {

// Time for the others' notes before this rank leaves. The first is for all, the second for ranks that are only slow, as
// on a machine with too many processes.
constexpr auto kForHearing = std::chrono::milliseconds(1000);
constexpr auto kForTheSlow = std::chrono::milliseconds(5000);

template <size_t kRoom>
void put_text(char (&target)[kRoom], const std::string& text) {
  const size_t bytes = std::min(kRoom - 1, text.size());
  std::memcpy(target, text.data(), bytes);
  target[bytes] = 0;
}

template <size_t kRoom>
std::string text_of(const char (&text)[kRoom]) {
  return std::string(text, strnlen(text, kRoom));
}

}  // namespace

FailureNotes::FailureNotes(std::shared_ptr<Carrier> carrier, int rank, int size, const NodePlan& plan,
                           std::function<void(const Error&)> heard)
    : carrier_(std::move(carrier)), rank_(rank), size_(size), plan_(plan), heard_(std::move(heard)), settled_(size) {
  settled_[rank] = true;
  expect();
  thread_ = start_thread("the thread that hears of other nodes' failures", [this] { listen(); });
}

FailureNotes::~FailureNotes() {
  close();
}

void FailureNotes::close() {
  if (!thread_.joinable()) return;
  {
    std::unique_lock lock(mutex_);
    if (told_ && !changed_.wait_for(lock, kForHearing, [this] { return may_leave(false); })) {
      for (int peer = 0; peer < size_; ++peer)  // only a send shows that a connection has ended
        if (!settled_[peer]) send_to(peer);
      changed_.wait_for(lock, kForTheSlow - kForHearing, [this] { return may_leave(true); });
    }
    closing_ = true;
    if (listening_) listening_->abort();
  }
  thread_.join();
}

void FailureNotes::send_to(int peer) {
  try {
    sends_.push_back(carrier_->send(peer, tag_of(MessageChannel::failure), &outgoing_, sizeof outgoing_));
  } catch (const std::exception&) {  // the connection has ended: that rank knows already, or is the one that failed
    settled_[peer] = true;
  }
}

// A patient rank stays for all but those of the node that is late or gone; shared memory tells these.
bool FailureNotes::may_leave(bool patient) const {
  const auto kind = static_cast<ErrorKind>(outgoing_.kind);
  const int culprit = outgoing_.culprit;
  const bool absent = (kind == ErrorKind::timeout || kind == ErrorKind::peer_lost) && culprit >= 0 && culprit < size_;
  for (int peer = 0; peer < size_; ++peer)
    if (!settled_[peer] && !(patient && absent && plan_.node_of(peer) == plan_.node_of(culprit))) return false;
  return true;
}

bool FailureNotes::expect() {
  const std::lock_guard lock(mutex_);
  if (closing_) return false;
  listening_ = carrier_->receive_any(tag_of(MessageChannel::failure), &incoming_, sizeof incoming_);
  return true;
}

void FailureNotes::listen() {
  constexpr std::chrono::milliseconds forever(1'000'000'000);  // a greater value overflows in the carrier
  for (int ended = 0; ended < size_;) {
    try {
      if (!listening_->wait(forever)) return;
      const Note note = incoming_;
      std::unique_lock lock(mutex_);
      const bool first = !std::exchange(heard_any_, true);
      if (note.from >= 0 && note.from < size_) settled_[note.from] = true;
      changed_.notify_all();
      lock.unlock();
      if (first) hand_over(note);
    } catch (const std::exception&) {  // a connection ended while a note was arriving on it
      ++ended;
    }
    try {
      if (!expect()) return;
    } catch (const std::exception&) {
      return;
    }
  }
}

void FailureNotes::hand_over(const Note& note) const {
  const auto kind =
      note.kind <= static_cast<uint32_t>(ErrorKind::system) ? static_cast<ErrorKind>(note.kind) : ErrorKind::aborted;
  const bool in_group = note.culprit >= 0 && note.culprit < size_;
  heard_(Error(kind, "rank " + std::to_string(note.from) + " reported: " + text_of(note.text),
               ErrorContext{rank_, in_group ? note.culprit : -1, text_of(note.operation), note.sequence,
                            "Destroy the process group on every rank (or restart the job) before going on."}));
}

void FailureNotes::tell(const Error& error) {
  const std::lock_guard lock(mutex_);
  if (std::exchange(told_, true)) return;
  outgoing_.sequence = error.context().sequence;
  outgoing_.from = rank_;
  outgoing_.culprit = error.context().peer;
  outgoing_.kind = static_cast<uint32_t>(error.kind());
  put_text(outgoing_.operation, error.context().operation);
  put_text(outgoing_.text, error.message());
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_) send_to(peer);
}

}  // namespace ark
