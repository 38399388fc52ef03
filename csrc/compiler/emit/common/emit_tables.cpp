// Builds the tables of waits, signals and loads that both emitters print. See emit_tables.hpp.
#include "compiler/emit/common/emit_tables.hpp"

#include <algorithm>
#include <map>

#include "util/format.hpp"

namespace ark::compiler {

std::string made_from(const Plan& plan) {
  return formatted("// Made by ark_torch from a plan of {} stages, {} tasks and {} events for {} workers.\n",
                   plan.stages.size(), plan.tasks.size(), plan.events.size(), plan.queues.size());
}

Place place_of(const Plan& plan, int index, int64_t extra) {
  const Value& value = plan.graph.values()[static_cast<size_t>(index)];
  const Buffer& buffer = plan.graph.buffers()[static_cast<size_t>(value.buffer)];
  const int64_t offset = value.offset * size_of(value.type) + extra;
  if (buffer.kind == Buffer::Kind::input) return {Place::input, buffer.argument, offset};
  if (buffer.kind == Buffer::Kind::output) return {Place::output, buffer.argument, offset};
  const Placement& placement = plan.placements.at(static_cast<size_t>(value.buffer));
  if (placement.pushed.ranks > 0) return {Place::packets, 0, placement.pushed.place + offset * 2};
  return {placement.own ? Place::own : Place::arena, 0, placement.offset + offset * (placement.packets ? 2 : 1)};
}

EventTables::EventTables(const Plan& plan) {
  for (const bool carried : {false, true}) {
    for (const Task& task : plan.tasks) {
      const int first = static_cast<int>(waits.size());
      (carried ? first_carried : first_wait).push_back(first);
      for (const int event : carried ? task.carried : task.waits) {
        const Event& one = plan.events.at(static_cast<size_t>(event));
        if (!one.packets) waits.push_back({event, one.threshold});
      }
      if (!carried) wait_count.push_back(static_cast<int>(waits.size()) - first);
    }
  }
  for (const Task& task : plan.tasks) {
    first_signal.push_back(static_cast<int>(signals.size()));
    for (const int event : task.signals)
      if (!plan.events.at(static_cast<size_t>(event)).packets) signals.push_back(event);
    signal_count.push_back(static_cast<int>(signals.size()) - first_signal.back());
  }
}

std::vector<Load> merged_loads(const std::vector<Load>& loads) {
  std::vector<Load> all;
  for (const Load& load : loads) {
    Load* last = all.empty() ? nullptr : &all.back();
    const bool same = last != nullptr && last->task == load.task && last->value == load.value;
    if (same && last->rows == 1 && load.rows == 1 && load.offset == last->offset + last->bytes)
      last->bytes += load.bytes;
    else if (same && load.rows > 1 && last->stride == load.stride && last->bytes == load.bytes &&
             load.offset == last->offset + last->rows * last->stride)
      last->rows += load.rows;
    else
      all.push_back(load);
  }
  return all;
}

std::vector<std::vector<Load>> loads_ahead(const Queue& queue, int64_t most, int64_t beside) {
  constexpr int64_t kLeast = 4096;  // granularity at which a load is split
  std::map<int, size_t> position;
  for (const int task : queue.tasks) position.try_emplace(task, position.size());
  const std::vector<Load> all = merged_loads(queue.loads);
  std::vector<int64_t> own(queue.tasks.size(), 0);  // bytes that a task loads
  for (const Load& load : all) own[position.at(load.task)] += load.rows * load.bytes;
  std::vector<std::vector<Load>> asked(queue.tasks.size());
  std::vector<int64_t> of_task(queue.tasks.size(), 0);  // bytes prefetched for it
  int64_t in_advance = 0, done = 0;                     // done: bytes of the next load that are prefetched
  size_t next = 0;
  for (size_t now = 0; now < asked.size(); ++now) {
    in_advance -= of_task[now];
    const int64_t limit = own[now] - of_task[now] >= beside ? std::min(most, beside) : most;
    for (; next < all.size() && position.at(all[next].task) <= now; ++next) done = 0;
    while (next < all.size()) {
      Load part = all[next];
      const bool whole = part.rows > 1 || part.bytes - done <= limit - in_advance;
      if (part.rows == 1) {
        part.offset += done;
        part.bytes = whole ? part.bytes - done : (limit - in_advance) / kLeast * kLeast;
      }
      const int64_t bytes = part.rows * part.bytes;
      if (bytes <= 0 || (part.rows > 1 && bytes > limit - in_advance)) break;
      in_advance += bytes;
      of_task[position.at(part.task)] += bytes;
      asked[now].push_back(part);
      done = whole ? 0 : done + bytes;
      if (!whole) break;
      ++next;
    }
  }
  return asked;
}

}  // namespace ark::compiler
