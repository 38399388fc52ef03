// Splits the parameters that tasks read into pages, each byte once per task. See prefetch.hpp.
#include "compiler/schedule/prefetch.hpp"

#include <algorithm>
#include <utility>
#include <variant>

#include "compiler/graph/box.hpp"

namespace ark::compiler {

bool loaded_ahead(const Graph& graph, const Stage& stage, const Access& access) {
  const int index = graph.values()[access.value].buffer;
  if (access.write || index < 0) return false;
  const Buffer& buffer = graph.buffers()[index];
  if (!buffer.parameter || buffer.mutated) return false;
  if (access.sparse) return false;  // the part is known only at run time
  const auto* gather = std::get_if<GatherStage>(&stage.body);
  return gather == nullptr || access.value != gather->table;
}

namespace {

constexpr int64_t kSector = 32;  // bytes that memory transfers at least

// Joins runs with less than a sector between them. They become whole steps of their stride where the buffer has these
// bytes, so that numbers of two kinds that take turns (scales and zeros) make the same box.
Box joined(Box box, int64_t size) {
  while (box.depth > 0) {
    const auto [stride, count] = box.dimensions[box.depth - 1];
    if (stride - box.width >= kSector) break;
    box.dimensions[--box.depth] = {};
    const int64_t before = box.offset % stride, steps = (before + box.width + stride - 1) / stride;
    box.width += (count - 1) * stride;
    Box whole = box;
    whole.offset -= before;
    whole.width = (count - 1 + steps) * stride;
    if (whole.end() <= size) box = whole;
  }
  return box;
}

}  // namespace

Box loaded_box(const Graph& graph, const Stage& stage, const Task& task, int value) {
  const int64_t size = graph.buffer_of(value).bytes;
  Box box;
  bool first = true;
  for (const Access& access : stage.accesses) {
    if (access.write || access.value != value) continue;
    const Box part = box_of(graph, stage, access, task.begin, task.end);
    if (!first && !(part == box)) return joined(box_of(graph.values()[value]), size);
    box = part;
    first = false;
  }
  return joined(box, size);
}

void add_loads(const Plan& plan, int index, std::vector<Load>& loads) {
  const Task& task = plan.tasks[index];
  const Stage& stage = plan.stages[task.stage];
  const int64_t page = plan.target.page_bytes;
  std::vector<std::pair<int, Box>> seen;
  for (const Access& access : stage.accesses) {
    if (!loaded_ahead(plan.graph, stage, access)) continue;
    const int buffer = plan.graph.values()[access.value].buffer;
    const Box box = loaded_box(plan.graph, stage, task, access.value);
    const auto again = [&](const auto& other) { return other.first == buffer && covers(other.second, box); };
    if (box.empty() || std::any_of(seen.begin(), seen.end(), again)) continue;
    seen.push_back({buffer, box});
    each_piece(box, [&](int64_t offset, int64_t rows, int64_t stride) {
      const int64_t at_once = std::max<int64_t>(1, page / box.width);  // rows per page
      for (int64_t row = 0; row < rows; row += at_once) {
        const int64_t count = std::min(at_once, rows - row);
        for (int64_t done = 0; done < box.width; done += page) {
          const int64_t bytes = std::min(page, box.width - done);
          loads.push_back({index, access.value, offset + row * stride + done, bytes, count, count > 1 ? stride : 0});
        }
      }
    });
  }
}

}  // namespace ark::compiler
