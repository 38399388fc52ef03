#include "process_group/carried_messages.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

#include "error.hpp"

namespace ark {

namespace {

int tag_of(MessageChannel channel) {
  return kFirstReservedTag + static_cast<int>(channel);
}

std::vector<at::Tensor> bytes_at(void* data, size_t bytes) {
  return {at::from_blob(data, {static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte))};
}

}  // namespace

void CarriedMessages::send(int peer, MessageChannel channel, const void* data, size_t bytes) {
  if (bytes == 0) return;
  auto memory = bytes_at(const_cast<void*>(data), bytes);
  begun(sends_, carrier_.send(memory, peer, tag_of(channel)));
}

size_t CarriedMessages::receive(int peer, MessageChannel channel, void* data, size_t bytes) {
  Work work;
  if (bytes > 0) {
    auto memory = bytes_at(data, bytes);
    work = carrier_.recv(memory, peer, tag_of(channel));
  }
  begun(receives_, std::move(work));
  return receives_.size() - 1;
}

void CarriedMessages::begun(std::vector<Work>& works, Work work) {
  const std::lock_guard lock(mutex_);
  if (aborted_ && work) work->abort();
  works.push_back(std::move(work));
}

void CarriedMessages::wait_for(size_t receive) {
  wait(receives_[receive]);
}

void CarriedMessages::wait_for_all() {
  for (Work& work : receives_) wait(work);
  for (Work& work : sends_) wait(work);
}

void CarriedMessages::abort() {
  const std::lock_guard lock(mutex_);
  aborted_ = true;
  for (const auto& works : {&receives_, &sends_})
    for (const Work& work : *works)
      if (work) work->abort();
}

// The slot is read and written by the operation's own thread; others only look at it under the lock.
void CarriedMessages::wait(Work& work) {
  if (!work) return;
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(operation_.context.deadline - Clock::now());
  constexpr std::chrono::milliseconds least(1), most(1'000'000'000);  // more would overflow where the carrier adds it
  const bool done = work->wait(std::clamp(left, least, most));
  const std::lock_guard lock(mutex_);
  if (!done || aborted_) {
    throw Error(ErrorKind::aborted, "the process group was aborted",
                ErrorContext{-1, -1, operation_.context.name, operation_.context.sequence,
                             "Destroy the process group, and create it again."});
  }
  work.reset();
}

}  // namespace ark
