// That a plan's queues and events order whatever touches the same bytes as the program did. See validator.hpp.
//
// Order's vector clocks say what surely ends before what starts. Program order is the order of stages; two tasks of
// one stage may run side by side, so they must not touch the same bytes unless both only read.
#include <algorithm>
#include <map>
#include <string>

#include "compiler/graph/box.hpp"
#include "compiler/schedule/box_history.hpp"
#include "compiler/verify/validator.hpp"
#include "util/error.hpp"

namespace ark::compiler {

namespace {

using std::to_string;

class OrderChecker {
 public:
  OrderChecker(const Plan& plan, const Order& order) : plan_(plan), order_(order), tasks_of_(plan.stages.size()) {
    for (size_t index = 0; index < plan.tasks.size(); ++index) {
      tasks_of_[plan.tasks[index].stage].push_back(static_cast<int>(index));
    }
  }

  void run() {
    check_conflicts();
    for (int stage = 0; stage < static_cast<int>(plan_.stages.size()); ++stage) check_side_by_side(stage);
    check_defined();
  }

 private:
  [[noreturn]] void fail(const std::string& what) const { throw Error(ErrorKind::invalid_argument, what); }
  int buffer_of(const Access& access) const { return plan_.graph.values()[access.value].buffer; }
  std::string place_of(const Access& access) const {
    return "value " + to_string(access.value) + " in buffer " + to_string(buffer_of(access));
  }
  // The task polls the packets that the other writes.
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
    fail(describe(plan_, second) + (access.write ? " writes " : " reads ") + place_of(access) + ", which " +
         describe(plan_, first) + (wrote ? " writes" : " reads") + ": nothing makes it wait until that has ended");
  }
  void check_conflicts();
  void check_side_by_side(int stage) const;
  void check_defined() const;

  const Plan& plan_;
  const Order& order_;
  std::vector<std::vector<int>> tasks_of_;
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
        // All tasks touch the same: of each worker's tasks that they conflict with, the last one counts.
        std::vector<std::pair<int, bool>> last(plan_.queues.size(), {-1, false});
        std::vector<int> polled;  // of packets, every one
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

// Whether tiles of a value, cut along one dimension at whole indices, are surely apart: no two indices are one byte.
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
          fail(describe(plan_, task) + " writes " + place_of(write) + " where " + describe(plan_, tasks[beside]) +
               " of the same stage touches value " + to_string(other.value) + ": they may run side by side");
        }
      }
    }
  }
}

// What a stage reads of temporaries and outputs, stages before it have written.
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
      // Several writes together: byte by byte where that is little work, else by their sum.
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
            tasks_of_[index].empty() ? "stage " + to_string(index) : describe(plan_, tasks_of_[index][0]);
        fail(who + " reads " + place_of(access) + ", of which " + to_string(missing) +
             " bytes were not written before");
      }
    }
    for (const Access& access : stage.accesses) {
      if (access.write) written[buffer_of(access)].push_back(box_of(plan_.graph.values()[access.value]));
    }
  }
}

}  // namespace

void check_order(const Plan& plan) {
  const Order order(plan);
  OrderChecker(plan, order).run();
  check_memory(plan, order);
}

}  // namespace ark::compiler
