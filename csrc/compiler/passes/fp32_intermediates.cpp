// Finds the buffers that may be widened, then rewrites the programs that access them. See fp32_intermediates.hpp for
// which ones and why.
#include "compiler/passes/fp32_intermediates.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "compiler/fuse/fuse_views.hpp"

namespace ark::compiler {

namespace {

using Instruction = RowProgram::Instruction;
using Kind = Instruction::Kind;

// Of a result in its own type: of a product, so a few rows; of a row program that others read, such as a residual.
constexpr int64_t kMostBytes = 64 * 1024, kMostRowBytes = 4 * 1024 * 1024;

// Buffers of half types that only row programs read, at addresses independent of data, and that only row programs and
// products write.
class Small {
 public:
  Small(const Graph& graph, const std::vector<Stage>& stages) : graph_(graph) {
    for (const Stage& stage : stages) {
      const auto* product = std::get_if<MatmulStage>(&stage.body);
      const auto* program = std::get_if<RowProgram>(&stage.body);
      for (const Access& access : stage.accesses)
        if (access.sparse || !stage.tail.empty() ||
            !(program != nullptr || (product != nullptr && makes(*product, access))))
          refuse(access.value);
      if (product != nullptr) look_at(product->out, kMostBytes);
      if (program == nullptr) continue;
      for (const Instruction& one : program->code) {
        if (one.kind != Kind::load && one.kind != Kind::store) continue;
        look_at(one.value, kMostRowBytes);
        const size_t plain = one.kind == Kind::load ? 0 : 1;  // more arguments: indexed
        if (one.args.size() > plain || one.parts.count > 1) refuse(one.value);
      }
    }
  }

  std::vector<int> buffers() const {
    std::vector<int> chosen;
    std::set_difference(seen_.begin(), seen_.end(), refused_.begin(), refused_.end(), std::back_inserter(chosen));
    return chosen;
  }

 private:
  static bool makes(const MatmulStage& product, const Access& access) {
    return access.write && access.value == product.out && product.finish.empty();
  }

  void refuse(int value) { refused_.insert(graph_.values()[static_cast<size_t>(value)].buffer); }

  void look_at(int index, int64_t most) {
    if (graph_.values()[static_cast<size_t>(index)].is_literal()) return;
    const Value& value = graph_.values()[static_cast<size_t>(index)];
    const Buffer& buffer = graph_.buffers()[static_cast<size_t>(value.buffer)];
    const bool half = value.type == ScalarType::bf16 || value.type == ScalarType::f16;
    seen_.insert(value.buffer);
    if (!half || buffer.kind != Buffer::Kind::temporary || buffer.bytes > most) refused_.insert(value.buffer);
  }

  const Graph& graph_;
  std::set<int> seen_, refused_;
};

class Keeper {
 public:
  Keeper(Graph& graph, const std::vector<int>& buffers) : graph_(graph) {
    for (const int old : buffers) {
      Buffer buffer = graph.buffers()[static_cast<size_t>(old)];
      buffer.bytes *= 2;
      wide_[old] = graph.add_buffer(buffer);
    }
  }

  void keep(Stage& stage) {
    const bool some =
        std::any_of(stage.accesses.begin(), stage.accesses.end(), [&](const Access& one) { return kept(one.value); });
    if (!some) return;
    for (Access& access : stage.accesses) {
      if (!kept(access.value)) continue;
      access.value = widened(access.value);
      stage.bytes += static_cast<double>(graph_.values()[static_cast<size_t>(access.value)].elements()) * 2;
    }
    if (auto* product = std::get_if<MatmulStage>(&stage.body))
      product->out = widened(product->out);
    else
      keep(std::get<RowProgram>(stage.body));
  }

 private:
  bool kept(int value) const { return wide_.count(graph_.values()[static_cast<size_t>(value)].buffer) != 0; }

  int widened(int index) {
    Value value = graph_.values()[static_cast<size_t>(index)];
    value.buffer = wide_.at(value.buffer);
    value.type = ScalarType::f32;
    return view_value(graph_, value);
  }

  void keep(RowProgram& program) {
    std::set<int> rounded;  // registers that are also stored in their own type
    for (const Instruction& one : program.code)
      if (one.kind == Kind::store && !kept(one.value)) rounded.insert(one.args[0]);
    for (Instruction& one : program.code) {
      if ((one.kind != Kind::load && one.kind != Kind::store) || !kept(one.value)) continue;
      one.value = widened(one.value);
      if (one.kind == Kind::load) one.type = ScalarType::f32;
      if (one.kind == Kind::store && rounded.count(one.args[0]) == 0)
        program.code[static_cast<size_t>(one.args[0])].type = ScalarType::f32;
    }
  }

  Graph& graph_;
  std::map<int, int> wide_;  // by the half buffer
};

}  // namespace

std::vector<Stage> fp32_intermediates(Graph& graph, std::vector<Stage> stages, const Target&) {
  const std::vector<int> buffers = Small(graph, stages).buffers();
  Keeper keeper(graph, buffers);
  for (Stage& stage : stages) keeper.keep(stage);
  return stages;
}

}  // namespace ark::compiler
