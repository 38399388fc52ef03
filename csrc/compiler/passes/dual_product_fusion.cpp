// Finds pairs of products and the program behind them, and joins the three. See dual_product_fusion.hpp.
#include "compiler/passes/dual_product_fusion.hpp"

#include <algorithm>
#include <utility>

#include "compiler/fuse/fuse_single.hpp"
#include "compiler/fuse/fuse_views.hpp"
#include "compiler/graph/stage_moves.hpp"
#include "compiler/graph/stage_queries.hpp"
#include "compiler/passes/elementwise.hpp"
#include "compiler/schedule/matmul_tile.hpp"
#include "compiler/schedule/tile.hpp"

namespace ark::compiler {

namespace {

using Instruction = RowProgram::Instruction;
using Kind = Instruction::Kind;

// Whether one kernel can read both: the same layout and type.
bool alike(const Graph& graph, int one, int other) {
  if (one < 0 || other < 0) return one < 0 && other < 0;
  const Value &a = graph.values()[one], &b = graph.values()[other];
  if (a.type != b.type || a.shape != b.shape) return false;
  for (size_t d = 0; d < a.shape.size(); ++d)
    if (a.shape[d] != 1 && a.strides[d] != b.strides[d]) return false;
  return true;
}

// Whether the product can be half of a dual one: a plain one in tiles, whose result is a temporary.
bool can_be_half(const Graph& graph, const MatmulStage& product, const Target& target) {
  const Value &a = graph.values()[product.a], &b = graph.values()[product.b], &out = graph.values()[product.out];
  return multiplied_in_tiles(graph, product, target) && product.codes.bits == 0 && product.scale_a < 0 &&
         product.finish.empty() && is_floating(a.type) && a.type == b.type && is_floating(out.type) &&
         graph.buffers()[out.buffer].kind == Buffer::Kind::temporary;
}

// Two products, in the order of the stages, and the stage of the program; its loads of both results.
struct Dual {
  int first = -1, second = -1, reader = -1;
  const Instruction *of_first = nullptr, *of_second = nullptr, *store = nullptr;
};

class DualFuser {
 public:
  DualFuser(Graph& graph, std::vector<Stage> stages, const Target& target)
      : graph_(graph), stages_(std::move(stages)), target_(target) {}

  std::vector<Stage> run() {
    for (int at = 0; at < static_cast<int>(stages_.size()); ++at) {
      const Dual dual = find(at);
      if (dual.reader < 0) continue;
      MatmulStage body = joined(dual);
      if (!is_worth_it(dual, body)) continue;
      join(dual, std::move(body));
      --at;
    }
    return std::move(stages_);
  }

 private:
  const Value& value(int index) const { return graph_.values()[index]; }
  const MatmulStage& product(int stage) const { return std::get<MatmulStage>(stages_[stage].body); }

  // The only reader of the result of the product at this stage, if that can be half of a dual one.
  int reader_of(int at) const {
    const auto* one = std::get_if<MatmulStage>(&stages_[at].body);
    return one != nullptr && can_be_half(graph_, *one, target_)
               ? only_reader(graph_, stages_, at, value(one->out).buffer)
               : -1;
  }

  // The dual product whose first half is this stage; without a reader if there is none.
  Dual find(int at) const {
    Dual dual{at, -1, reader_of(at)};
    const auto* program = dual.reader < 0 ? nullptr : std::get_if<RowProgram>(&stages_[dual.reader].body);
    if (program == nullptr) return {};
    for (int other = at + 1; other < dual.reader && dual.second < 0; ++other)
      if (reader_of(other) == dual.reader) dual.second = other;
    if (dual.second < 0) return {};
    const MatmulStage &first = product(at), &second = product(dual.second);
    if (first.a != second.a || first.tf32 != second.tf32 || !alike(graph_, first.b, second.b) ||
        !alike(graph_, first.bias, second.bias) || !alike(graph_, first.out, second.out))
      return {};
    const Elementwise all = elementwise(graph_, *program);
    const auto place = [&](const Instruction* load) {  // in its product's result
      const bool of_first = value(load->value).buffer == value(first.out).buffer;
      return value(load->value).offset - value(of_first ? first.out : second.out).offset;
    };
    for (const Instruction* const load : all.loads) {
      if (replaces(graph_, *program, *load, value(first.out)))
        dual.of_first = load;
      else if (replaces(graph_, *program, *load, value(second.out)))
        dual.of_second = load;
      else
        return {};
      if (place(load) != place(all.loads[0])) return {};
    }
    if (dual.of_first == nullptr || dual.of_second == nullptr) return {};
    dual.store = all.store;
    return may_move(dual) ? dual : Dual{};
  }

  // Whether the first product may run at the second one's place, and the program's store, too.
  bool may_move(const Dual& dual) const {
    const int stored = value(dual.store->value).buffer;
    if (!apart_from(graph_, stages_[dual.first], stages_, static_cast<size_t>(dual.first) + 1,
                    static_cast<size_t>(dual.second)) ||
        touches(graph_, stages_[dual.first], stored))
      return false;
    return std::none_of(stages_.begin() + dual.second, stages_.begin() + dual.reader,
                        [&](const Stage& between) { return touches(graph_, between, stored); });
  }

  MatmulStage joined(const Dual& dual) {
    MatmulStage body = product(dual.first);
    const MatmulStage& second = product(dual.second);
    body.second = {second.b, second.bias, second.out};
    body.finish = std::get<RowProgram>(stages_[dual.reader].body).code;
    for (Instruction& one : body.finish)
      if (one.kind == Kind::load && value(one.value).buffer == value(second.out).buffer) one.value = second.out;
    body.out = view_value(graph_, finished_value(graph_, body.out, *dual.of_first, *dual.store));
    return body;
  }

  // One stage has fewer tiles than two, which matters where workers are idle.
  bool is_worth_it(const Dual& dual, const MatmulStage& body) const {
    const Stage& reader = stages_[dual.reader];
    const double pass = tile_cost_us(graph_, reader, target_, 0, reader.extent) / target_.workers + target_.wait_us;
    return choose_tile(graph_, body, target_).us <= choose_tile(graph_, product(dual.first), target_, 2).us + pass;
  }

  void join(const Dual& dual, MatmulStage body) {
    Stage& stage = stages_[dual.second];
    const Stage &first = stages_[dual.first], &reader = stages_[dual.reader];
    Stage both = first;
    join_names(both, stage);
    both.name += "+" + reader.name;
    both.origin += "; " + reader.origin;
    both.flops += stage.flops + reader.flops;
    both.bytes = product_bytes(graph_, body);
    both.accesses = product_accesses(graph_, body);
    both.body = std::move(body);
    stage = std::move(both);
    stages_.erase(stages_.begin() + dual.reader);
    stages_.erase(stages_.begin() + dual.first);
  }

  Graph& graph_;
  std::vector<Stage> stages_;
  const Target& target_;
};

}  // namespace

std::vector<Stage> fuse_dual_products(Graph& graph, std::vector<Stage> stages, const Target& target) {
  return DualFuser(graph, std::move(stages), target).run();
}

}  // namespace ark::compiler
