// Workers' own copies and bytes that several temporaries share. See validator.hpp.
#include <algorithm>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "compiler/graph/box.hpp"
#include "compiler/schedule/memory_planner.hpp"
#include "compiler/verify/validator.hpp"
#include "util/error.hpp"

namespace ark::compiler {

namespace {

using std::to_string;

class MemoryChecker {
 public:
  MemoryChecker(const Plan& plan, const Order& order) : plan_(plan), order_(order), tasks_of_(plan.stages.size()) {
    for (size_t index = 0; index < plan.tasks.size(); ++index) {
      tasks_of_[plan.tasks[index].stage].push_back(static_cast<int>(index));
    }
  }
  void check_own() const;
  void check_reuse() const;

 private:
  [[noreturn]] void fail(const std::string& what) const { throw Error(ErrorKind::invalid_argument, what); }
  int buffer_of(const Access& access) const { return plan_.graph.values()[access.value].buffer; }
  bool own(int buffer) const { return plan_.placements[buffer].own; }
  std::string place_of(const Access& access) const {
    return "value " + to_string(access.value) + " in buffer " + to_string(buffer_of(access));
  }

  const Plan& plan_;
  const Order& order_;
  std::vector<std::vector<int>> tasks_of_;
};

// A worker's own copy: its tasks keep program order, and whoever wrote the bytes for a reader did so on that worker.
void MemoryChecker::check_own() const {
  std::map<int, std::vector<std::pair<int, Box>>> writers;  // by buffer: stage, what it writes
  std::vector<std::vector<char>> on(plan_.stages.size());   // by stage, worker: has a replica there
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
          fail(describe(plan_, index) + " touches " + place_of(access) + " behind " + describe(plan_, found->second) +
               ", against program order");
        }
        found->second = index;
        if (access.write) continue;
        const Box box = box_of(plan_.graph.values()[access.value]);
        for (const auto& [stage, wrote] : writers[buffer]) {
          if (stage < task.stage && !on[stage][task.worker] && overlap(wrote, box)) {
            fail(describe(plan_, index) + " reads " + place_of(access) +
                 " from its worker's own copy, which no replica of stage " + to_string(stage) + " wrote there");
          }
        }
      }
    }
  }
}

// Temporaries that share bytes: all tasks that touch the one have ended before any that touches the other starts.
void MemoryChecker::check_reuse() const {
  const size_t workers = plan_.queues.size();
  struct Life {
    int buffer = -1;
    std::vector<int> first, last;  // by worker: tasks; -1: none
    std::vector<int64_t> ended;    // by worker: tasks that have ended when any of these starts
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
  // Two tasks, one of each, that are not ordered; -1: all are. On own copies only tasks of one worker meet.
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
        fail(describe(plan_, toucher) + " touches buffer " + to_string(a.buffer) + ", which shares bytes with buffer " +
             to_string(b.buffer) + " at " + to_string(offset(b)) +
             " of the arena: one holds packets, which share with nobody");
      }
      const auto [first, second] = unordered(a, b, own(a.buffer));
      if (first < 0 || unordered(b, a, own(a.buffer)).first < 0) continue;
      fail(describe(plan_, second) + " uses buffer " + to_string(b.buffer) + " at " + to_string(offset(b)) +
           " of the arena, where " + describe(plan_, first) + " may still use buffer " + to_string(a.buffer));
    }
  }
}

}  // namespace

void check_memory(const Plan& plan, const Order& order) {
  const MemoryChecker checker(plan, order);
  checker.check_own();
  checker.check_reuse();
}

}  // namespace ark::compiler
