// Mutations that break a plan's queues and events, for validator_test.cpp. See broken_plans.hpp.
#pragma once

#include "compiler/schedule/events_order.hpp"
#include "compiler/verify/broken_plans.hpp"

namespace ark::compiler::test {

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
         if (plan.events.empty() || plan.multi_step) return false;
         any_of(plan.tasks, random).carried.push_back(static_cast<int>(random() % plan.events.size()));
         return true;
       }},
  };
}

// For multi-step plans.
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
      {"dropped wait of a multi_step plan", false, order_mutations().front().apply},
      {"an event that may count two steps together", true,
       [](Plan& plan, std::mt19937_64& random) {
         const Order order(plan, 2);
         std::vector<std::pair<int, int>> found;  // the second's next step may come before the first's current one
         for (int first = 0; first < static_cast<int>(plan.tasks.size()); ++first) {
           for (int second = 0; second < static_cast<int>(plan.tasks.size()); ++second) {
             if (!order.before(first, second, 0, 1)) found.push_back({first, second});
           }
         }
         if (found.empty()) return false;
         const auto [first, second] = any_of(found, random);
         plan.tasks[second].signals.push_back(new_event(plan, first));
         plan.events.back().threshold = 2;
         return true;
       }},
      {"a worker that does not hear of the end", true,
       [](Plan& plan, std::mt19937_64& random) {
         const int task = any_task(plan, random, [&](const Task& each) {
           return std::holds_alternative<StopStage>(plan.stages[each.stage].body);
         });
         if (task < 0) return false;
         // The last task can be removed without renumbering the others.
         if (task + 1 != static_cast<int>(plan.tasks.size())) return false;
         for (const int event : plan.tasks[task].signals) --plan.events[event].threshold;
         plan.queues[plan.tasks[task].worker].tasks.pop_back();
         plan.tasks.pop_back();
         return true;
       }},
  };
}

// For plans of targets with packets.
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
      {"packets read as plain data", false,  // harmless if a counter or the queue orders all readers as well
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
         plan.multi_step = true;
         for (size_t event = 0; event < plan.events.size(); ++event) {
           if (!plan.events[event].packets) continue;
           any_of(plan.tasks, random).carried.push_back(static_cast<int>(event));
           return true;
         }
         return false;
       }},
  };
}

}  // namespace ark::compiler::test
