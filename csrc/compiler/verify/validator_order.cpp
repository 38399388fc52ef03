// Checks that queues and events order accesses to the same bytes as the program did: within a step, in workers' own
// copies, in bytes that several temporaries share, and across two steps without a launch in between. See validator.hpp.
//
// The vector clocks of Order tell which tasks certainly end before another starts. Program order is the order of
// stages. Tasks of one stage may run concurrently, so they may share only bytes that all of them just read.
#include <algorithm>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "compiler/graph/box.hpp"
#include "compiler/schedule/box_history.hpp"
#include "compiler/schedule/memory_planner.hpp"
#include "compiler/verify/plan_error.hpp"
#include "compiler/verify/validator.hpp"

namespace ark::compiler {

namespace {

// What the checkers of order share.
struct Ordered {
  Ordered(const Plan& plan, const Order& order) : plan_(plan), order_(order), tasks_of_(plan.stages.size()) {
    for (size_t index = 0; index < plan.tasks.size(); ++index) {
      tasks_of_[plan.tasks[index].stage].push_back(static_cast<int>(index));
    }
  }
  int buffer_of(const Access& access) const { return plan_.graph.values()[access.value].buffer; }
  std::string place_of(const Access& access) const {
    return formatted("value {} in buffer {}", access.value, buffer_of(access));
  }

  const Plan& plan_;
  const Order& order_;
  std::vector<std::vector<int>> tasks_of_;
};

class OrderChecker : private Ordered {
 public:
  using Ordered::Ordered;
  void run() {
    check_conflicts();
    for (int stage = 0; stage < static_cast<int>(plan_.stages.size()); ++stage) check_side_by_side(stage);
    check_defined();
  }

