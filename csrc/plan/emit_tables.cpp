// See emit_tables.hpp.
#include "plan/emit_tables.hpp"

namespace ark::plan {

Place place_of(const Plan& plan, int index, int64_t extra) {
  const Value& value = plan.graph.values()[static_cast<size_t>(index)];
  const Buffer& buffer = plan.graph.buffers()[static_cast<size_t>(value.buffer)];
  const int64_t offset = value.offset * size_of(value.type) + extra;
  if (buffer.kind == Buffer::Kind::input) return {Place::input, buffer.argument, offset};
  if (buffer.kind == Buffer::Kind::output) return {Place::output, buffer.argument, offset};
  const Placement& placement = plan.placements.at(static_cast<size_t>(value.buffer));
  return {placement.own ? Place::own : Place::arena, 0, placement.offset + offset};
}

EventTables::EventTables(const Plan& plan) {
  int count = 0;
  for (const bool carried : {false, true}) {
    for (const Task& task : plan.tasks) {
      (carried ? first_carried : first_wait).push_back(count);
      for (const int event : carried ? task.carried : task.waits) {
        if (count++ % 12 == 0) waits += count == 1 ? "    " : "\n    ";
        waits += "{" + std::to_string(event) + ", " +
                 std::to_string(plan.events.at(static_cast<size_t>(event)).threshold) + "}, ";
      }
    }
  }
  if (waits.empty()) waits = "    ";
  count = 0;
  for (const Task& task : plan.tasks) {
    first_signal.push_back(count);
    for (const int event : task.signals) {
      if (count++ % 24 == 0) signals += count == 1 ? "    " : "\n    ";
      signals += std::to_string(event) + ", ";
    }
  }
  if (signals.empty()) signals = "    ";
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

}  // namespace ark::plan
