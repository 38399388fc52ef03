// Mutations that break a plan. Each takes a valid plan and changes one thing at random. It returns false if the plan
// has nothing to change.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "compiler/schedule/plan.hpp"

namespace ark::compiler::test {

struct Mutation {
  const char* name;
  bool always;  // never harmless, so it must be rejected every time
  std::function<bool(Plan&, std::mt19937_64&)> apply;
};

template <typename List>
auto& any_of(List& list, std::mt19937_64& random) {
  return list[random() % list.size()];
}

// Returns a random task that satisfies `wanted`, or -1.
template <typename Wanted>
int any_task(const Plan& plan, std::mt19937_64& random, Wanted wanted) {
  std::vector<int> found;
  for (size_t index = 0; index < plan.tasks.size(); ++index) {
    if (wanted(plan.tasks[index])) found.push_back(static_cast<int>(index));
  }
  return found.empty() ? -1 : any_of(found, random);
}
template <typename Wanted>
int any_buffer(const Plan& plan, std::mt19937_64& random, Wanted wanted) {
  std::vector<int> found;
  for (size_t index = 0; index < plan.placements.size(); ++index) {
    if (wanted(plan.graph.buffers()[index], plan.placements[index])) found.push_back(static_cast<int>(index));
  }
  return found.empty() ? -1 : any_of(found, random);
}

inline void erase_task(Plan& plan, int gone) {
  plan.tasks.erase(plan.tasks.begin() + gone);
  for (Queue& queue : plan.queues) {
    std::erase(queue.tasks, gone);
    std::erase_if(queue.loads, [&](const Load& load) { return load.task == gone; });
    for (int& task : queue.tasks) task -= task > gone;
    for (Load& load : queue.loads) load.task -= load.task > gone;
  }
}

// Removes the task's signals and adjusts the thresholds.
inline void forget_signals(Plan& plan, int index) {
  for (const int event : plan.tasks[index].signals) --plan.events[event].threshold;
  plan.tasks[index].signals.clear();
}

inline void drop_empty_events(Plan& plan) {
  std::vector<int> number;
  std::vector<Event> kept;
  for (const Event& event : plan.events) {
    number.push_back(event.threshold > 0 ? static_cast<int>(kept.size()) : -1);
    if (event.threshold > 0) kept.push_back(event);
  }
  plan.events = std::move(kept);
  for (Task& task : plan.tasks) {
    for (auto* list : {&task.waits, &task.carried, &task.signals}) {
      for (int& event : *list) event = number[event];
      std::erase(*list, -1);
    }
  }
}

inline void move_to_queue(Plan& plan, int index, int worker) {
  Task& task = plan.tasks[index];
  std::erase(plan.queues[task.worker].tasks, index);
  std::erase_if(plan.queues[task.worker].loads, [&](const Load& load) { return load.task == index; });
  task.worker = worker;
  auto& queue = plan.queues[worker].tasks;
  queue.insert(std::upper_bound(queue.begin(), queue.end(), index), index);
}

// Exchanges two tasks, in their queue and in the list of tasks.
inline void exchange(Plan& plan, int a, int b) {
  std::swap(plan.tasks[a], plan.tasks[b]);
  for (Queue& queue : plan.queues) {
    for (Load& load : queue.loads) load.task = load.task == a ? b : load.task == b ? a : load.task;
    std::stable_sort(queue.loads.begin(), queue.loads.end(),
                     [](const Load& one, const Load& two) { return one.task < two.task; });
  }
}

inline bool waits(const Task& task) {
  return !task.waits.empty();
}
inline bool signals(const Task& task) {
  return !task.signals.empty();
}
inline bool is_placed(const Buffer&, const Placement& placement) {
  return placement.offset >= 0;
}

inline int new_event(Plan& plan, int signaller) {
  plan.events.push_back({1, false});
  plan.tasks[signaller].signals.push_back(static_cast<int>(plan.events.size()) - 1);
  return static_cast<int>(plan.events.size()) - 1;
}

}  // namespace ark::compiler::test
