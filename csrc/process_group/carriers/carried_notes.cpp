// Sends and receives notes of failures. One receive from any rank is always posted; the listening thread handles a note
// and posts the next receive. Only the first note counts, the others just show that their senders know.
#include "process_group/carriers/carried_notes.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>

#include "process_group/carriers/carried_messages.hpp"
#include "util/start_thread.hpp"

namespace ark {

namespace {

constexpr auto kForHearing = std::chrono::milliseconds(1000);  // time for the others' notes before this rank leaves

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

FailureNotes::FailureNotes(std::shared_ptr<Carrier> carrier, int rank, int size,
                           std::function<void(const Error&)> heard)
    : carrier_(std::move(carrier)), rank_(rank), size_(size), heard_(std::move(heard)) {
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
    if (told_) changed_.wait_for(lock, kForHearing, [this] { return heard_of_ >= size_ - 1; });
    closing_ = true;
    if (listening_) listening_->abort();
  }
  thread_.join();
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
      const bool first = heard_of_++ == 0;
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
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    try {
      sends_.push_back(carrier_->send(peer, tag_of(MessageChannel::failure), &outgoing_, sizeof outgoing_));
    } catch (const std::exception&) {  // the connection has ended: that rank knows already, or is the one that failed
    }
  }
}

}  // namespace ark
