// See loads.hpp.
#include "plan/loads.hpp"

#include <algorithm>
#include <utility>
#include <variant>

#include "plan/region.hpp"

namespace ark::plan {

bool loaded_ahead(const Graph& graph, const Stage& stage, const Access& access) {
  const int index = graph.values()[access.value].buffer;
  if (access.write || index < 0) return false;
  const Buffer& buffer = graph.buffers()[index];
  if (!buffer.parameter || buffer.mutated) return false;
  if (access.sparse) return false;  // which part is known at run time
  const auto* gather = std::get_if<GatherStage>(&stage.body);
  return gather == nullptr || access.value != gather->table;
}

Region loaded_region(const Graph& graph, const Stage& stage, const Task& task, int value) {
  Region region;
  bool first = true;
  for (const Access& access : stage.accesses) {
    if (access.write || access.value != value) continue;
    const Region part = region_of(graph, stage, access, task.begin, task.end);
    if (!first && !(part == region)) return region_of(graph.values()[value]);
    region = part;
    first = false;
  }
  return region;
}

void add_loads(const Plan& plan, int index, std::vector<Load>& loads) {
  const Task& task = plan.tasks[index];
  const Stage& stage = plan.stages[task.stage];
  const int64_t page = plan.target.page_bytes;
  std::vector<std::pair<int, Region>> seen;
  for (const Access& access : stage.accesses) {
    if (!loaded_ahead(plan.graph, stage, access)) continue;
    const int buffer = plan.graph.values()[access.value].buffer;
    const Region region = loaded_region(plan.graph, stage, task, access.value);
    const auto again = [&](const auto& other) { return other.first == buffer && covers(other.second, region); };
    if (region.empty() || std::any_of(seen.begin(), seen.end(), again)) continue;
    seen.push_back({buffer, region});
    each_piece(region, [&](int64_t offset, int64_t rows, int64_t stride) {
      const int64_t at_once = std::max<int64_t>(1, page / region.width);  // rows a page
      for (int64_t row = 0; row < rows; row += at_once) {
        const int64_t count = std::min(at_once, rows - row);
        for (int64_t done = 0; done < region.width; done += page) {
          const int64_t bytes = std::min(page, region.width - done);
          loads.push_back({index, access.value, offset + row * stride + done, bytes, count, count > 1 ? stride : 0});
        }
      }
    });
  }
}

}  // namespace ark::plan
