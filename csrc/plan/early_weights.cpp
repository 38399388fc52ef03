// See early_weights.hpp. How columns are batched is as in cuda/loop/lanes.cuh, matvec.cuh and products.cuh.
#include "plan/early_weights.hpp"

#include <algorithm>
#include <string>
#include <variant>

#include "cuda/loop/early_weights.cuh"

namespace ark::plan {

namespace {

constexpr int64_t kChunk = 16;  // bytes that a thread loads at once

int64_t in_wholes(int64_t count, int64_t whole) {
  return (count + whole - 1) / whole;
}

// Of a value's last dimension but `from_end`; of one element any.
int64_t stride_of(const Value& value, size_t from_end, int64_t otherwise) {
  const size_t d = value.shape.size() - from_end;
  return value.shape[d] == 1 ? otherwise : value.strides[d];
}

// How a product's columns pass.
struct Batches {
  int64_t size = 0;      // bytes of an element
  int64_t together = 0;  // columns that a warp takes together
  int64_t early = 0;     // of these, that are copied
  int64_t slices = 0, passes = 0;
  int64_t columns = 0, step = 0;  // of a batch; elements of depth that a pass takes

  Batches(const Graph& graph, const MatmulStage& product) {
    size = size_of(graph.values()[static_cast<size_t>(product.b)].type);
    together = product.m <= 2 ? 8 : 4;
    early = together == 8 ? loop::kEarlyColumns<8> : loop::kEarlyColumns<4>;
    const int64_t slice = 32 * kChunk / size, count = in_wholes(std::max<int64_t>(product.k, 1), slice);
    passes = in_wholes(count, loop::kWarps);
    slices = in_wholes(count, passes);
    columns = loop::kWarps / slices * together;
    step = slices * slice;
  }
};

// Whether the fast kernel for few rows computes it, from a parameter.
bool is_simple(const Graph& graph, const MatmulStage& product) {
  const Value& b = graph.values()[static_cast<size_t>(product.b)];
  const Buffer& buffer = graph.buffers()[static_cast<size_t>(b.buffer)];
  const int64_t per = kChunk / size_of(b.type);
  return buffer.parameter && !buffer.mutated && is_floating(b.type) && size_of(b.type) <= 4 && product.batch == 1 &&
         product.axis == MatmulStage::Axis::columns && product.m <= 32 / per && stride_of(b, 2, 1) == 1 &&
         stride_of(b, 1, product.k) % per == 0 && product.k % per == 0;
}

// Columns of one product in a tile.
struct Columns {
  int64_t begin, end;
};
Columns columns_of(const MatmulStage& product, const Stage& stage, const Task& task) {
  const int64_t each = product.n / stage.extent;
  return {task.begin * each, task.end * each};
}

// Numbers of a tile's columns: each product's begin where a warp's columns do.
int64_t numbers_of(const Stage& stage, const Task& task, int64_t together) {
  int64_t count = 0;
  const std::span<const MatmulStage> products = matmuls_of(stage);
  for (const MatmulStage& product : products) {
    const Columns columns = columns_of(product, stage, task);
    const int64_t own = columns.end - columns.begin;
    count += products.size() == 1 ? own : in_wholes(own, together) * together;
  }
  return count;
}

// Whether all sums of the tile fit into the workspace at once, as in_slices() (cuda/loop/lanes.cuh) reckons.
bool in_one_run(const Stage& stage, const Task& task, const Batches& batches) {
  const int64_t words = loop::kEarlyWorkspaceBytes / 4 / matmuls_of(stage)[0].m - 8;
  return numbers_of(stage, task, batches.together) <= words / batches.slices / batches.columns * batches.columns;
}

bool has_copies(const std::string& target) {
  return target.rfind("sm_", 0) == 0 && std::stoi(target.substr(3)) >= 90;
}

bool fits(const Plan& plan, const Stage& stage) {
  const std::span<const MatmulStage> products = matmuls_of(stage);
  return !products.empty() &&
         std::all_of(products.begin(), products.end(),
                     [&](const MatmulStage& one) { return is_simple(plan.graph, one) && one.n % stage.extent == 0; });
}

// Takes bytes [begin, end) out of a load: what comes before goes to `done`, what comes behind stays.
void cut_out(int64_t begin, int64_t end, Load& load, std::vector<Load>& done) {
  const int64_t past = load.offset + load.bytes;
  if (begin >= past || end <= load.offset) return;
  if (begin > load.offset) {
    done.push_back(load);
    done.back().bytes = begin - load.offset;
  }
  load.offset = std::min(end, past);
  load.bytes = past - load.offset;
}

}  // namespace

void mark_early_weights(Plan& plan) {
  // What else wants the whole of shared memory, or is counted with its workspace.
  const bool crowded = std::any_of(plan.stages.begin(), plan.stages.end(), [](const Stage& stage) {
    const std::span<const MatmulStage> products = matmuls_of(stage);
    return std::holds_alternative<SelectStage>(stage.body) || std::holds_alternative<ExpertsStage>(stage.body) ||
           std::any_of(products.begin(), products.end(), [](const MatmulStage& one) { return one.tile_columns > 0; });
  });
  if (crowded || !has_copies(plan.target.name)) return;
  std::vector<char> marked(plan.stages.size(), 0);
  for (size_t i = 0; i < plan.stages.size(); ++i) marked[i] = fits(plan, plan.stages[i]);
  for (const Task& task : plan.tasks) {
    const auto s = static_cast<size_t>(task.stage);
    if (!marked[s]) continue;
    const Stage& stage = plan.stages[s];
    marked[s] = !task.replica && task.begin < task.end &&
                in_one_run(stage, task, Batches(plan.graph, matmuls_of(stage)[0]));
  }
  for (size_t i = 0; i < plan.stages.size(); ++i) {
    if (!marked[i]) continue;
    if (auto* one = std::get_if<MatmulStage>(&plan.stages[i].body)) one->early = true;
    if (auto* several = std::get_if<ProductsStage>(&plan.stages[i].body))
      for (MatmulStage& product : several->products) product.early = true;
  }
}

bool has_early_weights(const Plan& plan) {
  return std::any_of(plan.stages.begin(), plan.stages.end(), [](const Stage& stage) {
    return !matmuls_of(stage).empty() && matmuls_of(stage)[0].early;
  });
}

std::vector<EarlyPart> early_parts(const Plan& plan, const Task& task) {
  const Stage& stage = plan.stages.at(static_cast<size_t>(task.stage));
  const std::span<const MatmulStage> products = matmuls_of(stage);
  std::vector<EarlyPart> parts;
  if (products.empty() || !products[0].early) return parts;
  const Batches batches(plan.graph, products[0]);
  const int64_t count = numbers_of(stage, task, batches.together);
  const int64_t last = (in_wholes(count, batches.columns) - 1) * batches.columns;  // batch's first number
  int64_t number = 0;                                                              // of the product's first column
  for (const MatmulStage& product : products) {
    const Columns columns = columns_of(product, stage, task);
    const int64_t own = columns.end - columns.begin;
    const Value& b = plan.graph.values()[static_cast<size_t>(product.b)];
    const int64_t depth = (batches.passes - 1) * batches.step, column = stride_of(b, 1, product.k);
    for (int64_t first = std::max<int64_t>(0, last - number); first < own; first += batches.together) {
      const int64_t warps = (number + first - last) / batches.together;  // before that
      EarlyPart part{.value = product.b,
                     .offset = (b.offset + (columns.begin + first) * column + depth) * batches.size,
                     .rows = std::min(own - first, batches.early),
                     .bytes = (product.k - depth) * batches.size,
                     .stride = column * batches.size,
                     .to = warps * batches.early * batches.step * batches.size,
                     .pitch = batches.step * batches.size};
      if (part.bytes == part.stride && part.bytes == part.pitch) part.bytes *= part.rows, part.rows = 1;
      parts.push_back(part);
    }
    number += in_wholes(own, batches.together) * batches.together;
  }
  return parts;
}

Queue without_early(const Plan& plan, const Queue& queue) {
  Queue rest{.tasks = queue.tasks, .loads = {}};
  int task = -1;
  std::vector<EarlyPart> parts;
  for (Load load : queue.loads) {
    if (load.task != task) parts = early_parts(plan, plan.tasks.at(static_cast<size_t>(task = load.task)));
    for (const EarlyPart& part : parts)
      if (part.value == load.value && part.rows == 1 && load.rows == 1)
        cut_out(part.offset, part.offset + part.bytes, load, rest.loads);
    if (load.bytes > 0) rest.loads.push_back(load);
  }
  return rest;
}

}  // namespace ark::plan
