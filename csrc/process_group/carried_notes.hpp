// Failures told across nodes: who notices one sends a note of it to every other rank, and each rank listens.
//
// Within a node shared memory tells (health/group_health.hpp), but a rank that waits for a message of another node does
// not look there, and what it waits for may never be sent. A thread of each rank waits for one note, in the carrier,
// and hands it over; so all ranks of the group fail with the same story. A rank tells or hears once.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "error.hpp"

namespace ark {

class FailureNotes {
 public:
  // heard: on the notes' thread.
  FailureNotes(c10::intrusive_ptr<c10d::Backend> carrier, int rank, int size, std::function<void(const Error&)> heard);
  ~FailureNotes();

  void tell(const Error& error);  // from any thread; never waits, never throws
  void close();                   // ends the thread

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

  const c10::intrusive_ptr<c10d::Backend> carrier_;
  const int rank_, size_;
  const std::function<void(const Error&)> heard_;
  Note incoming_{}, outgoing_{};
  c10::intrusive_ptr<c10d::Work> listening_;
  std::mutex mutex_;  // of what follows
  std::vector<c10::intrusive_ptr<c10d::Work>> sends_;
  bool known_ = false;
  std::thread thread_;
};

}  // namespace ark
