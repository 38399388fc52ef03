// Turns a draft into a stage: merges dimensions that every access walks contiguously, chooses the tile axis, and gives
// each access a view of its buffer with the program's dimensions.
#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "compiler/fuse/fuse_rows.hpp"
#include "compiler/fuse/fuse_views.hpp"
#include "compiler/graph/stage_names.hpp"

namespace ark::compiler {

namespace {

using Kind = RowProgram::Instruction::Kind;

constexpr int64_t kEnoughRows = 64;          // tiles for most machines
constexpr int64_t kReplicableBytes = 65536;  // of reads: recomputing is cheaper than waiting

class RowFinisher {
 public:
  RowFinisher(Graph& graph, RowDraft draft) : graph_(graph), draft_(std::move(draft)) {}

  Stage finish() {
    drop_unused();
    merge_dimensions();
    for (int dim : draft_.order) program_.shape.push_back(draft_.sizes[dim]);
    if (program_.shape.empty()) program_.shape = {1};
    program_.inner = std::max(draft_.inner, 1);
    write_code();
    choose_axis();
    describe();
    stage_.body = std::move(program_);
    return std::move(stage_);
  }

 private:
  // Drops items that no store needs.
  void drop_unused() {
    const auto& items = draft_.items;
    used_.assign(items.size(), false);
    for (size_t i = items.size(); i-- > 0;) {
      if (items[i].kind == Kind::store) used_[i] = true;
      if (!used_[i] || items[i].kind == Kind::index) continue;
      for (int arg : items[i].args) used_[arg] = true;
    }
  }

  bool may_merge(int outer, int inner) const {
    for (size_t i = 0; i < draft_.items.size(); ++i) {
      const auto& item = draft_.items[i];
      if (!used_[i]) continue;
      if (item.kind == Kind::index && (item.args[0] == outer || item.args[0] == inner)) return false;
      if (item.kind != Kind::load && item.kind != Kind::store) continue;
      if (item.function.strides[outer] != item.function.strides[inner] * draft_.sizes[inner]) return false;
    }
    return true;
  }

  // The last dimension, if it serves as the columns by default, stays unless rows are few and short: tiles of rows
  // match how neighboring products are cut.
  void merge_dimensions() {
    auto& order = draft_.order;
    const bool by_default = draft_.inner == 0 && !order.empty();
    if (by_default) draft_.inner = 1;
    int64_t rows = 1;
    for (size_t i = 0; i + 1 < order.size(); ++i) rows *= draft_.sizes[order[i]];
    const bool flatten = by_default && rows < kEnoughRows && draft_.sizes[order.back()] < 8 * kEnoughRows;
    for (size_t i = order.size(); i-- > 1;) {
      const bool edge = i == order.size() - static_cast<size_t>(draft_.inner);
      if ((edge && !flatten) || !may_merge(order[i - 1], order[i])) continue;
      draft_.sizes[order[i]] *= draft_.sizes[order[i - 1]];
      if (!edge && i > order.size() - static_cast<size_t>(draft_.inner)) --draft_.inner;
      order.erase(order.begin() + static_cast<std::ptrdiff_t>(i) - 1);
    }
  }

  bool is_column(size_t position) const { return position + program_.inner >= program_.shape.size(); }

  bool varies_by_column(const RowDraft::Item& item) const {
    for (size_t p = 0; p < draft_.order.size(); ++p) {
      if (is_column(p) && item.varies[draft_.order[p]]) return true;
    }
    return false;
  }

  int add(RowProgram::Instruction instruction) {
    program_.code.push_back(std::move(instruction));
    return static_cast<int>(program_.code.size()) - 1;
  }

  // Copies a per-row register to every column.
  int spread(int from) {
    if (!program_.code[from].scalar) return from;
    RowProgram::Instruction copy;
    copy.name = "copy";
    copy.args = {from};
    copy.type = program_.code[from].type;
    return add(std::move(copy));
  }

  void write_code() {
    std::vector<int> registers(draft_.items.size(), -1);
    for (size_t i = 0; i < draft_.items.size(); ++i) {
      const auto& item = draft_.items[i];
      if (!used_[i]) continue;
      RowProgram::Instruction made;
      made.kind = item.kind;
      made.name = item.name;
      made.type = item.type;
      made.scalar = item.kind == Kind::reduce || !varies_by_column(item);
      if (item.kind == Kind::index) {
        const auto at = std::find(draft_.order.begin(), draft_.order.end(), item.args[0]);
        made.args = {static_cast<int>(at - draft_.order.begin())};
      } else {
        for (int arg : item.args) made.args.push_back(registers[arg]);
      }
      if (item.kind == Kind::literal) made.value = literal_value(graph_, item.literal, item.type);
      if (item.kind == Kind::load || item.kind == Kind::store) place(item.function, made);
      if (item.kind == Kind::reduce || (item.kind == Kind::store && !made.scalar)) made.args[0] = spread(made.args[0]);
      registers[i] = add(std::move(made));
    }
  }

