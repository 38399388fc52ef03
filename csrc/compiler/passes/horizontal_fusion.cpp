// Merges products that share their rows and that one kernel can read with the same code. See horizontal_fusion.hpp.
#include "compiler/passes/horizontal_fusion.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "compiler/fuse/fuse_views.hpp"
#include "compiler/graph/stage_moves.hpp"

namespace ark::compiler {

namespace {

// With more rows registers run out for the addresses of several products, with codes sooner.
constexpr int64_t kMostMergedRows = 16, kMostMergedCodedRows = 8;
constexpr size_t kMostMerged = 4;

// Whether so many tiles use the workers: seven of eight at least. A few idle workers cost less than a second phase.
bool enough_tiles(int64_t tiles, const Target& target) {
  return tiles * 8 >= static_cast<int64_t>(target.workers) * 7;
}

const MatmulStage* mergeable(const Graph& graph, const Stage& stage) {
  const auto* product = std::get_if<MatmulStage>(&stage.body);
  if (product == nullptr || product->batch != 1 ||
      product->m > (product->codes.bits == 0 ? kMostMergedRows : kMostMergedCodedRows) || product->tile_columns > 0 ||
      product->axis != MatmulStage::Axis::columns)
    return nullptr;
  const Value& b = graph.values()[product->b];
  return b.strides[b.shape.size() - 2] == 1 ? product : nullptr;
}

// Whether both use the same encoding. Their scales may be at different places.
bool coded_alike(const Graph& graph, const Codes& one, const Codes& other) {
  const auto same_type = [&](int a, int b) {
    return (a < 0) == (b < 0) && (a < 0 || graph.values()[a].type == graph.values()[b].type);
  };
  return one.bits == other.bits && one.is_signed == other.is_signed && one.high_first == other.high_first &&
         one.offset == other.offset && one.zero_after == other.zero_after && one.group == other.group &&
         same_type(one.scale, other.scale) && same_type(one.zero, other.zero);
}

// Whether the same kernel code reads both.
bool alike(const Graph& graph, const MatmulStage& one, const MatmulStage& other) {
  const Value &b = graph.values()[one.b], &c = graph.values()[other.b];
  return coded_alike(graph, one.codes, other.codes) && one.a == other.a && one.m == other.m && one.k == other.k &&
         b.type == c.type && b.strides.back() == c.strides.back() && (one.n > 1) == (other.n > 1);
}

void merge_into(Stage& to, const Stage& from) {
  std::get<ProductsStage>(to.body).products.push_back(std::get<MatmulStage>(from.body));
  for (const Access& access : from.accesses) {
    const auto same = [&](const Access& known) { return known.value == access.value && known.axis == access.axis; };
    if (access.write || std::none_of(to.accesses.begin(), to.accesses.end(), same)) to.accesses.push_back(access);
  }
  to.flops += from.flops;
  to.bytes += from.bytes;
  join_names(to, from);
}

}  // namespace

std::vector<Stage> fuse_horizontally(Graph& graph, std::vector<Stage> stages, const Target& target) {
  for (size_t first = 0; first < stages.size(); ++first) {
    const MatmulStage* const product = mergeable(graph, stages[first]);
    if (product == nullptr) continue;
    const MatmulStage leader = *product;
    std::vector<size_t> others;
    // A tile takes a part of each product, so the extent is their common divisor, which must give enough tiles.
    int64_t extent = leader.n;
    for (size_t next = first + 1; next < stages.size() && others.size() + 1 < kMostMerged; ++next) {
      const MatmulStage* const other = mergeable(graph, stages[next]);
      if (other == nullptr || !alike(graph, leader, *other)) continue;
      const int64_t common = std::gcd(extent, other->n);
      if ((!enough_tiles(common, target) && (extent != common || other->n != common)) ||
          !apart_from(graph, stages[next], stages, first, next))
        continue;
      extent = common;
      others.push_back(next);
    }
    if (others.empty()) continue;
    Stage& merged = stages[first];
    merged.body = ProductsStage{{leader}};
    merged.extent = extent;
    merged.grain = 1;  // their columns are renumbered, and no start is better aligned
    const double shared = bytes_of(graph, {leader.a});
    for (const size_t other : others) {
      merge_into(merged, stages[other]);
      merged.bytes -= shared;
    }
    for (auto other = others.rbegin(); other != others.rend(); ++other)
      stages.erase(stages.begin() + static_cast<std::ptrdiff_t>(*other));
  }
  return stages;
}

}  // namespace ark::compiler
