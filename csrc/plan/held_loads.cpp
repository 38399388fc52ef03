// See held_loads.hpp.
#include "plan/held_loads.hpp"

#include <algorithm>
#include <map>
#include <variant>

#include "plan/loads.hpp"

namespace ark::plan {

namespace {

constexpr int64_t kTogether = 8;    // columns that a warp takes at once (matvec.cuh)
constexpr int64_t kLeast = 8192;    // bytes that are worth asking for
constexpr int64_t kFewBytes = 128;  // of registers that a thread has for its part of the rows (kFewRows of matmul.cuh)

std::vector<MatmulStage> multiplied(const Stage& stage) {
  if (const auto* one = std::get_if<MatmulStage>(&stage.body)) return {*one};
  if (const auto* several = std::get_if<ProductsStage>(&stage.body)) return several->products;
  return {};
}

bool fits(const Plan& plan, const Stage& stage, const MatmulStage& product) {
  const Value& b = plan.graph.values()[static_cast<size_t>(product.b)];
  const int64_t size = size_of(b.type), rank = static_cast<int64_t>(b.shape.size());
  const auto access = std::find_if(stage.accesses.begin(), stage.accesses.end(),
                                   [&](const Access& one) { return !one.write && one.value == product.b; });
  return product.axis == MatmulStage::Axis::columns && product.batch == 1 && product.m * 16 / size * 4 <= kFewBytes &&
         product.k * size % 16 == 0 && b.strides[static_cast<size_t>(rank - 2)] == 1 &&
         b.strides[static_cast<size_t>(rank - 1)] == product.k && access != stage.accesses.end() &&
         loaded_ahead(plan.graph, stage, *access);
}

std::vector<Load> pieces_of(const Plan& plan, int index, int64_t room) {
  const Task& task = plan.tasks[static_cast<size_t>(index)];
  const Stage& stage = plan.stages[static_cast<size_t>(task.stage)];
  const std::vector<MatmulStage> products = multiplied(stage);
  std::vector<Load> pieces;
  for (const MatmulStage& product : products) {
    if (!fits(plan, stage, product)) break;
    const Value& b = plan.graph.values()[static_cast<size_t>(product.b)];
    const int64_t column = product.k * size_of(b.type), first = task.begin * product.n / stage.extent;
    const int64_t columns = task.end * product.n / stage.extent - first;
    int64_t some = std::min(columns, room / column);
    if (some < columns && products.size() > 1) some -= some % kTogether;
    if (some > 0)
      pieces.push_back({index, product.b, b.offset * size_of(b.type) + first * column, some * column, 1, 0});
    room -= some * column;
    if (some < columns) break;
  }
  return pieces;
}

}  // namespace

std::vector<HeldLoads> held_loads(const Plan& plan, const Queue& queue, int64_t room) {
  std::vector<HeldLoads> all;
  for (size_t place = 1; place < queue.tasks.size(); ++place) {
    const size_t from = all.empty() ? 0 : all.back().task + 1;
    const Task& task = plan.tasks[static_cast<size_t>(queue.tasks[place])];
    if (from > place || (from == place && task.waits.empty())) continue;
    std::vector<Load> pieces = pieces_of(plan, queue.tasks[place], room);
    int64_t bytes = 0;
    for (const Load& piece : pieces) bytes += piece.bytes;
    if (bytes >= kLeast) all.push_back({from, place, std::move(pieces)});
  }
  return all;
}

Queue without_held(Queue queue, const std::vector<HeldLoads>& held) {
  std::map<int, const HeldLoads*> of_task;
  for (const HeldLoads& one : held) of_task[one.pieces.front().task] = &one;
  std::vector<Load> rest;
  for (Load load : queue.loads) {
    const auto found = of_task.find(load.task);
    if (found != of_task.end() && load.rows == 1)
      for (const Load& piece : found->second->pieces) {
        if (piece.value != load.value || load.offset < piece.offset) continue;
        const int64_t gone = std::clamp<int64_t>(piece.offset + piece.bytes - load.offset, 0, load.bytes);
        load.offset += gone;
        load.bytes -= gone;
      }
    if (load.bytes > 0) rest.push_back(load);
  }
  queue.loads = std::move(rest);
  return queue;
}

}  // namespace ark::plan
