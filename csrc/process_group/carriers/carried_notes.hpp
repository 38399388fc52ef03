// Tells all ranks about a failure across nodes: the rank that notices sends a note to every other rank.
//
// Shared memory reports failures within a node (health/group_health.hpp), but a rank that waits for another node's
// message does not look there. So a thread of each rank waits for notes and hands over the first one. All ranks then
// fail with the same cause, and each tells the others. A closing connection may lose what the peer has not read, so a
// rank that leaves a failed group waits for the others' notes, which show that they know: briefly for a node that is
// late or gone, longer for ranks that are only slow.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "collectives/node_plan.hpp"
#include "process_group/carriers/carrier.hpp"
#include "util/error.hpp"

namespace ark {

class FailureNotes {
 public:
  // heard: called on the thread that receives notes.
  FailureNotes(std::shared_ptr<Carrier> carrier, int rank, int size, const NodePlan& plan,
               std::function<void(const Error&)> heard);
  ~FailureNotes();

  void tell(const Error& error);  // from any thread; never waits or throws
  void close();                   // ends the thread; after a failure it first waits for the others' notes

 private:
  struct Note {
    uint64_t sequence;
    int32_t from, culprit;
    uint32_t kind;
    char operation[44];
    char text[448];
  };
  static_assert(sizeof(Note) == 512);

  void listen();
  bool expect();  // posts the next receive; false: no more
  void hand_over(const Note& note) const;
  void send_to(int peer);
  bool may_leave(bool patient) const;

  const std::shared_ptr<Carrier> carrier_;
  const int rank_, size_;
  const NodePlan& plan_;
  const std::function<void(const Error&)> heard_;
  Note incoming_{}, outgoing_{};
  std::mutex mutex_;  // guards the members below
  Carrier::MessagePtr listening_;
  std::vector<Carrier::MessagePtr> sends_;
  std::condition_variable changed_;
  bool told_ = false, closing_ = false, heard_any_ = false;
  std::vector<bool> settled_;  // by rank: it has sent its note, or its connection has ended
  std::thread thread_;
};

}  // namespace ark
