// Mutations that break a plan's tiles, for validator_test.cpp. See broken_plans.hpp.
#pragma once

#include "compiler/verify/broken_plans.hpp"

namespace ark::compiler::test {

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
      {"missing replica", false,  // harmless if nothing reads the copy; the tiler drops those already
       [](Plan& plan, std::mt19937_64& random) {
         const int task = any_task(plan, random, [](const Task& each) { return each.replica; });
         if (task < 0) return false;
         forget_signals(plan, task);
         drop_empty_events(plan);
         erase_task(plan, task);
         return true;
       }},
      {"tiles that write the same bytes", true,
       [](Plan& plan, std::mt19937_64& random) {
         const int task = any_task(plan, random, [&](const Task& each) {
           const auto beside = std::count_if(plan.tasks.begin(), plan.tasks.end(),
                                             [&](const Task& other) { return other.stage == each.stage; });
           return !each.replica && beside > 1;
         });
         if (task < 0) return false;
         for (Access& access : plan.stages[plan.tasks[task].stage].accesses) {
           if (!access.write || access.axis < 0) continue;
           access.axis = -1;
           return true;
         }
         return false;
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

}  // namespace ark::compiler::test
