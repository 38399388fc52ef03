// Mutations that break a plan's placements and loads, for validator_test.cpp. See broken_plans.hpp.
#pragma once

#include "compiler/verify/broken_plans.hpp"

namespace ark::compiler::test {

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
      {"prefetch that no worker asks for", false,
       [](Plan& plan, std::mt19937_64& random) {
         const bool any =
             std::any_of(plan.prefetches.begin(), plan.prefetches.end(), [](auto& one) { return !one.empty(); });
         if (!any) return false;
         std::vector<Load>* asked = &any_of(plan.prefetches, random);
         while (asked->empty()) asked = &any_of(plan.prefetches, random);
         asked->erase(asked->begin() + random() % asked->size());
         return true;
       }},
      {"prefetch by a worker that does not read it", true,
       [](Plan& plan, std::mt19937_64& random) {
         if (plan.prefetches.size() < 2) return false;
         std::vector<Load>& from = any_of(plan.prefetches, random);
         std::vector<Load>& to = any_of(plan.prefetches, random);
         if (from.empty() || &from == &to) return false;
         to.push_back(from.back());
         return true;
       }},
      {"prefetches of too few workers", true,
       [](Plan& plan, std::mt19937_64&) {
         if (plan.prefetches.empty()) return false;
         plan.prefetches.pop_back();
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

}  // namespace ark::compiler::test
