// The frame of a plan for people who ask whether it fits a GPU: what the loaders fetch ahead of any wait, in which
// order and how much of it at once; what crosses workers as packets and what by counters; how many phases a step has;
// which buffers belong to one phase alone and which take turns by parity.
//
// A phase of a stage: one more than the largest of those that its tasks wait for.
#include "compiler/inspect/json_frame.hpp"

#include <algorithm>
#include <vector>

namespace ark::compiler {

namespace {

int phases(const Plan& plan) {
  std::vector<int> phase_of_event(plan.events.size(), 0), phase_of_stage(plan.stages.size(), 0);
  int most = 0;
  for (const Task& task : plan.tasks) {  // in an order that is valid to execute
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

}  // namespace

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
  write_share(json, "packets", by_packets);  // bytes as packets; shared with nobody
  write_share(json, "arena", of_one_phase);  // placed by lifetime
  write_share(json, "own", of_each_worker);  // of every worker
  json.close('}').close('}');
}

}  // namespace ark::compiler
