// Failures told across nodes: who notices one sends a note of it to every other rank, and each rank listens.
//
// Within a node shared memory tells (health/group_health.hpp), but a rank that waits for a message of another node does
// not look there, and what it waits for may never be sent. A thread of each rank waits for notes, in the carrier, and
// hands the first one over; so all ranks of the group fail with the same story, and each tells all the others once. A
// connection that ends may take with it what the other side has not read yet; so a rank that leaves a group that has
// failed waits a little for the others' notes, which say that they know.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "process_group/carriers/carrier.hpp"
#include "util/error.hpp"

namespace ark {

class FailureNotes {
 public:
  // heard: on the notes' thread.
  FailureNotes(std::shared_ptr<Carrier> carrier, int rank, int size, std::function<void(const Error&)> heard);
  ~FailureNotes();

  void tell(const Error& error);  // from any thread; never waits, never throws
  void close();                   // ends the thread; where the group has failed, after hearing of the others

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
  bool expect();  // the next note; false: no more
  void hand_over(const Note& note) const;

  const std::shared_ptr<Carrier> carrier_;
  const int rank_, size_;
  const std::function<void(const Error&)> heard_;
  Note incoming_{}, outgoing_{};
  std::mutex mutex_;  // of what follows
  Carrier::MessagePtr listening_;
  std::vector<Carrier::MessagePtr> sends_;
  std::condition_variable changed_;
  bool told_ = false, closing_ = false;
  int heard_of_ = 0;  // notes
  std::thread thread_;
};

}  // namespace ark
