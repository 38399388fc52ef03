// The happens-before order of a plan's tasks: vector clocks, found by simulating the plan.
//
// In the simulation every worker runs its queue in order; a task starts when all its waits are met, and signals when it
// ends. Nothing that started is undone, so the order in which workers are served does not matter: either all tasks end
// or the same ones are stuck. A task's clock says how many tasks of each queue have certainly ended when it starts. An
// event passes on what all its signallers knew, since a wait is met only when all have signalled. A packet's waiter
// knows only that the signallers' results arrived, nothing that the signallers knew.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// "task 17 (matmul, layers.0.attn.wq, tile [0, 64) on worker 1)"
std::string describe(const Plan& plan, int task);

class Order {
 public:
  // Simulates `steps` consecutive steps (2 for `carried` events). Throws Error(invalid_argument) naming the first task
  // that can never start. Indices must be valid, and each task must be in its worker's queue once.
  explicit Order(const Plan& plan, int steps = 1);

  int steps() const { return steps_; }
  // How many tasks of `worker`'s queue, counted across steps, have certainly ended when the task starts.
  int64_t ended(int task, int worker, int step = 0) const { return clock(task, step)[worker]; }
  // The task's place in its queue, counted across steps.
  int64_t place(int task, int step = 0) const;
  bool before(int first, int second, int first_step = 0, int second_step = 0) const;

 private:
  const int32_t* clock(int task, int step) const {
    return clocks_.data() + (static_cast<size_t>(step) * tasks_ + task) * workers_;
  }
  [[noreturn]] void stuck(const Plan& plan, const std::vector<size_t>& next) const;

  int steps_;
  size_t tasks_, workers_;
  std::vector<int> worker_of_;  // by task
  std::vector<int> place_of_;   // by task, within a step
  std::vector<int> length_;     // of each queue
  std::vector<int32_t> clocks_;
};

}  // namespace ark::compiler
