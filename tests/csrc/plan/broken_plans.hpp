// Ways to break a plan. Each takes a right plan and changes one thing at random; false: the plan has nothing to change.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "plan/plan.hpp"

namespace ark::plan::test {

struct Mutation {
  const char* name;
  bool always;  // never harmless: must be rejected every time
  std::function<bool(Plan&, std::mt19937_64&)> apply;
};

template <typename List>
auto& any_of(List& list, std::mt19937_64& random) {
  return list[random() % list.size()];
}

// A random task that satisfies `wanted`; -1: none.
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

// Takes back what the task signalled, as if it had never been there.
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

// Tasks that exchange their places in one queue and in the list of tasks.
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

inline std::vector<Mutation> order_mutations() {
  return {
      {"dropped wait", false,
       [](Plan& plan, std::mt19937_64& random) {
         const int task = any_task(plan, random, waits);
         if (task < 0) return false;
         auto& list = plan.tasks[task].waits;
         list.erase(list.begin() + random() % list.size());
         return true;
       }},
      {"dropped signal", true,
       [](Plan& plan, std::mt19937_64& random) {
         const int task = any_task(plan, random, signals);
         if (task < 0) return false;
         auto& list = plan.tasks[task].signals;
         list.erase(list.begin() + random() % list.size());
         return true;
       }},
      {"dropped signal, threshold to match", false,
       [](Plan& plan, std::mt19937_64& random) {
         const int task = any_task(plan, random, signals);
         if (task < 0) return false;
         auto& list = plan.tasks[task].signals;
         const size_t at = random() % list.size();
         --plan.events[list[at]].threshold;
         list.erase(list.begin() + at);
         drop_empty_events(plan);
         return true;
       }},
      {"wrong threshold", true,
       [](Plan& plan, std::mt19937_64& random) {
         if (plan.events.empty()) return false;
         any_of(plan.events, random).threshold += random() % 2 == 0 ? 1 : -1;
         return true;
       }},
      {"wait for another event", false,
       [](Plan& plan, std::mt19937_64& random) {
         const int task = any_task(plan, random, waits);
         if (task < 0 || plan.events.size() < 2) return false;
         any_of(plan.tasks[task].waits, random) = static_cast<int>(random() % plan.events.size());
         return true;
       }},
      {"signal by the task before", false,
       [](Plan& plan, std::mt19937_64& random) {
         const int task = any_task(plan, random, [&](const Task& each) {
           const int index = static_cast<int>(&each - plan.tasks.data());
           return signals(each) && plan.queues[each.worker].tasks.front() != index;
         });
         if (task < 0) return false;
         const auto& queue = plan.queues[plan.tasks[task].worker].tasks;
         const int before = *std::prev(std::find(queue.begin(), queue.end(), task));
         auto& list = plan.tasks[task].signals;
         const size_t at = random() % list.size();
         plan.tasks[before].signals.push_back(list[at]);
         list.erase(list.begin() + at);
         return true;
       }},
      {"swapped in the queue", true,
       [](Plan& plan, std::mt19937_64& random) {
         auto& queue = any_of(plan.queues, random).tasks;
         if (queue.size() < 2) return false;
         const size_t at = random() % (queue.size() - 1);
         std::swap(queue[at], queue[at + 1]);
         return true;
       }},
      {"swapped in queue and list", false,
       [](Plan& plan, std::mt19937_64& random) {
         const auto& queue = any_of(plan.queues, random).tasks;
         if (queue.size() < 2) return false;
         const size_t at = random() % (queue.size() - 1);
         exchange(plan, queue[at], queue[at + 1]);
         return true;
       }},
      {"moved to another worker", false,
       [](Plan& plan, std::mt19937_64& random) {
         const int task = any_task(plan, random, [](const Task& each) { return !each.replica; });
         if (task < 0 || plan.queues.size() < 2) return false;
         const auto workers = static_cast<int>(plan.queues.size());
         const int step = 1 + static_cast<int>(random() % (workers - 1));
         move_to_queue(plan, task, (plan.tasks[task].worker + step) % workers);
         return true;
       }},
      {"cycle of two events", true,
       [](Plan& plan, std::mt19937_64& random) {
         const int a = any_task(plan, random, [](const Task&) { return true; });
         const int b = any_task(plan, random, [&](const Task& each) { return each.worker != plan.tasks[a].worker; });
         if (b < 0) return false;
         plan.tasks[a].waits.push_back(new_event(plan, b));
         plan.tasks[b].waits.push_back(new_event(plan, a));
         return true;
       }},
      {"wait for a later task of the same worker", true,
       [](Plan& plan, std::mt19937_64& random) {
         const auto& queue = any_of(plan.queues, random).tasks;
         if (queue.size() < 2) return false;
         const size_t at = random() % (queue.size() - 1);
         const size_t later = at + 1 + random() % (queue.size() - at - 1);
         plan.tasks[queue[at]].waits.push_back(new_event(plan, queue[later]));
         return true;
       }},
      {"wait for itself", true,
       [](Plan& plan, std::mt19937_64& random) {
         const int task = any_task(plan, random, [](const Task&) { return true; });
         plan.tasks[task].waits.push_back(new_event(plan, task));
         return true;
       }},
      {"event that is not there", true,
       [](Plan& plan, std::mt19937_64& random) {
         Task& task = any_of(plan.tasks, random);
         const auto events = static_cast<int>(plan.events.size());
         (random() % 2 == 0 ? task.waits : task.signals).push_back(random() % 2 == 0 ? events : -1);
         return true;
       }},
      {"waited for twice", true,
       [](Plan& plan, std::mt19937_64& random) {
         const int task = any_task(plan, random, waits);
         if (task < 0) return false;
         plan.tasks[task].waits.push_back(any_of(plan.tasks[task].waits, random));
         return true;
       }},
      {"event that nobody signals", true,
       [](Plan& plan, std::mt19937_64& random) {
         plan.events.push_back({static_cast<int>(random() % 2), false});
         any_of(plan.tasks, random).waits.push_back(static_cast<int>(plan.events.size()) - 1);
         return true;
       }},
      {"carried in a plan of single steps", true,
       [](Plan& plan, std::mt19937_64& random) {
         if (plan.events.empty() || plan.chained) return false;
         any_of(plan.tasks, random).carried.push_back(static_cast<int>(random() % plan.events.size()));
         return true;
       }},
  };
}

// Of chained plans.
inline std::vector<Mutation> step_mutations() {
  const auto carries = [](const Task& task) { return !task.carried.empty(); };
  return {
      {"dropped carried wait", false,
       [=](Plan& plan, std::mt19937_64& random) {
         const int task = any_task(plan, random, carries);
         if (task < 0) return false;
         plan.tasks[task].carried.pop_back();
         return true;
       }},
      {"carried to the task behind", false,
       [=](Plan& plan, std::mt19937_64& random) {
         const int task = any_task(plan, random, [&](const Task& each) {
           const int index = static_cast<int>(&each - plan.tasks.data());
           return carries(each) && plan.queues[each.worker].tasks.back() != index;
         });
         if (task < 0) return false;
         const auto& queue = plan.queues[plan.tasks[task].worker].tasks;
         const int behind = *std::next(std::find(queue.begin(), queue.end(), task));
         auto& list = plan.tasks[behind].carried;
         for (const int event : plan.tasks[task].carried) {
           if (std::find(list.begin(), list.end(), event) == list.end()) list.push_back(event);
         }
         plan.tasks[task].carried.clear();
         return true;
       }},
      {"carried from another event", false,
       [=](Plan& plan, std::mt19937_64& random) {
         const int task = any_task(plan, random, carries);
         if (task < 0 || plan.events.size() < 2) return false;
         any_of(plan.tasks[task].carried, random) = static_cast<int>(random() % plan.events.size());
         return true;
       }},
      {"carried taken for a wait", false,
       [=](Plan& plan, std::mt19937_64& random) {
         const int task = any_task(plan, random, carries);
         if (task < 0) return false;
         const int event = plan.tasks[task].carried.back();
         auto& list = plan.tasks[task].waits;
         if (std::find(list.begin(), list.end(), event) != list.end()) return false;
         plan.tasks[task].carried.pop_back();
         list.push_back(event);
         return true;
       }},
      {"dropped wait of a chained plan", false, order_mutations().front().apply},
  };
}

// Of plans whose target has packets.
inline std::vector<Mutation> packet_mutations() {
  const auto packets = [](const Buffer&, const Placement& placement) { return placement.packets; };
  return {
      {"packets not polled", false,
       [](Plan& plan, std::mt19937_64& random) {
         const int task = any_task(plan, random, [&](const Task& each) {
           return std::any_of(each.waits.begin(), each.waits.end(),
                              [&](int event) { return plan.events[event].packets; });
         });
         if (task < 0) return false;
         auto& list = plan.tasks[task].waits;
         list.erase(std::find_if(list.begin(), list.end(), [&](int event) { return plan.events[event].packets; }));
         return true;
       }},
      {"counter taken for packets", true,
       [](Plan& plan, std::mt19937_64& random) {
         std::vector<Event*> found;
         for (Event& event : plan.events) {
           if (!event.packets) found.push_back(&event);
         }
         if (found.empty()) return false;
         any_of(found, random)->packets = true;
         return true;
       }},
      {"packets that share bytes", true,
       [=](Plan& plan, std::mt19937_64& random) {
         const int a = any_buffer(plan, random, packets);
         if (a < 0) return false;
         const int b = any_buffer(plan, random, [&](const Buffer& buffer, const Placement& placement) {
           return placement.offset >= 0 && !placement.own && &buffer != &plan.graph.buffers()[a];
         });
         if (b < 0) return false;
         plan.placements[b].offset = plan.placements[a].offset;
         plan.arena_bytes += 2 * plan.graph.buffers()[b].bytes;
         return true;
       }},
      {"packets read as plain data", false,  // harmless where a counter or the queue orders all of its readers too
       [=](Plan& plan, std::mt19937_64& random) {
         const int buffer = any_buffer(plan, random, packets);
         if (buffer < 0) return false;
         plan.placements[buffer].packets = false;
         return true;
       }},
      {"packets that each worker has of its own", true,
       [=](Plan& plan, std::mt19937_64& random) {
         const int buffer = any_buffer(plan, random, packets);
         if (buffer < 0) return false;
         plan.placements[buffer].own = true;
         plan.own_bytes = plan.arena_bytes;
         return true;
       }},
      {"carried packets", true,
       [](Plan& plan, std::mt19937_64& random) {
         plan.chained = true;
         for (size_t event = 0; event < plan.events.size(); ++event) {
           if (!plan.events[event].packets) continue;
           any_of(plan.tasks, random).carried.push_back(static_cast<int>(event));
           return true;
         }
         return false;
       }},
  };
}

inline std::vector<Mutation> tile_mutations() {
  return {
      {"missing tile", true,
       [](Plan& plan, std::mt19937_64& random) {
         const int task = any_task(plan, random, [](const Task& each) { return !each.replica; });
         if (task < 0) return false;
         forget_signals(plan, task);
         drop_empty_events(plan);
         erase_task(plan, task);
         return true;
       }},
      {"missing replica", false,  // harmless where nobody reads the copy: the tiler drops those already
       [](Plan& plan, std::mt19937_64& random) {
         const int task = any_task(plan, random, [](const Task& each) { return each.replica; });
         if (task < 0) return false;
         forget_signals(plan, task);
         drop_empty_events(plan);
         erase_task(plan, task);
         return true;
       }},
      {"tile run twice", true,
       [](Plan& plan, std::mt19937_64& random) {
         Task copy = any_of(plan.tasks, random);
         copy.signals.clear();
         plan.queues[copy.worker].tasks.push_back(static_cast<int>(plan.tasks.size()));
         plan.tasks.push_back(copy);
         return true;
       }},
      {"tile run twice, elsewhere", true,
       [](Plan& plan, std::mt19937_64& random) {
         const int task = any_task(plan, random, [](const Task& each) { return !each.replica; });
         if (task < 0) return false;
         Task copy = plan.tasks[task];
         copy.signals.clear();
         copy.worker = static_cast<int>(random() % plan.queues.size());
         plan.queues[copy.worker].tasks.push_back(static_cast<int>(plan.tasks.size()));
         plan.tasks.push_back(copy);
         return true;
       }},
      {"tile cut short", true,
       [](Plan& plan, std::mt19937_64& random) {
         const int index = any_task(plan, random, [](const Task& each) { return each.end - each.begin > 1; });
         if (index < 0) return false;
         Task& task = plan.tasks[index];
         (random() % 2 == 0 ? task.begin += 1 : task.end -= 1);
         return true;
       }},
      {"tile too long", true,
       [](Plan& plan, std::mt19937_64& random) {
         Task& task = any_of(plan.tasks, random);
         const int64_t grain = plan.stages[task.stage].grain;
         (random() % 2 == 0 ? task.begin -= grain : task.end += grain);
         return true;
       }},
      {"tile of another stage", true,
       [](Plan& plan, std::mt19937_64& random) {
         if (plan.stages.size() < 2) return false;
         Task& task = any_of(plan.tasks, random);
         task.stage = static_cast<int>((task.stage + 1 + random() % (plan.stages.size() - 1)) % plan.stages.size());
         return true;
       }},
      {"stage that is not there", true,
       [](Plan& plan, std::mt19937_64& random) {
         any_of(plan.tasks, random).stage = random() % 2 == 0 ? -1 : static_cast<int>(plan.stages.size());
         return true;
       }},
      {"no part of a stage's work", true,
       [](Plan& plan, std::mt19937_64& random) {
         Task& task = any_of(plan.tasks, random);
         task.end = task.begin;
         return true;
       }},
      {"task in no queue", true,
       [](Plan& plan, std::mt19937_64& random) {
         auto& queue = any_of(plan.queues, random).tasks;
         if (queue.empty()) return false;
         queue.erase(queue.begin() + random() % queue.size());
         return true;
       }},
      {"task in two queues", true,
       [](Plan& plan, std::mt19937_64& random) {
         auto& queue = any_of(plan.queues, random).tasks;
         queue.push_back(static_cast<int>(random() % plan.tasks.size()));
         return true;
       }},
      {"task in another's queue", true,
       [](Plan& plan, std::mt19937_64& random) {
         if (plan.queues.size() < 2) return false;
         Task& task = any_of(plan.tasks, random);
         task.worker = (task.worker + 1) % static_cast<int>(plan.queues.size());
         return true;
       }},
      {"worker that is not there", true,
       [](Plan& plan, std::mt19937_64& random) {
         any_of(plan.tasks, random).worker = random() % 2 == 0 ? -1 : plan.target.workers;
         return true;
       }},
      {"queue for no worker", true,
       [](Plan& plan, std::mt19937_64& random) {
         if (random() % 2 == 0) {
           plan.queues.emplace_back();
         } else {
           ++plan.target.workers;
         }
         return true;
       }},
      {"replica that says it is none", true,
       [](Plan& plan, std::mt19937_64& random) {
         const int task = any_task(plan, random, [](const Task& each) { return each.replica; });
         if (task < 0) return false;
         plan.tasks[task].replica = false;
         return true;
       }},
      {"tile that says it is a replica", true,
       [](Plan& plan, std::mt19937_64& random) {
         const int task = any_task(plan, random, [](const Task& each) { return !each.replica; });
         if (task < 0) return false;
         plan.tasks[task].replica = true;
         return true;
       }},
  };
}

inline std::vector<Mutation> memory_mutations() {
  const auto any_load = [](Plan& plan, std::mt19937_64& random) -> Load* {
    std::vector<Load*> all;
    for (Queue& queue : plan.queues) {
      for (Load& load : queue.loads) all.push_back(&load);
    }
    return all.empty() ? nullptr : any_of(all, random);
  };
  return {
      {"buffers in one place", false,
       [](Plan& plan, std::mt19937_64& random) {
         const int a = any_buffer(plan, random, is_placed);
         if (a < 0) return false;
         const bool own = plan.placements[a].own;
         const int b = any_buffer(plan, random, [&](const Buffer&, const Placement& placement) {
           return placement.offset >= 0 && placement.own == own && placement.offset != plan.placements[a].offset;
         });
         if (b < 0) return false;
         plan.placements[a].offset = plan.placements[b].offset;
         int64_t& arena = own ? plan.own_bytes : plan.arena_bytes;
         arena = std::max(arena, plan.placements[a].offset + plan.graph.buffers()[a].bytes);
         return true;
       }},
      {"smaller arena", true,
       [](Plan& plan, std::mt19937_64&) {
         if (plan.arena_bytes == 0) return false;
         int64_t end = 0;
         for (size_t buffer = 0; buffer < plan.placements.size(); ++buffer) {
           const Placement& placement = plan.placements[buffer];
           if (placement.offset >= 0 && !placement.own) {
             end = std::max(end, placement.offset + plan.graph.buffers()[buffer].bytes);
           }
         }
         plan.arena_bytes = end - 1;
         return true;
       }},
      {"not aligned", true,
       [](Plan& plan, std::mt19937_64& random) {
         const int buffer = any_buffer(plan, random, is_placed);
         if (buffer < 0) return false;
         plan.placements[buffer].offset += 4;
         (plan.placements[buffer].own ? plan.own_bytes : plan.arena_bytes) += 4;
         return true;
       }},
      {"no place", true,
       [](Plan& plan, std::mt19937_64& random) {
         const int buffer = any_buffer(plan, random, is_placed);
         if (buffer < 0) return false;
         plan.placements[buffer] = {};
         return true;
       }},
      {"argument in the arena", true,
       [](Plan& plan, std::mt19937_64& random) {
         const int buffer = any_buffer(
             plan, random, [](const Buffer& each, const Placement&) { return each.kind != Buffer::Kind::temporary; });
         plan.placements[buffer].offset = 0;
         plan.arena_bytes += plan.graph.buffers()[buffer].bytes;
         return true;
       }},
      {"own buffer that all share", true,
       [](Plan& plan, std::mt19937_64& random) {
         const int buffer =
             any_buffer(plan, random, [](const Buffer&, const Placement& placement) { return placement.own; });
         if (buffer < 0) return false;
         plan.placements[buffer].own = false;
         plan.placements[buffer].offset = plan.arena_bytes;
         plan.arena_bytes += (plan.graph.buffers()[buffer].bytes + 63) / 64 * 64;
         return true;
       }},
      {"shared buffer as each worker's own", true,
       [](Plan& plan, std::mt19937_64& random) {
         const int buffer = any_buffer(plan, random, [](const Buffer& each, const Placement& placement) {
           return each.kind == Buffer::Kind::temporary && placement.offset >= 0 && !placement.own;
         });
         if (buffer < 0) return false;
         plan.placements[buffer].own = true;
         plan.placements[buffer].offset = plan.own_bytes / 64 * 64;
         plan.own_bytes += plan.graph.buffers()[buffer].bytes;
         return true;
       }},
      {"write to an input that must not change", true,
       [](Plan& plan, std::mt19937_64& random) {
         std::vector<Access*> found;
         for (Stage& stage : plan.stages) {
           for (Access& access : stage.accesses) {
             const Buffer& buffer = plan.graph.buffer_of(access.value);
             if (!access.write && buffer.kind == Buffer::Kind::input && !buffer.mutated) found.push_back(&access);
           }
         }
         if (found.empty()) return false;
         any_of(found, random)->write = true;
         return true;
       }},
      {"read of what nobody wrote", true,
       [](Plan& plan, std::mt19937_64& random) {
         Buffer buffer;
         buffer.bytes = 64;
         Value value;
         value.buffer = plan.graph.add_buffer(buffer);
         value.shape = {4};
         value.strides = {1};
         plan.placements.push_back({(plan.arena_bytes + 63) / 64 * 64, false, false});
         plan.arena_bytes = plan.placements.back().offset + 64;
         any_of(plan.stages, random).accesses.push_back({plan.graph.add_value(value), -1, false});
         return true;
       }},
      {"load of what is no parameter", true,
       [=](Plan& plan, std::mt19937_64& random) {
         Load* load = any_load(plan, random);
         std::vector<int> others;
         for (size_t value = 0; value < plan.graph.values().size(); ++value) {
           const bool literal = plan.graph.values()[value].is_literal();
           if (!literal && !plan.graph.buffer_of(static_cast<int>(value)).parameter) {
             others.push_back(static_cast<int>(value));
           }
         }
         if (load == nullptr) return false;
         load->value = any_of(others, random);
         return true;
       }},
      {"load larger than a page", true,
       [=](Plan& plan, std::mt19937_64& random) {
         Load* load = any_load(plan, random);
         if (load == nullptr) return false;
         plan.target.page_bytes = load->bytes * load->rows - 1;
         return true;
       }},
      {"load of bytes that the task does not read", true,
       [=](Plan& plan, std::mt19937_64& random) {
         Load* load = any_load(plan, random);
         if (load == nullptr) return false;
         if (random() % 2 == 0) {
           load->offset = plan.graph.buffer_of(load->value).bytes - load->bytes + 1;
         } else {
           load->offset = -1;
         }
         return true;
       }},
      {"load for another's task", true,
       [=](Plan& plan, std::mt19937_64& random) {
         Load* load = any_load(plan, random);
         if (load == nullptr || plan.queues.size() < 2) return false;
         const int worker = plan.tasks[load->task].worker;
         const int other = any_task(plan, random, [&](const Task& task) { return task.worker != worker; });
         if (other < 0) return false;
         load->task = other;
         return true;
       }},
      {"loads out of order", true,
       [](Plan& plan, std::mt19937_64& random) {
         Queue& queue = any_of(plan.queues, random);
         if (queue.loads.empty() || queue.loads.front().task == queue.loads.back().task) return false;
         std::reverse(queue.loads.begin(), queue.loads.end());
         return true;
       }},
      {"missing load", true,
       [](Plan& plan, std::mt19937_64& random) {
         Queue& queue = any_of(plan.queues, random);
         if (queue.loads.empty()) return false;
         queue.loads.erase(queue.loads.begin() + random() % queue.loads.size());
         return true;
       }},
      {"load that comes twice", true,
       [](Plan& plan, std::mt19937_64& random) {
         Queue& queue = any_of(plan.queues, random);
         if (queue.loads.empty()) return false;
         const size_t at = random() % queue.loads.size();
         queue.loads.insert(queue.loads.begin() + at, Load(queue.loads[at]));
         return true;
       }},
      {"ring without pages", true,
       [](Plan& plan, std::mt19937_64& random) {
         switch (random() % 4) {
           case 0: plan.target.pages = 0; break;
           case 1: plan.target.page_bytes = 0; break;
           case 2: plan.target.in_flight = 0; break;
           default: plan.target.in_flight = plan.target.pages + 1;
         }
         return true;
       }},
  };
}

}  // namespace ark::plan::test
