// Fuses a program into the scatter that copies its result; see scatter_fusion.hpp.
//
// The program's stores to the scatter's source become indexed stores (stage.hpp). Each dimension of the program must
// walk one dimension of the source, as the base has the same dimensions with other strides, or adjacent ones that merge
// in both; no other stage may touch the source; and no stage in between may depend on the program.
#include "compiler/passes/scatter_fusion.hpp"

#include <algorithm>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include "compiler/fuse/fuse_views.hpp"

namespace ark::compiler {

namespace {

using Instruction = RowProgram::Instruction;
using Kind = Instruction::Kind;

class ScatterFuser {
 public:
  ScatterFuser(Graph& graph, std::vector<Stage> stages) : graph_(graph), stages_(std::move(stages)) {}

  std::vector<Stage> run() {
    for (size_t at = 0; at < stages_.size(); ++at) {
      const auto* scatter = std::get_if<ScatterStage>(&stages_[at].body);
      const int rows = scatter == nullptr ? -1 : writer(*scatter, at);
      if (rows < 0) continue;
      std::optional<Stage> fused = fuse(stages_[rows], stages_[at], *scatter);
      if (!fused) continue;
      stages_[at] = std::move(*fused);
      gone_.insert(rows);
    }
    std::vector<Stage> left;
    for (size_t at = 0; at < stages_.size(); ++at)
      if (gone_.count(static_cast<int>(at)) == 0) left.push_back(std::move(stages_[at]));
    return left;
  }

 private:
  const Value& value(int index) const { return graph_.values()[index]; }

  // The program that makes the scatter's whole source and may move to the scatter's place; -1 if there is none.
  int writer(const ScatterStage& scatter, size_t at) const {
    const Value& source = value(scatter.source);
    const bool plain = !scatter.along && !scatter.accumulate && source.shape[scatter.dim] == 1 &&
                       value(scatter.base).type == source.type && !is_floating(value(scatter.index).type) &&
                       value(scatter.index).type != ScalarType::boolean;
    if (!plain || graph_.buffers()[source.buffer].kind != Buffer::Kind::temporary) return -1;
    int found = -1;
    for (int other = 0; other < static_cast<int>(stages_.size()); ++other) {
      if (gone_.count(other) != 0 || other == static_cast<int>(at) || !touches(other, source.buffer)) continue;
      if (found >= 0 || other > static_cast<int>(at)) return -1;
      found = other;
    }
    if (found < 0 || !std::holds_alternative<RowProgram>(stages_[found].body)) return -1;
    for (const Access& access : stages_[found].accesses) {
      const int buffer = value(access.value).buffer;
      if (!access.write && buffer == source.buffer) return -1;
      if (buffer == value(scatter.base).buffer || (access.write && buffer == value(scatter.index).buffer)) return -1;
      for (int between = found + 1; between < static_cast<int>(at); ++between)
        if (gone_.count(between) == 0 && touches(between, buffer, !access.write)) return -1;
    }
    return found;
  }
  bool touches(int stage, int buffer, bool writes_alone = false) const {
    const auto& accesses = stages_[stage].accesses;
    return std::any_of(accesses.begin(), accesses.end(), [&](const Access& access) {
      return value(access.value).buffer == buffer && (access.write || !writes_alone);
    });
  }

  std::optional<Stage> fuse(const Stage& rows, const Stage& after, const ScatterStage& scatter) {
    Stage stage = rows;
    auto& program = std::get<RowProgram>(stage.body);
    if (rows.accesses.size() + 2 > kMostOperands) return std::nullopt;
    Instruction index;
    index.kind = Kind::load;
    index.value = scatter.index;
    index.type = value(scatter.index).type;
    index.strides.assign(program.shape.size(), 0);
    program.code.insert(program.code.begin(), index);
    for (Instruction& one : program.code) {
      if (one.kind == Kind::op || one.kind == Kind::reduce || one.kind == Kind::store)
        for (int& arg : one.args) ++arg;
      if (one.kind != Kind::store || value(one.value).buffer != value(scatter.source).buffer) continue;
      const int from = one.value;
      if (one.scalar || !redirect(program, scatter, one)) return std::nullopt;
      for (Access& access : stage.accesses)
        if (access.write && access.value == from) access.value = one.value, access.sparse = true;
    }
    stage.accesses.push_back({scatter.index, -1, false});
    stage.bytes += bytes_of(graph_, {scatter.index});
    stage.replicable = false;
    stage.indexed = after.name + " (" + after.origin + ")";
    stage.name += "+" + after.name;
    if (!after.origin.empty()) stage.origin += (stage.origin.empty() ? "" : "; ") + after.origin;
    return stage;
  }

  // Redirects a store to the source: to the same elements of the base at position 0, indexed by position.
  bool redirect(const RowProgram& program, const ScatterStage& scatter, Instruction& store) {
    Value source = value(scatter.source), base = value(scatter.base);
    auto dim = static_cast<size_t>(scatter.dim);
    // The program may have merged dimensions, such as batch and heads. Its separate ones walk merged ones, too.
    for (size_t d = dim; d-- > 1;) {
      if (source.shape[d - 1] == 1 || source.shape[d] == 1 || !merges(source, d - 1, source.shape[d]) ||
          !merges(base, d - 1, source.shape[d]))
        continue;
      merge(source, d - 1), merge(base, d - 1);
      --dim;
    }
    const size_t rank = source.shape.size();
    std::vector<size_t> order(rank);  // by decreasing stride; the source does not overlap itself
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return source.strides[a] > source.strides[b]; });
    Shape last(rank, 0);  // the last index of each dimension that the program reaches
    // Splits `distance`, taken `steps` times, into steps of one dimension or, with `several`, of more than one.
    const auto walk = [&](int64_t distance, int64_t steps, bool several, int64_t& in_base) {
      in_base = 0;
      for (const size_t d : order) {
        const int64_t stride = source.strides[d];
        if (d == dim || source.shape[d] == 1 || stride <= 0) continue;
        if (!several && distance % stride != 0) continue;
        const int64_t taken = distance / stride;
        if (last[d] + taken * steps >= source.shape[d]) {
          if (several) return false;
          continue;
        }
        last[d] += taken * steps;
        in_base += taken * base.strides[d];
        distance -= taken * stride;
        if (distance == 0) return true;
      }
      return distance == 0;
    };
    Value view;
    view.buffer = base.buffer;
    view.type = base.type;
    view.shape = program.shape;
    view.strides.assign(program.shape.size(), 0);
    int64_t first = 0;
    const int64_t distance = value(store.value).offset - source.offset;
    if (distance < 0 || !walk(distance, 1, true, first)) return false;
    view.offset = base.offset + first;
    for (size_t p = 0; p < program.shape.size(); ++p) {
      if (program.shape[p] == 1) continue;
      if (store.strides[p] <= 0 || !walk(store.strides[p], program.shape[p] - 1, false, view.strides[p])) return false;
    }
    store.strides = view.strides;
    store.args.push_back(0);
    store.through = {base.strides[dim], base.shape[dim], scatter.dim, scatter.wrap};
    view.shape.push_back(base.shape[dim]);
    view.strides.push_back(base.strides[dim]);
    store.value = view_value(graph_, view);
    return true;
  }

  Graph& graph_;
  std::vector<Stage> stages_;
  std::set<int> gone_;
};

}  // namespace

std::vector<Stage> fuse_scatters(Graph& graph, std::vector<Stage> stages, const Target&) {
  return ScatterFuser(graph, std::move(stages)).run();
}

}  // namespace ark::compiler
