// Runs a plan in simulated time. Workers process their queues in order, wait for events, read at a task's start and
// write at its end, in a random interleaving. Only queues and events order them.
//
// Every byte of memory is a 64-bit word. A task's result is a hash of everything that it read, stored in every byte
// that it writes, combined with the byte's index. So any read that is too early, too late or from the wrong copy
// changes the final inputs and outputs. The reference runs tasks one by one in program order, with separate memory for
// each buffer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <utility>
#include <variant>
#include <vector>

#include "compiler/schedule/plan.hpp"

namespace ark::compiler::test {

using Words = std::vector<uint64_t>;

inline uint64_t mixed(uint64_t a, uint64_t b) {
  uint64_t word = a * 0x9E3779B97F4A7C15u ^ (b + 0x7F4A7C15u + (a << 6) + (a >> 2));
  word ^= word >> 31;
  return word * 0xBF58476D1CE4E5B9u;
}

// Calls visit(byte of the buffer) for each byte that the tile accesses. Uses indices, not csrc/compiler/graph/box.hpp.
template <typename Visit>
void each_byte(const Graph& graph, const Stage& stage, const Access& access, int64_t begin, int64_t end, Visit visit) {
  const Value& value = graph.values()[access.value];
  const int64_t size = size_of(value.type);
  std::vector<int64_t> low(value.shape.size(), 0);
  std::vector<int64_t> high = value.shape;
  if (access.axis >= 0) {
    const int64_t length = value.shape[access.axis];
    low[access.axis] = begin * length / stage.extent;
    high[access.axis] = (end * length + stage.extent - 1) / stage.extent;
  }
  for (size_t dim = 0; dim < low.size(); ++dim) {
    if (low[dim] >= high[dim]) return;
  }
  std::vector<int64_t> at = low;
  for (;;) {
    int64_t element = value.offset;
    for (size_t dim = 0; dim < at.size(); ++dim) element += at[dim] * value.strides[dim];
    for (int64_t byte = 0; byte < size; ++byte) visit(element * size + byte);
    size_t dim = at.size();
    while (dim > 0 && ++at[dim - 1] == high[dim - 1]) at[dim - 1] = low[dim - 1], --dim;
    if (dim == 0) return;
  }
}

class SimulatedPlan {
 public:
  explicit SimulatedPlan(const Plan& plan) : plan_(plan) {}

  // Returns inputs and outputs after `steps` steps, buffer by buffer.
  std::vector<Words> in_program_order(int steps = 1) {
    start(false, 0);
    for (int step = 0; step < steps; ++step) {
      std::vector<int> order;
      for (size_t index = 0; index < plan_.tasks.size(); ++index) order.push_back(static_cast<int>(index));
      std::stable_sort(order.begin(), order.end(),
                       [&](int a, int b) { return plan_.tasks[a].stage < plan_.tasks[b].stage; });
      for (const int task : order) write(task, step, read(task, step));
    }
    return visible();
  }

