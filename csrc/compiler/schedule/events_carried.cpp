// What a step waits for of the step before, in multi-step plans. See events.hpp.
//
// Two steps suffice: a task that conflicts with one two steps back conflicts with the same one in the step between, as
// both run the same plan, and that one's own queue orders the older.
//
// On a GPU all workers meet between steps: a step is long compared with one barrier, and conflicting pairs are many.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "compiler/graph/box.hpp"
#include "compiler/schedule/box_history.hpp"
#include "compiler/schedule/events.hpp"
#include "compiler/schedule/events_order.hpp"

namespace ark::compiler {

namespace {

// A barrier between steps, which is always sufficient.
void close_steps(Plan& plan) {
  const int closing = static_cast<int>(plan.events.size());
  plan.events.push_back({0, false});
  for (Task& task : plan.tasks) task.carried.clear();
  for (const Queue& queue : plan.queues) {
    if (queue.tasks.empty()) continue;
    plan.tasks[queue.tasks.back()].signals.push_back(closing);
    plan.tasks[queue.tasks.front()].carried.push_back(closing);
    ++plan.events[closing].threshold;
  }
}

// Per worker: how many tasks of its queue in the step before have ended.
using Progress = std::vector<int64_t>;

void join(Progress& to, const Progress& from) {
  for (size_t worker = 0; worker < to.size(); ++worker) to[worker] = std::max(to[worker], from[worker]);
}
bool enough(const Progress& have, const Progress& need) {
  for (size_t worker = 0; worker < have.size(); ++worker) {
    if (have[worker] < need[worker]) return false;
  }
  return true;
}

class StepJoiner {
 public:
  explicit StepJoiner(Plan& plan)
      : plan_(plan), order_(plan), workers_(plan.queues.size()), needs_(plan.tasks.size(), Progress(workers_, 0)) {}

  void run() {
    find_conflicts();
    // A new event makes its signallers wait for each other, so a few rounds run until no event is added.
    for (int round = 0; round < 8; ++round) {
      if (!join_steps()) return;
    }
    close_steps(plan_);
  }

 private:
  void find_conflicts();
  bool join_steps();
  Progress end_of_step(size_t worker) const;
  Progress known_before(const std::vector<int>& signallers) const;
  std::vector<std::vector<int>> signallers() const {
    std::vector<std::vector<int>> found(plan_.events.size());
    for (size_t index = 0; index < plan_.tasks.size(); ++index) {
      for (const int event : plan_.tasks[index].signals) found[event].push_back(static_cast<int>(index));
    }
    return found;
  }

  Plan& plan_;
  Order order_;
  size_t workers_;
  std::vector<Progress> needs_;  // by task: what it needs of the step before, from the bytes it touches
};

void StepJoiner::find_conflicts() {
  BoxHistory history(plan_.graph, plan_.stages, &plan_.placements);
  std::vector<std::vector<int>> tasks_of(plan_.stages.size());
  for (size_t index = 0; index < plan_.tasks.size(); ++index) {
    tasks_of[plan_.tasks[index].stage].push_back(static_cast<int>(index));
  }
  for (const int step : {0, 1}) {
    for (int stage = 0; stage < static_cast<int>(plan_.stages.size()); ++stage) {
      const Stage& what = plan_.stages[stage];
      const std::vector<int>& tasks = tasks_of[stage];
      if (tasks.empty()) continue;
      for (const Access& access : what.accesses) {
        const int buffer = plan_.graph.values()[access.value].buffer;
        if (step == 0 || !history.may_conflict(buffer)) continue;
        const auto gather = [&](int64_t begin, int64_t end, Progress& need) {
          history.conflicts(buffer, box_of(plan_.graph, what, access, begin, end), access.write,
                            [&](const BoxHistory::Record& record, int task) {
                              int64_t& most = need[plan_.tasks[task].worker];
                              if (record.step == 0) most = std::max(most, order_.place(task) + 1);
                            });
        };
        if (access.axis < 0 || plan_.tasks[tasks[0]].replica) {
          Progress need(workers_, 0);
          gather(0, what.extent, need);
          for (const int task : tasks) join(needs_[task], need);
        } else {
          for (const int task : tasks) gather(plan_.tasks[task].begin, plan_.tasks[task].end, needs_[task]);
        }
      }
      history.add(stage, tasks, plan_.tasks, step);
    }
  }
}

Progress StepJoiner::end_of_step(size_t worker) const {
  Progress known(workers_, 0);
  const std::vector<int>& queue = plan_.queues[worker].tasks;
  if (queue.empty()) return known;
  for (size_t other = 0; other < workers_; ++other) known[other] = order_.ended(queue.back(), static_cast<int>(other));
  known[worker] = static_cast<int64_t>(queue.size());
  return known;
}

Progress StepJoiner::known_before(const std::vector<int>& signallers) const {
  Progress known(workers_, 0);
  for (const int task : signallers) {
    for (size_t other = 0; other < workers_; ++other) {
      known[other] = std::max(known[other], order_.ended(task, static_cast<int>(other)));
    }
    int64_t& own = known[plan_.tasks[task].worker];
    own = std::max(own, order_.place(task) + 1);
  }
  return known;
}

// One round. Returns whether it added an event.
bool StepJoiner::join_steps() {
  const std::vector<std::vector<int>> by = signallers();
  std::vector<Progress> before;  // by event: progress that its signals in the step before imply
  for (const std::vector<int>& tasks : by) before.push_back(known_before(tasks));
  std::vector<Progress> now;  // by worker
  for (size_t worker = 0; worker < workers_; ++worker) now.push_back(end_of_step(worker));
  std::vector<Progress> brings(by.size(), Progress(workers_, 0));  // by event: progress of the step before that its
                                                                   // signals in this step imply
  bool made = false;
  for (size_t index = 0; index < plan_.tasks.size(); ++index) {
    Task& task = plan_.tasks[index];
    task.carried.clear();
    Progress& mine = now[task.worker];
    for (const int event : task.waits) join(mine, brings[event]);
    Progress need = needs_[index];
    for (const int event : task.signals) {
      if (event >= static_cast<int>(by.size())) continue;  // added in this round
      for (const int other : by[event]) {
        int64_t& most = need[plan_.tasks[other].worker];
        most = std::max(most, order_.place(other) + 1);
      }
    }
    if (!enough(mine, need)) {
      // Pick the event that implies enough progress and the least beyond it.
      int best = -1;
      int64_t least = std::numeric_limits<int64_t>::max();
      for (size_t event = 0; event < before.size(); ++event) {
        Progress with = mine;
        join(with, before[event]);
        if (!enough(with, need)) continue;
        int64_t sum = 0;
        for (const int64_t places : before[event]) sum += places;
        if (sum < least) best = static_cast<int>(event), least = sum;
      }
      if (best < 0) {
        best = static_cast<int>(plan_.events.size());
        std::vector<int> last;
        for (size_t worker = 0; worker < workers_; ++worker) {
          if (need[worker] > mine[worker]) last.push_back(plan_.queues[worker].tasks[need[worker] - 1]);
        }
        for (const int other : last) plan_.tasks[other].signals.push_back(best);
        plan_.events.push_back({static_cast<int>(last.size()), false});
        before.push_back(known_before(last));
        brings.emplace_back(workers_, 0);
        made = true;
      }
      task.carried.push_back(best);
      join(mine, before[best]);
    }
    for (const int event : task.signals) join(brings[event], mine);
  }
  return made;
}

}  // namespace

void add_carried(Plan& plan) {
  if (plan.target.name == "cpu") return StepJoiner(plan).run();
  close_steps(plan);
}

}  // namespace ark::compiler
