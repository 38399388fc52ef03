// A plan as JSON, for people and tools: target, stages, tasks, events, queues, prefetches and the placement of buffers.
// Loads are summed per task and value, since pages of one value are consecutive.
//
// The "frame" tells whether the plan fits a GPU: what is prefetched ahead of any wait, in which order and how much at
// once; what crosses workers as packets and what by counters; how many phases a step has; which buffers belong to one
// phase and which alternate between steps.
#include <algorithm>
#include <string>
#include <vector>

#include "compiler/graph/scalar_type.hpp"
#include "compiler/inspect/json.hpp"
#include "compiler/passes/cache_policy.hpp"
#include "compiler/schedule/targets.hpp"
#include "util/json_writer.hpp"

namespace ark::compiler {

namespace {

void write_list(JsonWriter& json, const char* name, const std::vector<int>& list) {
  json.key(name).open('[');
  for (const int item : list) json.number(item);
  json.close(']');
}

void write_target(JsonWriter& json, const Target& target) {
  json.key("target").open('{');
  json.field("name", target.name).field("workers", target.workers);
  json.field("page_bytes", target.page_bytes).field("pages", target.pages).field("in_flight", target.in_flight);
  json.field("bytes_in_flight", target.page_bytes * target.in_flight).flag("packets", target.packets);
  const auto write = [&](const char* name, double figure) { json.key(name).real(figure); };
  each_cost(target, write);
  if (target.name != "cpu") each_tile_cost(target, write);
  json.field("costs", target.costs).field("cache", name_of(target.caching));
  json.field("cache_bytes", target.caches.bytes).close('}');
}

void write_stages(JsonWriter& json, const Plan& plan) {
  std::vector<int> tasks(plan.stages.size(), 0);
  std::vector<double> cost(plan.stages.size(), 0);
  std::vector<bool> replicated(plan.stages.size(), false);
  for (const Task& task : plan.tasks) {
    ++tasks[task.stage];
    cost[task.stage] += task.cost_us;
    if (task.replica) replicated[task.stage] = true;
  }
  const NextUses uses(plan);
  json.key("stages").open('[');
  for (size_t index = 0; index < plan.stages.size(); ++index) {
    const Stage& stage = plan.stages[index];
    json.open('{').field("stage", static_cast<int64_t>(index)).field("kind", stage.kind).field("name", stage.name);
    json.field("origin", stage.origin).field("extent", stage.extent).field("grain", stage.grain);
    json.key("flops").real(stage.flops).key("bytes").real(stage.bytes);
    json.field("tasks", tasks[index]).flag("replicated", replicated[index]);
    json.key("cost_us").real(cost[index]);
    const auto* product = std::get_if<MatmulStage>(&stage.body);
    if (product != nullptr && product->tf32 && plan.target.name != "cpu") json.field("precision", "tf32");
    if (product != nullptr && product->tile_columns > 0) {
      json.key("tile").open('{').field("rows", product->tile_rows).field("columns", product->tile_columns);
      json.field("depth", product->k).field("size", size_of(plan.graph.values()[product->a].type));
      if (product->second.b >= 0) json.flag("dual", true);
      json.flag("finished", !product->finish.empty()).close('}');
    }
    json.key("accesses").open('[');
    for (const Access& access : stage.accesses) {
      json.open('{').field("value", access.value).field("axis", access.axis).flag("write", access.write);
      json.field("operand", name_of(kind_of(plan, access))).field("cache", name_of(access.cache));
      if (access.prefetch != Prefetch::usual) json.field("prefetch", name_of(access.prefetch));
      json.key("bytes_until_read").real(uses.bytes_until_read(index, access)).close('}');
    }
    json.close(']').close('}');
  }
  json.close(']');
}

void write_values(JsonWriter& json, const Graph& graph) {
  json.key("values").open('[');
  for (const Value& value : graph.values()) {
    json.open('{').field("buffer", value.buffer).field("type", name_of(value.type));
    if (value.is_literal()) {
      json.key("literal").real(value.literal).close('}');
      continue;
    }
    json.key("shape").open('[');
    for (const int64_t length : value.shape) json.number(length);
    json.close(']').key("strides").open('[');
    for (const int64_t stride : value.strides) json.number(stride);
    json.close(']').field("offset", value.offset).close('}');
  }
  json.close(']');
}

void write_buffers(JsonWriter& json, const Plan& plan) {
  json.key("buffers").open('[');
  for (size_t index = 0; index < plan.graph.buffers().size(); ++index) {
    const Buffer& buffer = plan.graph.buffers()[index];
    const char* kinds[] = {"input", "output", "temporary"};
    json.open('{').field("kind", kinds[static_cast<int>(buffer.kind)]).field("bytes", buffer.bytes);
    if (buffer.kind != Buffer::Kind::temporary) json.field("argument", buffer.argument);
    if (buffer.parameter) json.flag("parameter", true);
    if (buffer.mutated) json.flag("mutated", true);
    if (index < plan.placements.size() && plan.placements[index].offset >= 0) {
      const Placement& placement = plan.placements[index];
      json.field("arena", placement.own ? "own" : "shared").field("offset", placement.offset);
      if (placement.packets) json.flag("packets", true);
    }
    json.close('}');
  }
  json.close(']');
}

// The start of each task in microseconds, if all tasks take their estimated time. A wait ends wait_us after the signal
// of another worker.
std::vector<double> estimated_starts(const Plan& plan) {
  std::vector<double> start(plan.tasks.size(), 0), free(plan.queues.size(), 0);
  std::vector<std::pair<double, int>> met(plan.events.size(), {0, -1});  // last signal, and the worker that sent it
  for (size_t index = 0; index < plan.tasks.size(); ++index) {
    const Task& task = plan.tasks[index];
    double at = free[task.worker];
    for (const int event : task.waits) {
      const auto& [signal, by] = met[event];
      at = std::max(at, signal + (by == task.worker ? 0 : plan.target.wait_us));
    }
    start[index] = at;
    free[task.worker] = at + task.cost_us;
    for (const int event : task.signals) met[event] = std::max(met[event], {free[task.worker], task.worker});
  }
  return start;
}

void write_tasks(JsonWriter& json, const Plan& plan) {
  const std::vector<double> starts = estimated_starts(plan);
  json.key("tasks").open('[');
  for (size_t index = 0; index < plan.tasks.size(); ++index) {
    const Task& task = plan.tasks[index];
    json.open('{').field("stage", task.stage).field("begin", task.begin).field("end", task.end);
    json.field("worker", task.worker);
    if (task.replica) json.flag("replica", true);
    if (task.head >= 0) json.field("head", task.head);
    write_list(json, "waits", task.waits);
    if (!task.carried.empty()) write_list(json, "carried", task.carried);
    write_list(json, "signals", task.signals);
    json.key("begin_us").real(starts[index]).key("cost_us").real(task.cost_us).close('}');
  }
  // The stage that signals each event, for the descriptions of waits.
  std::vector<const Stage*> signalling(plan.events.size(), nullptr);
  for (const Task& task : plan.tasks) {
    for (const int event : task.signals) signalling[event] = &plan.stages[task.stage];
  }
  json.close(']').key("events").open('[');
  for (size_t index = 0; index < plan.events.size(); ++index) {
    const Event& event = plan.events[index];
    json.open('{').field("threshold", event.threshold).flag("packets", event.packets);
    if (const Stage* of = signalling[index]) json.field("of", of->name + ": " + of->origin);
    json.close('}');
  }
  json.close(']');
}

void write_queues(JsonWriter& json, const Plan& plan) {
  json.key("queues").open('[');
  for (const Queue& queue : plan.queues) {
    json.open('{');
    write_list(json, "tasks", queue.tasks);
    int64_t total = 0;
    json.key("loads").open('[');
    for (size_t first = 0; first < queue.loads.size();) {
      const Load& load = queue.loads[first];
      int64_t bytes = 0;
      size_t last = first;
      while (last < queue.loads.size() && queue.loads[last].task == load.task &&
             queue.loads[last].value == load.value) {
        bytes += queue.loads[last].bytes * queue.loads[last].rows;
        ++last;
      }
      json.open('{').field("task", load.task).field("value", load.value).field("offset", load.offset);
      json.field("bytes", bytes).field("pages", static_cast<int64_t>(last - first)).close('}');
      total += bytes;
      first = last;
    }
    json.close(']').field("load_pages", static_cast<int64_t>(queue.loads.size())).field("load_bytes", total).close('}');
  }
  json.close(']');
}

// The number of phases. A stage's phase is one more than the latest phase that its tasks wait for.
int phases(const Plan& plan) {
  std::vector<int> phase_of_event(plan.events.size(), 0), phase_of_stage(plan.stages.size(), 0);
  int most = 0;
  for (const Task& task : plan.tasks) {  // in a valid execution order
    int& mine = phase_of_stage[static_cast<size_t>(task.stage)];
    for (const int event : task.waits) mine = std::max(mine, phase_of_event[static_cast<size_t>(event)] + 1);
    for (const int event : task.signals) {
      int& theirs = phase_of_event[static_cast<size_t>(event)];
      theirs = std::max(theirs, mine);
    }
    most = std::max(most, mine);
  }
  return plan.tasks.empty() ? 0 : most + 1;
}

struct Share {
  int64_t buffers = 0, bytes = 0;
  void add(int64_t more) {
    ++buffers;
    bytes += more;
  }
};

void write_share(JsonWriter& json, const char* name, const Share& share) {
  json.key(name).open('{').field("buffers", share.buffers).field("bytes", share.bytes).close('}');
}

void write_loader(JsonWriter& json, const Plan& plan) {
  int64_t pages = 0, bytes = 0, least = -1, most = 0, in_order = 1;
  for (const Queue& queue : plan.queues) {
    int64_t mine = 0;
    size_t position = 0;
    for (const Load& load : queue.loads) {
      mine += load.bytes * load.rows;
      while (position < queue.tasks.size() && queue.tasks[position] != load.task) ++position;
    }
    if (position == queue.tasks.size() && !queue.loads.empty()) in_order = 0;
    pages += static_cast<int64_t>(queue.loads.size());
    bytes += mine;
    least = least < 0 ? mine : std::min(least, mine);
    most = std::max(most, mine);
  }
  json.key("loader").open('{').field("order", in_order != 0 ? "of the queue's tasks" : "broken");
  json.flag("waits", false);
  json.field("pages", int64_t{plan.target.pages}).field("page_bytes", plan.target.page_bytes);
  json.field("pages_in_flight", int64_t{plan.target.in_flight});
  json.field("bytes_in_flight", plan.target.in_flight * plan.target.page_bytes);
  json.field("loads", pages).field("bytes", bytes);
  json.field("least_bytes_of_a_worker", std::max<int64_t>(least, 0)).field("most_bytes_of_a_worker", most).close('}');
}

void write_frame(JsonWriter& json, const Plan& plan) {
  int64_t packets = 0, waits = 0, waits_for_packets = 0;
  for (const Event& event : plan.events) packets += event.packets ? 1 : 0;
  for (const Task& task : plan.tasks) {
    waits += static_cast<int64_t>(task.waits.size());
    for (const int event : task.waits) waits_for_packets += plan.events[static_cast<size_t>(event)].packets ? 1 : 0;
  }
  Share by_packets, of_one_phase, of_each_worker;
  for (size_t index = 0; index < plan.placements.size(); ++index) {
    const Placement& placement = plan.placements[index];
    if (placement.offset < 0) continue;
    const int64_t bytes = plan.graph.buffers()[index].bytes;
    if (placement.packets) {
      by_packets.add(2 * bytes);
    } else if (placement.own) {
      of_each_worker.add(bytes);
    } else {
      of_one_phase.add(bytes);
    }
  }
  json.key("frame").open('{');
  json.field("workers", static_cast<int64_t>(plan.queues.size())).field("phases", int64_t{phases(plan)});
  write_loader(json, plan);
  json.key("events").open('{').field("packets", packets);
  json.field("counters", static_cast<int64_t>(plan.events.size()) - packets).close('}');
  json.key("waits").open('{').field("packets", waits_for_packets).field("counters", waits - waits_for_packets);
  json.close('}').key("temporaries").open('{');
  write_share(json, "packets", by_packets);  // bytes as packets, not shared
  write_share(json, "arena", of_one_phase);  // placed by lifetime
  write_share(json, "own", of_each_worker);  // per worker
  json.close('}').close('}');
}

}  // namespace

std::string to_json(const Plan& plan) {
  JsonWriter json;
  json.open('{');
  write_target(json, plan.target);
  json.key("estimated_us").real(plan.estimated_us).flag("multi_step", plan.multi_step);
  json.field("arena_bytes", plan.arena_bytes).field("own_bytes", plan.own_bytes);
  json.field("eager_peak_bytes", plan.eager_peak_bytes);
  write_frame(json, plan);
  write_values(json, plan.graph);
  write_buffers(json, plan);
  write_stages(json, plan);
  write_tasks(json, plan);
  write_queues(json, plan);
  json.close('}');
  return json.take();
}

}  // namespace ark::compiler