 private:
  // Whether the task polls the packets that the other writes.
  bool polls(int first, int second, const Access& access) const {
    if (access.write || !plan_.placements[buffer_of(access)].packets) return false;
    const std::vector<int>& signals = plan_.tasks[first].signals;
    const std::vector<int>& waits = plan_.tasks[second].waits;
    return std::any_of(waits.begin(), waits.end(), [&](int event) {
      return plan_.events[event].packets && std::find(signals.begin(), signals.end(), event) != signals.end();
    });
  }
  void need_order(int first, int second, const Access& access, bool wrote) const {
    if (order_.before(first, second) || polls(first, second, access)) return;
    plan_error("{}{}{}, which {}{}: nothing makes it wait until that has ended", describe(plan_, second),
               access.write ? " writes " : " reads ", place_of(access), describe(plan_, first),
               wrote ? " writes" : " reads");
  }
  void check_conflicts();
  void check_side_by_side(int stage) const;
  void check_defined() const;
};

void OrderChecker::check_conflicts() {
  BoxHistory history(plan_.graph, plan_.stages);
  for (size_t buffer = 0; buffer < plan_.placements.size(); ++buffer) {
    if (plan_.placements[buffer].own) history.set_own(static_cast<int>(buffer));
  }
  for (int stage = 0; stage < static_cast<int>(plan_.stages.size()); ++stage) {
    const Stage& what = plan_.stages[stage];
    if (tasks_of_[stage].empty()) continue;
    for (const Access& access : what.accesses) {
      if (!history.may_conflict(buffer_of(access))) continue;
      if (access.axis < 0 || plan_.tasks[tasks_of_[stage][0]].replica) {
        // All tasks touch the same bytes, so of each worker's conflicting tasks only the last one matters.
        std::vector<std::pair<int, bool>> last(plan_.queues.size(), {-1, false});
        std::vector<int> polled;  // tasks that write packets: all matter
        history.conflicts(buffer_of(access), box_of(plan_.graph, what, access, 0, what.extent), access.write,
                          [&](const BoxHistory::Record& record, int task) {
                            if (plan_.placements[buffer_of(access)].packets) polled.push_back(task);
                            auto& slot = last[plan_.tasks[task].worker];
                            if (slot.first < 0 || order_.place(slot.first) < order_.place(task)) {
                              slot = {task, record.write};
                            }
                          });
        for (const int task : tasks_of_[stage]) {
          for (const auto& [before, wrote] : last) {
            if (before >= 0) need_order(before, task, access, wrote);
          }
          for (const int before : polled) need_order(before, task, access, true);
        }
        continue;
      }
      for (const int task : tasks_of_[stage]) {
        const Box box = box_of(plan_.graph, what, access, plan_.tasks[task].begin, plan_.tasks[task].end);
        history.conflicts(buffer_of(access), box, access.write, [&](const BoxHistory::Record& record, int before) {
          need_order(before, task, access, record.write);
        });
      }
    }
    history.add(stage, tasks_of_[stage], plan_.tasks);
  }
}

// Whether tiles, cut along one dimension at whole indices, are certainly disjoint because no two indices share a byte.
bool apart_by_index(const Stage& stage, const Access& access, const Value& value, const std::vector<Task>& tasks,
                    const std::vector<int>& indices) {
  if (access.axis < 0) return false;
  const int64_t length = value.shape[access.axis];
  for (const int index : indices) {
    if (tasks[index].begin * length % stage.extent != 0) return false;
  }
  std::vector<std::pair<int64_t, int64_t>> dimensions;  // stride, count
  for (size_t dim = 0; dim < value.shape.size(); ++dim) {
    if (value.shape[dim] > 1) dimensions.push_back({value.strides[dim], value.shape[dim]});
  }
  std::sort(dimensions.begin(), dimensions.end());
  int64_t span = 1;
  for (const auto& [stride, count] : dimensions) {
    if (stride < span) return false;
    span += stride * (count - 1);
  }
  return true;
}

void OrderChecker::check_side_by_side(int index) const {
  const Stage& stage = plan_.stages[index];
  const std::vector<int>& tasks = tasks_of_[index];
  if (tasks.size() < 2 || plan_.tasks[tasks[0]].replica) return;
  for (const Access& write : stage.accesses) {
    if (!write.write) continue;
    const Value& value = plan_.graph.values()[write.value];
    const bool apart = apart_by_index(stage, write, value, plan_.tasks, tasks);
    for (const Access& other : stage.accesses) {
      if (buffer_of(other) != buffer_of(write)) continue;
      const Value& view = plan_.graph.values()[other.value];
      if (apart && other.axis == write.axis && view.offset == value.offset && view.shape == value.shape &&
          view.strides == value.strides && view.type == value.type) {
        continue;
      }
      if (!overlap(box_of(value), box_of(view))) continue;
      std::vector<Box> boxes;
      for (const int task : tasks) {
        boxes.push_back(box_of(plan_.graph, stage, other, plan_.tasks[task].begin, plan_.tasks[task].end));
      }
      for (const int task : tasks) {
        const Box mine = box_of(plan_.graph, stage, write, plan_.tasks[task].begin, plan_.tasks[task].end);
        for (size_t beside = 0; beside < tasks.size(); ++beside) {
          if (tasks[beside] == task || !overlap(mine, boxes[beside])) continue;
          plan_error("{} writes {} where {} of the same stage touches value {}: they may run side by side",
                     describe(plan_, task), place_of(write), describe(plan_, tasks[beside]), other.value);
        }
      }
    }
  }
}

// What a stage reads of temporaries and outputs must have been written by earlier stages.
void OrderChecker::check_defined() const {
  std::map<int, std::vector<Box>> written;  // by buffer
  for (int index = 0; index < static_cast<int>(plan_.stages.size()); ++index) {
    const Stage& stage = plan_.stages[index];
    if (stage.extent == 0) continue;
    for (const Access& access : stage.accesses) {
      const int buffer = buffer_of(access);
      if (access.write || plan_.graph.buffers()[buffer].kind == Buffer::Kind::input) continue;
      const Box box = box_of(plan_.graph.values()[access.value]);
      const std::vector<Box>& parts = written[buffer];
      if (box.empty() || std::any_of(parts.begin(), parts.end(), [&](const Box& part) { return covers(part, box); })) {
        continue;
      }
      // Several writes together: exact if that is little work, else by their total size.
      int64_t missing = 0;
      if (box.end() - box.offset <= 1 << 20) {
        std::vector<char> known(box.end() - box.offset, 0);
        const auto mark = [&](const Box& part, char from, char to) {
          int64_t changed = 0;
          each_piece(part, [&](int64_t offset, int64_t rows, int64_t stride) {
            for (int64_t row = 0; row < rows; ++row) {
              const int64_t low = std::max(offset + row * stride, box.offset);
              const int64_t high = std::min(offset + row * stride + part.width, box.end());
              for (int64_t byte = low; byte < high; ++byte) {
                if (known[byte - box.offset] == from) known[byte - box.offset] = to, ++changed;
              }
            }
          });
          return changed;
        };
        for (const Box& part : parts) mark(part, 0, 1);
        missing = mark(box, 0, 2);
      } else {
        missing = box.bytes();
        for (const Box& part : parts) missing -= overlap(part, box) ? part.bytes() : 0;
      }
      if (missing > 0) {
        const std::string who =
            tasks_of_[index].empty() ? formatted("stage {}", index) : describe(plan_, tasks_of_[index][0]);
        plan_error("{} reads {}, of which {} bytes were not written before", who, place_of(access), missing);
      }
    }
    for (const Access& access : stage.accesses) {
      if (access.write) written[buffer_of(access)].push_back(box_of(plan_.graph.values()[access.value]));
    }
  }
}

class MemoryChecker : private Ordered {
 public:
  using Ordered::Ordered;
  void check_own() const;
  void check_reuse() const;

