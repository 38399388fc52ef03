// Messages of one collective between the ranks of a carried group: the carrier's send and recv, many at a time.
//
// Messages of one channel between two ranks arrive in the order in which they are sent. A channel is one of the
// greatest tags that a message may have; users' messages keep below them (first_reserved_tag).
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>
#include <limits>
#include <mutex>
#include <vector>

#include "collectives/operation.hpp"

namespace ark {

enum class MessageChannel : int32_t { agreement = 0, data = 1, results = 2 };
inline constexpr int32_t kFirstReservedTag = std::numeric_limits<int32_t>::max() - 15;

inline const std::byte* at_offset(const void* data, size_t bytes) {
  return static_cast<const std::byte*>(data) + bytes;
}
inline std::byte* at_offset(void* data, size_t bytes) {
  return static_cast<std::byte*>(data) + bytes;
}

class CarriedMessages {
 public:
  CarriedMessages(c10d::Backend& carrier, const Operation& operation) : carrier_(carrier), operation_(operation) {}

  // The memory stays as it is until wait_for_sends() or the end. No bytes: no message.
  void send(int peer, MessageChannel channel, const void* data, size_t bytes);
  // Fills the memory by the time that receive's number has been waited for.
  size_t receive(int peer, MessageChannel channel, void* data, size_t bytes);
  void wait_for(size_t receive);
  void wait_for_all();  // sends, too
  void abort();         // from any thread: waits throw Error(aborted)

 private:
  using Work = c10::intrusive_ptr<c10d::Work>;
  void begun(std::vector<Work>& works, Work work);
  void wait(Work& work);

  c10d::Backend& carrier_;
  const Operation& operation_;
  std::mutex mutex_;  // of what follows
  std::vector<Work> sends_, receives_;
  bool aborted_ = false;
};

}  // namespace ark
