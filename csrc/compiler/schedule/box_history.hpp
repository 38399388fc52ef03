// The history of accesses to bytes: the tiler asks where a tile's inputs come from, the events what a task must wait
// for, the validator what must be ordered.
//
// Stages are added in program order. A query for a box returns the conflicting tasks: those that wrote a byte of it
// and, if the asker writes, those that read one. Tasks hidden by a later write are left out: they conflict with that
// write, so ordering both pairs orders them too. Own buffers (one copy per worker) have no conflicts between workers;
// the queue orders one worker's. By default every buffer is its own memory. With placements, temporaries are at their
// place in the arena, which is how one step conflicts with the next.
#pragma once

#include <functional>
#include <vector>

#include "compiler/graph/box.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

class BoxHistory {
 public:
  // One access of a stage: the whole box and each task's part. `same`: every task touches all of it.
  struct Record {
    int stage = -1;
    int step = 0;
    bool write = false;
    bool same = false;
    Box whole;
    std::vector<int> tasks;
    std::vector<Box> boxes;  // by task; empty where `same`
  };

  BoxHistory(const Graph& graph, const std::vector<Stage>& stages, const std::vector<Placement>* placements = nullptr);

  // Adds the accesses of one stage's tasks. `indices`: into `tasks`.
  void add(int stage, const std::vector<int>& indices, const std::vector<Task>& tasks, int step = 0);
  void set_own(int buffer) { skipped_[buffer] = true; }
  bool may_conflict(int buffer) const { return buffer >= 0 && !skipped_[buffer]; }

  // Visits the newest conflicts first. A task may be visited more than once.
  void conflicts(int buffer, const Box& box, bool write,
                 const std::function<void(const Record&, int task)>& visit) const;

 private:
  const Graph& graph_;
  const std::vector<Stage>& stages_;
  std::vector<int> space_;      // by buffer: the memory it is in
  std::vector<int64_t> shift_;  // by buffer: its offset there
  std::vector<bool> written_;   // by buffer: some stage writes it; others have no conflicts
  std::vector<bool> skipped_;
  std::vector<std::vector<Record>> records_;  // by space
};

}  // namespace ark::compiler
