// Joins pointwise stages to the product stage whose columns they read. See tail_fusion.hpp.
#include "compiler/passes/tail_fusion.hpp"

#include <algorithm>
#include <set>
#include <utility>

#include "compiler/fuse/fuse_views.hpp"
#include "compiler/graph/box.hpp"
#include "compiler/graph/stage_moves.hpp"

namespace ark::compiler {

namespace {

using Instruction = RowProgram::Instruction;
using Kind = Instruction::Kind;

constexpr int64_t kMostRowsOfHead = 16;  // of products that are cut by columns only
constexpr size_t kMostTails = 3;

// The products of a stage, if they have few rows and are cut by columns.
std::vector<MatmulStage> products_of(const Stage& stage) {
  if (const auto* several = std::get_if<ProductsStage>(&stage.body)) return several->products;
  const auto* one = std::get_if<MatmulStage>(&stage.body);
  if (one == nullptr || one->batch != 1 || one->m > kMostRowsOfHead || one->axis != MatmulStage::Axis::columns)
    return {};
  return {*one};
}

bool touches(const Graph& graph, int value, int other) {
  return graph.values()[value].buffer == graph.values()[other].buffer &&
         overlap(box_of(graph.values()[value]), box_of(graph.values()[other]));
}

// Whether tiles cut along `axis` load only those of the head's results that the head's own tile wrote.
bool loads_own(const Graph& graph, const Stage& head, const RowProgram& program, int axis) {
  const Stage whole{.extent = head.extent};
  const auto part = [&](int value, int dimension) { return box_of(graph, whole, {value, dimension}, 0, 1); };
  for (const Instruction& one : program.code) {
    if (one.kind != Kind::load) continue;
    for (const Access& made : head.accesses) {
      if (!made.write || !touches(graph, one.value, made.value)) continue;
      const Value &out = graph.values()[made.value], &view = graph.values()[one.value];
      const auto a = static_cast<size_t>(axis);
      if (made.axis < 0 || view.shape[a] != program.shape[a] || view.shape[a] != out.shape[made.axis] ||
          view.strides[a] != out.strides[made.axis] || !covers(part(made.value, made.axis), part(one.value, axis)))
        return false;
    }
  }
  return true;
}

// The dimension along which the head's tiles may cut the program; -1: none.
int axis_for(const Graph& graph, const Stage& head, const RowProgram& program) {
  for (const Instruction& one : program.code)
    if (one.kind == Kind::reduce || (one.kind == Kind::store && one.scalar) || one.parts.count > 1) return -1;
  for (int axis = static_cast<int>(program.shape.size()) - 1; axis >= 0; --axis) {
    const auto a = static_cast<size_t>(axis);
    const bool stored = std::all_of(program.code.begin(), program.code.end(), [&](const Instruction& one) {
      return one.kind != Kind::store || one.strides[a] != 0;
    });
    if (stored && program.shape[a] % head.extent == 0 && loads_own(graph, head, program, axis)) return axis;
  }
  return -1;
}

// The last stage before `end` that writes part of what the value shows; -1: none.
int writer_before(const Graph& graph, const std::vector<Stage>& stages, size_t end, int value) {
  for (size_t index = end; index-- > 0;)
    for (const Access& access : stages[index].accesses)
      if (access.write && touches(graph, access.value, value)) return static_cast<int>(index);
  return -1;
}

class Joiner {
 public:
  Joiner(const Graph& graph, std::vector<Stage> stages) : graph_(graph), stages_(std::move(stages)) {}

  std::vector<Stage> run() {
    for (size_t head = 0; head < stages_.size(); ++head) {
      const std::vector<MatmulStage> products = products_of(stages_[head]);
      if (products.empty()) continue;
      const int made = writer_before(graph_, stages_, head, products[0].a);
      for (size_t next = head + 1; next < stages_.size() && stages_[head].tail.size() < kMostTails; ++next) {
        if (!may_join(head, next, made)) continue;
        join(head, next);
        --next;
      }
    }
    return std::move(stages_);
  }

 private:
  bool written_by(const Stage& head, int value) const {
    return std::any_of(head.accesses.begin(), head.accesses.end(),
                       [&](const Access& access) { return access.write && touches(graph_, access.value, value); });
  }

  // `made`: the stage that wrote the rows of the head's products.
  bool may_join(size_t head, size_t next, int made) const {
    const Stage &first = stages_[head], &then = stages_[next];
    const auto* program = std::get_if<RowProgram>(&then.body);
    if (program == nullptr || !then.tail.empty() || !apart_from(graph_, then, stages_, head + 1, next)) return false;
    bool reads = false;
    for (const Access& access : then.accesses) {
      if (access.write) {
        // The stage may overwrite nothing of the head's, not even its own tile's: other tiles read the head's rows.
        for (const Access& other : first.accesses)
          if (touches(graph_, access.value, other.value)) return false;
      } else if (written_by(first, access.value)) {
        reads = true;
      } else if (writer_before(graph_, stages_, head, access.value) > made) {
        return false;
      }
    }
    return reads && axis_for(graph_, first, *program) >= 0;
  }

  void join(size_t head, size_t next) {
    Stage then = std::move(stages_[next]);
    stages_.erase(stages_.begin() + static_cast<std::ptrdiff_t>(next));
    Stage& first = stages_[head];
    auto& program = std::get<RowProgram>(then.body);
    program.axis = axis_for(graph_, first, program);
    then.extent = first.extent;
    then.grain = first.grain;
    then.accesses.clear();
    std::set<std::pair<int, bool>> seen;
    for (const Instruction& one : program.code) {
      const bool write = one.kind == Kind::store;
      if ((!write && one.kind != Kind::load) || !seen.insert({one.value, write}).second) continue;
      const bool cut = one.strides[static_cast<size_t>(program.axis)] != 0;
      const Access access{one.value, cut ? program.axis : -1, write};
      then.accesses.push_back(access);
      if (!write && written_by(first, one.value)) continue;
      added_.push_back(access);
      first.bytes += bytes_of(graph_, {one.value});
    }
    first.accesses.insert(first.accesses.end(), added_.begin(), added_.end());
    added_.clear();
    join_names(first, then);
    first.tail.push_back(std::move(then));
  }

  const Graph& graph_;
  std::vector<Stage> stages_;
  std::vector<Access> added_;  // the head's new accesses, kept apart while written_by() asks about the old ones
};

}  // namespace

std::vector<Stage> fuse_tails(Graph& graph, std::vector<Stage> stages, const Target&) {
  return Joiner(graph, std::move(stages)).run();
}

}  // namespace ark::compiler