  // Returns nothing if the plan got stuck.
  std::vector<Words> interleaved(uint64_t seed, int steps = 1) {
    std::mt19937_64 random(seed);
    start(true, seed);
    const size_t workers = plan_.queues.size();
    std::vector<size_t> next(workers, 0);  // positions in the queues, continued over steps
    std::vector<std::pair<bool, uint64_t>> running(workers, {false, 0});
    std::vector<int64_t> counters(plan_.events.size(), 0);
    // In some runs some workers are slower than others, which produces orders that a fair choice rarely does.
    std::vector<int> weight(workers, 1);
    const auto favour = [&] {
      for (int& each : weight) each = random() % 3 == 0 ? 1 : static_cast<int>(random() % 30 + 1);
    };
    favour();
    for (size_t idle = 0, moves = 0;; ++moves) {
      if (moves % 50 == 0) favour();
      std::vector<size_t> able;
      for (size_t worker = 0; worker < workers; ++worker) {
        const std::vector<int>& queue = plan_.queues[worker].tasks;
        if (running[worker].first) {
          able.push_back(worker);
        } else if (next[worker] < queue.size() * steps) {
          const Task& task = plan_.tasks[queue[next[worker] % queue.size()]];
          const auto step = static_cast<int64_t>(next[worker] / queue.size()) + 1;
          const bool ready =
              std::all_of(task.waits.begin(), task.waits.end(),
                          [&](int event) { return counters[event] >= step * plan_.events[event].threshold; }) &&
              std::all_of(task.carried.begin(), task.carried.end(),
                          [&](int event) { return counters[event] >= (step - 1) * plan_.events[event].threshold; });
          if (ready) able.push_back(worker);
        }
      }
      (void)idle;
      if (able.empty()) break;
      int total = 0;
      for (const size_t worker : able) total += weight[worker];
      int choice = static_cast<int>(random() % total);
      size_t worker = able[0];
      for (const size_t each : able) {
        worker = each;
        if ((choice -= weight[each]) < 0) break;
      }
      const std::vector<int>& queue = plan_.queues[worker].tasks;
      const int task = queue[next[worker] % queue.size()];
      const int step = static_cast<int>(next[worker] / queue.size());
      if (!running[worker].first) {
        running[worker] = {true, read(task, step)};
      } else {
        write(task, step, running[worker].second);
        running[worker].first = false;
        ++next[worker];
        for (const int event : plan_.tasks[task].signals) ++counters[event];
      }
    }
    for (size_t worker = 0; worker < workers; ++worker) {
      if (next[worker] != plan_.queues[worker].tasks.size() * steps) return {};
    }
    return visible();
  }

 private:
  void start(bool placed, uint64_t poison) {
    placed_ = placed;
    memory_.clear();
    stops_.clear();
    const std::vector<Buffer>& buffers = plan_.graph.buffers();
    for (size_t buffer = 0; buffer < buffers.size(); ++buffer) {
      Words words(buffers[buffer].bytes);
      const bool input = buffers[buffer].kind == Buffer::Kind::input;
      for (size_t byte = 0; byte < words.size(); ++byte) words[byte] = mixed(input ? buffer + 1 : poison, byte + 77);
      memory_.push_back(std::move(words));
    }
    arena_.assign(plan_.arena_bytes, mixed(poison, 5));
    own_.assign(plan_.queues.size(), Words(plan_.own_bytes, mixed(poison, 6)));
  }
  uint64_t& word(int buffer, int64_t byte, const Task& task) {
    const Placement& placement = plan_.placements[buffer];
    if (!placed_ || plan_.graph.buffers()[buffer].kind != Buffer::Kind::temporary) return memory_[buffer][byte];
    return (placement.own ? own_[task.worker] : arena_).at(placement.offset + byte);
  }
  uint64_t read(int index, int step) {
    const Task& task = plan_.tasks[index];
    const Stage& stage = plan_.stages[task.stage];
    uint64_t hash = mixed(task.stage, task.begin);
    for (const Access& access : stage.accesses) {
      if (access.write) continue;
      const int buffer = plan_.graph.values()[access.value].buffer;
      each_byte(plan_.graph, stage, access, task.begin, task.end,
                [&](int64_t byte) { hash = mixed(hash, word(buffer, byte, task)); });
    }
    return hash;
  }
  void write(int index, int step, uint64_t hash) {
    const Task& task = plan_.tasks[index];
    const Stage& stage = plan_.stages[task.stage];
    if (std::holds_alternative<StopStage>(stage.body)) stops_.push_back(mixed(hash, step * 64 + task.worker));
    for (const Access& access : stage.accesses) {
      if (!access.write) continue;
      const int buffer = plan_.graph.values()[access.value].buffer;
      each_byte(plan_.graph, stage, access, task.begin, task.end,
                [&](int64_t byte) { word(buffer, byte, task) = mixed(hash, byte); });
    }
  }
  std::vector<Words> visible() const {
    std::vector<Words> seen;
    for (size_t buffer = 0; buffer < memory_.size(); ++buffer) {
      if (plan_.graph.buffers()[buffer].kind != Buffer::Kind::temporary) seen.push_back(memory_[buffer]);
    }
    seen.push_back(stops_);  // what each worker saw in each step, in any order
    std::sort(seen.back().begin(), seen.back().end());
    return seen;
  }

  const Plan& plan_;
  bool placed_ = false;
  std::vector<Words> memory_;  // by buffer
  Words stops_;
  Words arena_;
  std::vector<Words> own_;  // by worker
};

}  // namespace ark::compiler::test
