// Messages of one collective between ranks of different nodes: the carrier's send and recv, many at a time.
//
// Messages of one channel between two ranks arrive in the order in which they are sent. A channel is one of the
// greatest tags that a message may have; users' messages keep below them (first_reserved_tag). The carrier ends the
// process where a message has another size than what was posted for it, so a rank sends data only once it has the
// receiver's word (carried_communicator.hpp) that it is in the same collective; the receiver may post before.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <limits>
#include <mutex>
#include <string>
#include <vector>

#include "collectives/node_beats.hpp"
#include "collectives/operation.hpp"
#include "health/control_block.hpp"
#include "process_group/carriers/carrier.hpp"

namespace ark {

enum class MessageChannel : int32_t { agreement = 0, data = 1, results = 2, failure = 3 };
inline constexpr int32_t kFirstReservedTag = std::numeric_limits<int32_t>::max() - 15;

inline const std::byte* at_offset(const void* data, size_t bytes) {
  return static_cast<const std::byte*>(data) + bytes;
}
inline std::byte* at_offset(void* data, size_t bytes) {
  return static_cast<std::byte*>(data) + bytes;
}

int tag_of(MessageChannel channel);

class CarriedMessages {
 public:
  // Thrown by waits after abort(): the group has failed, and knows why.
  struct Aborted {};

  using Work = Carrier::MessagePtr;

  // A rank that is late may be alive and wait for one of its node, which that node finds out and tells
  // (GroupHealth::find_culprit watches for 200 ms). Waited for before the carrier gives up: Gloo then closes the
  // connection that the story would come by.
  static constexpr std::chrono::milliseconds kForALateStory{1000};

  // left: where a collective that fails leaves receives into memory that outlives it. Gloo reads no further from a rank
  // whose message has lost its place, so notes of failures would not pass. Other receives go to users' tensors.
  // beats: asked for a node whose ranks keep silent. progress: says that this rank waits for another node.
  CarriedMessages(Carrier& carrier, const Operation& operation, int rank, std::vector<Work>& left,
                  const NodeBeats& beats, ControlBlock& progress)
      : carrier_(carrier), operation_(operation), rank_(rank), left_(left), beats_(beats), progress_(progress) {}
  ~CarriedMessages();

  // The memory stays as it is until the number has been waited for, or all have. No bytes: no message.
  size_t send(int peer, MessageChannel channel, const void* data, size_t bytes);
  // Fills the memory by the time that its number has been waited for.
  size_t receive(int peer, MessageChannel channel, void* data, size_t bytes, bool outlives = false);
  void wait_for(size_t number);
  void wait_for(Work& work, int peer);  // of a message that was begun before
  void wait_for_all();
  void abort();  // from any thread
  const Operation& operation() const { return operation_; }
  uint64_t sent() const { return sent_; }  // messages

 private:
  struct Begun {
    Work work;
    int peer;
    bool outlives;
  };
  size_t begin(int peer, Work work, bool outlives);
  std::string look_for_node(int peer);

  Carrier& carrier_;
  const Operation& operation_;
  const int rank_;
  std::vector<Work>& left_;
  const NodeBeats& beats_;
  ControlBlock& progress_;
  uint64_t sent_ = 0;
  std::mutex mutex_;  // of what follows
  std::condition_variable ended_;
  std::vector<Begun> begun_;
  bool aborted_ = false;
};

}  // namespace ark
