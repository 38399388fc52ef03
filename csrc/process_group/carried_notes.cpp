#include "process_group/carried_notes.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>

#include "health/start_thread.hpp"
#include "process_group/carried_messages.hpp"

namespace ark {

namespace {

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

FailureNotes::FailureNotes(c10::intrusive_ptr<c10d::Backend> carrier, int rank, int size,
                           std::function<void(const Error&)> heard)
    : carrier_(std::move(carrier)), rank_(rank), size_(size), heard_(std::move(heard)) {
  auto memory = bytes_at(&incoming_, sizeof incoming_);
  listening_ = carrier_->recvAnysource(memory, tag_of(MessageChannel::failure));
  thread_ = std::thread([this] { listen(); });
}

FailureNotes::~FailureNotes() {
  close();
}

void FailureNotes::close() {
  if (!thread_.joinable()) return;
  listening_->abort();
  thread_.join();
}

void FailureNotes::listen() {
  try {
    constexpr std::chrono::milliseconds forever(1'000'000'000);  // more would overflow where the carrier adds it
    if (!listening_->wait(forever)) return;
  } catch (const std::exception&) {
    return;  // connections have ended, which whoever waits for a message finds out as well
  }
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(known_, true)) return;
  }
  const auto kind = incoming_.kind <= static_cast<uint32_t>(ErrorKind::system) ? static_cast<ErrorKind>(incoming_.kind)
                                                                               : ErrorKind::aborted;
  const bool in_group = incoming_.culprit >= 0 && incoming_.culprit < size_;
  heard_(Error(kind, "rank " + std::to_string(incoming_.from) + " reported: " + text_of(incoming_.text),
               ErrorContext{rank_, in_group ? incoming_.culprit : -1, text_of(incoming_.operation), incoming_.sequence,
                            "Destroy the process group on every rank (or restart the job) before going on."}));
}

void FailureNotes::tell(const Error& error) {
  const std::lock_guard lock(mutex_);
  if (std::exchange(known_, true)) return;
  outgoing_.sequence = error.context().sequence;
  outgoing_.from = rank_;
  outgoing_.culprit = error.context().peer;
  outgoing_.kind = static_cast<uint32_t>(error.kind());
  put_text(outgoing_.operation, error.context().operation);
  put_text(outgoing_.text, error.message());
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    try {
      auto memory = bytes_at(&outgoing_, sizeof outgoing_);
      sends_.push_back(carrier_->send(memory, peer, tag_of(MessageChannel::failure)));
    } catch (const std::exception&) {  // its connection has ended: it knows, or is the one that is gone
    }
  }
}

}  // namespace ark