  // Makes a view with the program's dimensions, of length 1 where the function does not vary.
  void place(const IndexFunction& function, RowProgram::Instruction& made) {
    Value view;
    view.buffer = function.buffer;
    view.type = function.type;
    view.offset = function.offset;
    view.shape.assign(program_.shape.size(), 1);
    view.strides.assign(program_.shape.size(), 0);
    for (size_t p = 0; p < draft_.order.size(); ++p) {
      const int64_t stride = function.strides[draft_.order[p]];
      view.strides[p] = stride;
      if (stride != 0) view.shape[p] = program_.shape[p];
    }
    made.strides = view.strides;
    made.value = view_value(graph_, view);
  }

  // Takes the outermost dimension that is long enough, else the one with most tiles. Columns qualify only if nothing is
  // reduced and every store covers full rows.
  void choose_axis() {
    bool rows_only = draft_.reduces;
    int64_t grain = 1;
    for (const auto& instruction : program_.code) {
      if (instruction.kind != Kind::store) continue;
      rows_only = rows_only || instruction.scalar;
      grain = std::max<int64_t>(grain, 64 / size_of(instruction.type));
    }
    int64_t best = 1;
    for (size_t p = 0; p < program_.shape.size() && best < kEnoughRows; ++p) {
      if (rows_only && is_column(p)) break;
      const bool last = p + 1 == program_.shape.size();
      const int64_t tiles = last ? (program_.shape[p] + grain - 1) / grain : program_.shape[p];
      if (tiles <= best) continue;
      best = tiles;
      program_.axis = static_cast<int>(p);
    }
    if (program_.axis < 0) return;
    stage_.extent = program_.shape[program_.axis];
    if (program_.axis + 1 == static_cast<int>(program_.shape.size())) stage_.grain = grain;
  }

  static double weight(const std::string& name) {
    static const std::set<std::string> slow = {"exp",  "log",  "log1p",   "expm1",     "sin",          "cos",
                                               "tanh", "erf",  "sigmoid", "pow",       "floor_divide", "remainder",
                                               "div",  "sqrt", "rsqrt",   "reciprocal"};
    return slow.count(name) > 0 ? 10 : 1;
  }

  void describe() {
    double elements = 1, rows = 1, read = 0;
    for (size_t p = 0; p < program_.shape.size(); ++p) {
      elements *= static_cast<double>(program_.shape[p]);
      if (!is_column(p)) rows *= static_cast<double>(program_.shape[p]);
    }
    std::set<std::tuple<int, bool>> seen;
    bool temporaries = true;
    std::set<int> stored, loaded;
    for (const auto& instruction : program_.code) {
      if (instruction.kind == Kind::op)
        stage_.flops += weight(instruction.name) * (instruction.scalar ? rows : elements);
      if (instruction.kind == Kind::reduce) stage_.flops += elements;
      if (instruction.kind != Kind::load && instruction.kind != Kind::store) continue;
      const bool write = instruction.kind == Kind::store;
      const Value& value = graph_.values()[instruction.value];
      (write ? stored : loaded).insert(value.buffer);
      if (write && graph_.buffers()[value.buffer].kind != Buffer::Kind::temporary) temporaries = false;
      if (!seen.insert({instruction.value, write}).second) continue;
      const auto bytes = static_cast<double>(value.elements() * size_of(value.type));
      stage_.bytes += bytes;
      if (!write) read += bytes;
      const bool cut = program_.axis >= 0 && instruction.strides[program_.axis] != 0;
      stage_.accesses.push_back({instruction.value, cut ? program_.axis : -1, write});
    }
    stage_.replicable = temporaries && read <= kReplicableBytes && stage_.flops <= kReplicableBytes * 8;
    for (int buffer : stored) {
      if (loaded.count(buffer) > 0 || writers(buffer) > static_cast<int>(draft_.nodes.size()))
        stage_.replicable = false;
    }
    stage_.kind = "rows";
    stage_.name = name_of_rows(program_);
    stage_.origin = origins(graph_, draft_.nodes);
  }

  // Counts the nodes that write the buffer. Only the stage's own nodes may write a replicated buffer.
  int writers(int buffer) const {
    int others = 0;
    for (size_t n = 0; n < graph_.nodes().size(); ++n) {
      for (int output : graph_.nodes()[n].outputs) {
        if (graph_.values()[output].buffer != buffer) continue;
        if (!std::binary_search(draft_.nodes.begin(), draft_.nodes.end(), static_cast<int>(n))) {
          others = static_cast<int>(draft_.nodes.size()) + 1;
        }
      }
    }
    return others;
  }

  Graph& graph_;
  RowDraft draft_;
  std::vector<bool> used_;
  RowProgram program_;
  Stage stage_;
};

}  // namespace

Stage finish_rows(Graph& graph, RowDraft draft) {
  return RowFinisher(graph, std::move(draft)).finish();
}

}  // namespace ark::compiler