 private:
  bool own(int buffer) const { return plan_.placements[buffer].own; }
};

// For own copies: tasks on one worker keep program order, and a reader's bytes were written on the same worker.
void MemoryChecker::check_own() const {
  std::map<int, std::vector<std::pair<int, Box>>> writers;  // by buffer: stages and what they write
  std::vector<std::vector<char>> on(plan_.stages.size());   // by stage and worker: whether there is a replica
  for (int stage = 0; stage < static_cast<int>(plan_.stages.size()); ++stage) {
    on[stage].resize(plan_.queues.size(), 0);
    for (const int task : tasks_of_[stage]) on[stage][plan_.tasks[task].worker] = 1;
    for (const Access& access : plan_.stages[stage].accesses) {
      const Box box = box_of(plan_.graph.values()[access.value]);
      if (access.write && own(buffer_of(access))) writers[buffer_of(access)].push_back({stage, box});
    }
  }
  if (writers.empty()) return;
  for (const Queue& queue : plan_.queues) {
    std::map<int, int> last;  // by buffer: the last task that touched it
    for (const int index : queue.tasks) {
      const Task& task = plan_.tasks[index];
      for (const Access& access : plan_.stages[task.stage].accesses) {
        const int buffer = buffer_of(access);
        if (!own(buffer)) continue;
        const auto [found, fresh] = last.try_emplace(buffer, index);
        if (!fresh && plan_.tasks[found->second].stage > task.stage) {
          plan_error("{} touches {} behind {}, against program order", describe(plan_, index), place_of(access),
                     describe(plan_, found->second));
        }
        found->second = index;
        if (access.write) continue;
        const Box box = box_of(plan_.graph.values()[access.value]);
        for (const auto& [stage, wrote] : writers[buffer]) {
          if (stage < task.stage && !on[stage][task.worker] && overlap(wrote, box)) {
            plan_error("{} reads {} from its worker's own copy, which no replica of stage {} wrote there",
                       describe(plan_, index), place_of(access), stage);
          }
        }
      }
    }
  }
}

// For temporaries that share bytes: all tasks that touch one have ended before any task that touches the other starts.
void MemoryChecker::check_reuse() const {
  const size_t workers = plan_.queues.size();
  struct Life {
    int buffer = -1;
    std::vector<int> first, last;  // by worker: tasks; -1: none
    std::vector<int64_t> ended;    // by worker: how many of its tasks have ended when any of these starts
  };
  std::vector<Life> lives(plan_.placements.size());
  for (const Queue& queue : plan_.queues) {
    for (const int index : queue.tasks) {
      const Task& task = plan_.tasks[index];
      for (const Access& access : plan_.stages[task.stage].accesses) {
        const int buffer = buffer_of(access);
        if (plan_.placements[buffer].offset < 0) continue;
        Life& life = lives[buffer];
        if (life.buffer < 0) {
          life.buffer = buffer;
          life.first.assign(workers, -1);
          life.last.assign(workers, -1);
          life.ended.assign(workers, std::numeric_limits<int64_t>::max());
        }
        life.last[task.worker] = index;
        if (life.first[task.worker] >= 0) continue;
        life.first[task.worker] = index;
        for (size_t other = 0; other < workers; ++other) {
          life.ended[other] = std::min(life.ended[other], order_.ended(index, static_cast<int>(other)));
        }
      }
    }
  }
  std::erase_if(lives, [](const Life& life) { return life.buffer < 0; });
  const auto offset = [&](const Life& life) { return plan_.placements[life.buffer].offset; };
  const auto end = [&](const Life& life) {
    return offset(life) + placed_bytes(plan_.graph.buffers()[life.buffer], plan_.placements[life.buffer]);
  };
  // A pair of tasks that are not ordered, or -1. For own copies only tasks on the same worker can conflict.
  const auto unordered = [&](const Life& a, const Life& b, bool alone) {
    for (size_t worker = 0; worker < workers; ++worker) {
      if (a.last[worker] < 0) continue;
      const int64_t place = order_.place(a.last[worker]);
      if (alone) {
        if (b.first[worker] >= 0 && order_.place(b.first[worker]) <= place) {
          return std::pair(a.last[worker], b.first[worker]);
        }
        continue;
      }
      if (b.ended[worker] > place) continue;
      for (const int first : b.first) {
        if (first >= 0 && !order_.before(a.last[worker], first)) return std::pair(a.last[worker], first);
      }
    }
    return std::pair(-1, -1);
  };
  std::sort(lives.begin(), lives.end(), [&](const Life& a, const Life& b) { return offset(a) < offset(b); });
  for (size_t one = 0; one < lives.size(); ++one) {
    for (size_t two = one + 1; two < lives.size() && offset(lives[two]) < end(lives[one]); ++two) {
      const Life& a = lives[one];
      const Life& b = lives[two];
      if (own(a.buffer) != own(b.buffer)) continue;
      if (plan_.placements[a.buffer].packets || plan_.placements[b.buffer].packets) {
        const int toucher = *std::find_if(a.first.begin(), a.first.end(), [](int task) { return task >= 0; });
        plan_error(
            "{} touches buffer {}, which shares bytes with buffer {} at {} of the arena: one holds packets, which "
            "share with nobody",
            describe(plan_, toucher), a.buffer, b.buffer, offset(b));
      }
      const auto [first, second] = unordered(a, b, own(a.buffer));
      if (first < 0 || unordered(b, a, own(a.buffer)).first < 0) continue;
      plan_error("{} uses buffer {} at {} of the arena, where {} may still use buffer {}", describe(plan_, second),
                 b.buffer, offset(b), describe(plan_, first), a.buffer);
    }
  }
}

// A counter does not tell steps apart: if a signal of the next step came before another one of this step, a waiter
// would mistake it for this step's.
void check_counters(const Plan& plan, const Order& order) {
  std::vector<std::vector<int>> signallers(plan.events.size());
  for (size_t index = 0; index < plan.tasks.size(); ++index) {
    for (const int event : plan.tasks[index].signals) signallers[event].push_back(static_cast<int>(index));
  }
  for (size_t event = 0; event < signallers.size(); ++event) {
    for (const int next : signallers[event]) {
      for (const int before : signallers[event]) {
        if (order.before(before, next, 0, 1)) continue;
        plan_error("{} may signal event {} for the next step before {} has for this one", describe(plan, next), event,
                   describe(plan, before));
      }
    }
  }
}

}  // namespace

void check_order(const Plan& plan) {
  const Order order(plan);
  OrderChecker(plan, order).run();
  const MemoryChecker memory(plan, order);
  memory.check_own();
  memory.check_reuse();
}

void check_steps(const Plan& plan) {
  const Order order(plan, 2);
  check_counters(plan, order);
  BoxHistory history(plan.graph, plan.stages, &plan.placements);
  std::vector<std::vector<int>> tasks_of(plan.stages.size());
  for (size_t index = 0; index < plan.tasks.size(); ++index) {
    tasks_of[plan.tasks[index].stage].push_back(static_cast<int>(index));
  }
  for (const int step : {0, 1}) {
    for (int stage = 0; stage < static_cast<int>(plan.stages.size()); ++stage) {
      if (tasks_of[stage].empty()) continue;
      for (const Access& access : plan.stages[stage].accesses) {
        const int buffer = plan.graph.values()[access.value].buffer;
        if (step == 0 || !history.may_conflict(buffer)) continue;
        for (const int task : tasks_of[stage]) {
          const Box box = box_of(plan.graph, plan.stages[stage], access, plan.tasks[task].begin, plan.tasks[task].end);
          history.conflicts(buffer, box, access.write, [&](const BoxHistory::Record& record, int before) {
            if (record.step == 1 || order.before(before, task, 0, 1)) return;
            plan_error(
                "{}{} value {} in buffer {} in the next step while in this one {} may still touch the same bytes",
                describe(plan, task), access.write ? " writes" : " reads", access.value, buffer,
                describe(plan, before));
          });
        }
      }
      history.add(stage, tasks_of[stage], plan.tasks, step);
    }
  }
}

}  // namespace ark::compiler
