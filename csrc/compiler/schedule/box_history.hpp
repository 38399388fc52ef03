// Who touched which bytes so far: asked by the tiler (where do a tile's inputs come from), by the events (what must a
// task wait for) and by the validator (what must be ordered).
//
// Stages are added in program order. A question about a box answers with the tasks that conflict with it: those
// that wrote a byte of it, and, where the asker writes, those that read one. What a later write hides is left out:
// it conflicts with that write, so ordering both pairs orders it too.
//
// Own buffers (one copy a worker) have no conflicts between workers; on one worker the queue orders them.
//
// By default buffers are apart. With placements, temporaries lie where the arena has them: that is how one step meets
// the next.
#pragma once

#include <functional>
#include <vector>

#include "compiler/graph/box.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

class BoxHistory {
 public:
  // All of what a stage's access touches, and what each of its tasks does; `same`: every task touches all of it.
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

  // `tasks` (indices) of one stage with their tiles.
  void add(int stage, const std::vector<int>& indices, const std::vector<Task>& tasks, int step = 0);
  void set_own(int buffer) { skipped_[buffer] = true; }
  bool may_conflict(int buffer) const { return buffer >= 0 && !skipped_[buffer]; }

  // The newest first; a task may come up more than once.
  void conflicts(int buffer, const Box& box, bool write,
                 const std::function<void(const Record&, int task)>& visit) const;

 private:
  const Graph& graph_;
  const std::vector<Stage>& stages_;
  std::vector<int> space_;      // by buffer: what it shares bytes with
  std::vector<int64_t> shift_;  // by buffer: where in its space
  std::vector<bool> written_;   // buffers that some stage writes: the others have no conflicts
  std::vector<bool> skipped_;
  std::vector<std::vector<Record>> records_;  // by space
};

}  // namespace ark::compiler
