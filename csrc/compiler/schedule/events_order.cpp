// Plays the plan with tokens, as events_order.hpp describes, and records the clock of every task.
#include "compiler/schedule/events_order.hpp"

#include <algorithm>

#include "util/error.hpp"
#include "util/format.hpp"

namespace ark::compiler {

std::string describe(const Plan& plan, int index) {
  const Task& task = plan.tasks[index];
  std::string what;
  if (task.stage >= 0 && task.stage < static_cast<int>(plan.stages.size())) {
    const Stage& stage = plan.stages[task.stage];
    append(what, " '{}'", stage.name.empty() ? stage.kind : stage.name);
    if (!stage.origin.empty()) append(what, ", {}", stage.origin);
  }
  return formatted("task {} (stage {}{}, tile [{}, {}) on worker {})", index, task.stage, what, task.begin, task.end,
                   task.worker);
}

Order::Order(const Plan& plan, int steps)
    : steps_(steps),
      tasks_(plan.tasks.size()),
      workers_(plan.queues.size()),
      worker_of_(tasks_),
      place_of_(tasks_),
      length_(workers_),
      clocks_(tasks_ * workers_ * steps, 0) {
  for (size_t worker = 0; worker < workers_; ++worker) {
    const std::vector<int>& queue = plan.queues[worker].tasks;
    length_[worker] = static_cast<int>(queue.size());
    for (size_t place = 0; place < queue.size(); ++place) {
      worker_of_[queue[place]] = static_cast<int>(worker);
      place_of_[queue[place]] = static_cast<int>(place);
    }
  }
  const size_t events = plan.events.size();
  // Per event and step: signals so far, what its signallers knew, which workers wait.
  std::vector<int> count(events * steps, 0);
  std::vector<std::vector<int32_t>> known(events * steps);
  std::vector<std::vector<int>> parked(events * steps);  // workers
  std::vector<size_t> next(workers_, 0);                 // per queue, counted across steps
  std::vector<std::vector<int32_t>> now(workers_, std::vector<int32_t>(workers_, 0));
  std::vector<int> runnable(workers_);
  for (size_t worker = 0; worker < workers_; ++worker) runnable[worker] = static_cast<int>(workers_ - 1 - worker);
  size_t ended = 0;
  while (!runnable.empty()) {
    const int worker = runnable.back();
    runnable.pop_back();
    while (next[worker] < static_cast<size_t>(length_[worker]) * steps) {
      const int step = static_cast<int>(next[worker] / length_[worker]);
      const int index = plan.queues[worker].tasks[next[worker] % length_[worker]];
      const Task& task = plan.tasks[index];
      const auto met = [&](int event, int in_step) {
        if (in_step < 0) return true;
        const size_t slot = static_cast<size_t>(in_step) * events + event;
        if (count[slot] >= plan.events[event].threshold) return true;
        parked[slot].push_back(worker);
        return false;
      };
      if (!std::all_of(task.waits.begin(), task.waits.end(), [&](int event) { return met(event, step); })) break;
      if (!std::all_of(task.carried.begin(), task.carried.end(), [&](int event) { return met(event, step - 1); })) {
        break;
      }
      std::vector<int32_t>& mine = now[worker];
      const auto learn = [&](int event, int in_step) {
        if (in_step < 0 || plan.events[event].packets) return;
        const std::vector<int32_t>& from = known[static_cast<size_t>(in_step) * events + event];
        for (size_t other = 0; other < from.size(); ++other) mine[other] = std::max(mine[other], from[other]);
      };
      for (const int event : task.waits) learn(event, step);
      for (const int event : task.carried) learn(event, step - 1);
      std::copy(mine.begin(), mine.end(), clocks_.begin() + (static_cast<size_t>(step) * tasks_ + index) * workers_);
      mine[worker] = static_cast<int32_t>(++next[worker]);
      ++ended;
      for (const int event : task.signals) {
        const size_t slot = static_cast<size_t>(step) * events + event;
        std::vector<int32_t>& to = known[slot];
        if (to.empty()) to.resize(workers_, 0);
        for (size_t other = 0; other < workers_; ++other) to[other] = std::max(to[other], mine[other]);
        if (++count[slot] == plan.events[event].threshold) {
          runnable.insert(runnable.end(), parked[slot].begin(), parked[slot].end());
          parked[slot].clear();
        }
      }
    }
  }
  size_t all = 0;
  for (const int length : length_) all += static_cast<size_t>(length) * steps;
  if (ended != all) stuck(plan, next);
}

void Order::stuck(const Plan& plan, const std::vector<size_t>& next) const {
  for (size_t worker = 0; worker < workers_; ++worker) {
    if (next[worker] >= static_cast<size_t>(length_[worker]) * steps_) continue;
    const size_t step = next[worker] / length_[worker];
    const int index = plan.queues[worker].tasks[next[worker] % length_[worker]];
    std::string text = describe(plan, index) + " can never start: ";
    for (const int event : plan.tasks[index].waits) {
      int missing = -1;
      int signals = 0;
      for (size_t other = 0; other < tasks_; ++other) {
        const std::vector<int>& list = plan.tasks[other].signals;
        if (std::find(list.begin(), list.end(), event) == list.end()) continue;
        ++signals;
        const size_t by = worker_of_[other];
        if (next[by] <= step * length_[by] + place_of_[other]) missing = static_cast<int>(other);
      }
      if (missing < 0 && signals >= plan.events[event].threshold) continue;
      append(text, "it waits for event {}, which ", event);
      if (signals < plan.events[event].threshold)
        append(text, "{} tasks signal and {} are needed", signals, plan.events[event].threshold);
      else
        append(text, "{} does not signal before", describe(plan, missing));
      throw Error(ErrorKind::invalid_argument, text);
    }
    if (plan.tasks[index].carried.empty()) continue;
    throw Error(ErrorKind::invalid_argument, text + "an event carried from the step before does not come");
  }
  throw Error(ErrorKind::invalid_argument, "the plan never ends");
}

int64_t Order::place(int task, int step) const {
  return static_cast<int64_t>(step) * length_[worker_of_[task]] + place_of_[task];
}

bool Order::before(int first, int second, int first_step, int second_step) const {
  return ended(second, worker_of_[first], second_step) > place(first, first_step);
}

}  // namespace ark::compiler
