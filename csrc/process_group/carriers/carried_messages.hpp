// The messages of one collective between ranks of different nodes: many sends and receives of a carrier at a time.
//
// Messages of one channel between two ranks arrive in send order. Channels use the highest tags of the carrier; users'
// tags must be lower (first_reserved_tag). Gloo terminates the process if a message's size differs from its posted
// receive. So a rank sends data only after the receiver's first message shows the same collective
// (carried_communicator.hpp); receives may be posted earlier.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
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
  // Waits throw this after abort(): the group has failed and knows the cause.
  struct Aborted {};

  using Work = Carrier::MessagePtr;

  // Extra wait beyond the deadline. A late rank may itself wait for a rank of its node, which that node detects and
  // reports (GroupHealth::find_culprit watches for 200 ms). Once Gloo gives up, it closes the connection that would
  // carry the report.
  static constexpr std::chrono::milliseconds kForALateStory{1000};

  // left: takes over receives into longer-lived memory when a collective fails. If such a receive lost its buffer, Gloo
  // would stop reading from that rank, and notes of failures could not arrive. beats: asked about silent nodes.
  // progress: shows the ranks of this node that this rank waits for another node.
  CarriedMessages(Carrier& carrier, const Operation& operation, int rank, std::vector<Work>& left,
                  const NodeBeats& beats, ControlBlock& progress)
      : carrier_(carrier), operation_(operation), rank_(rank), left_(left), beats_(beats), progress_(progress) {}
  ~CarriedMessages();

  // The memory must stay unchanged until this number, or all, have been waited for. Zero bytes send no message.
  size_t send(int peer, MessageChannel channel, const void* data, size_t bytes);
  // The memory is filled once its number has been waited for.
  size_t receive(int peer, MessageChannel channel, void* data, size_t bytes, bool outlives = false);
  // Begins another message with this peer; an error names it as one of a wait would.
  Work started(int peer, const std::function<Work()>& start);
  void wait_for(size_t number);
  void wait_for(Work& work, int peer);  // for a message that was begun earlier
  void wait_for_all();
  void abort();  // from any thread
  const Operation& operation() const { return operation_; }
  uint64_t sent() const { return sent_; }  // number of messages

 private:
  struct Begun {
    Work work;
    int peer;
    bool outlives;
  };
  // Why a message failed, as the carrier says; empty text: it says nothing.
  struct Failure {
    Failure() = default;
    explicit Failure(const std::exception& error);
    std::string text;
    ErrorKind kind = ErrorKind::peer_lost;
    std::string remedy = "Look at that rank's output; destroy the process group (or restart the job) before going on.";
  };
  size_t begin(int peer, Work work, bool outlives);
  std::string look_for_node(int peer);
  void hear_the_story();  // throws Aborted if another rank reports the cause soon
  [[noreturn]] void raise(int peer, Failure& failure, bool late, const std::string& silence) const;

  Carrier& carrier_;
  const Operation& operation_;
  const int rank_;
  std::vector<Work>& left_;
  const NodeBeats& beats_;
  ControlBlock& progress_;
  uint64_t sent_ = 0;
  std::mutex mutex_;  // guards the members below
  std::condition_variable ended_;
  std::vector<Begun> begun_;
  bool aborted_ = false;
};

}  // namespace ark
