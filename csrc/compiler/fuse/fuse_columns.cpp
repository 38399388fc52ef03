// Chooses the columns of row programs and the order of all dimensions, and estimates whether fusing pays. The contract
// is in fuse_columns.hpp.
#include "compiler/fuse/fuse_columns.hpp"

#include <algorithm>
#include <string>

namespace ark::compiler {

namespace {

constexpr int kMostComputedAgain = 6;  // nodes

bool is_costly(const std::string& name) {
  static const char* const names[] = {"exp",  "log", "log1p",   "expm1", "sin",          "cos",
                                      "tanh", "erf", "sigmoid", "pow",   "floor_divide", "remainder"};
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

bool is_whole(const std::vector<bool>& covered) {
  return std::find(covered.begin(), covered.end(), false) == covered.end();
}

}  // namespace

bool RowColumns::reduce(const std::vector<int>& dims, bool counted) {
  std::vector<bool> columns(columns_.size(), false);
  for (int dim : dims) columns[dim] = true;
  if (reduces_ && columns != columns_) return false;
  if (counted && counted_ && dims != order_) return false;
  if (!reduces_ || counted) order_ = dims;
  counted_ = counted_ || counted;
  reduces_ = true;
  columns_ = columns;
  return true;
}

bool RowColumns::choose(const RowDraft& draft) {
  bool chosen = reduces_;
  for (const auto& item : draft.items) {
    if (item.kind != RowProgram::Instruction::Kind::store || is_whole(item.varies)) continue;
    std::vector<bool> left = item.varies;
    left.flip();
    if (chosen && left != columns_) return false;
    columns_ = left;
    chosen = true;
  }
  if (!order_.empty()) return true;
  for (size_t d = 0; d < columns_.size(); ++d) {
    if (columns_[d]) order_.push_back(static_cast<int>(d));
  }
  return true;
}

// Per-row values are computed once per row. Other values that vary over fewer dimensions than the stage are recomputed;
// that pays only if it costs less than a load.
bool RowColumns::worth_it(const Graph& graph, const RowSpace& space) const {
  int again = 0;
  for (const RowNode& member : space.members) {
    std::vector<bool> covers(columns_.size(), false);
    for (int dim : member.map) {
      if (dim >= 0) covers[dim] = true;
    }
    bool row = !order_.empty();
    for (size_t d = 0; d < covers.size(); ++d) row = row && (covers[d] || columns_[d]);
    if (is_whole(covers) || row) continue;
    if (is_costly(graph.nodes()[member.node].op)) return false;
    ++again;
  }
  return again <= kMostComputedAgain;
}

void RowColumns::order(const RowSpace& space, RowDraft& draft) const {
  std::vector<int> order;
  for (int dim : space.members[space.start].map) {
    if (dim >= 0) order.push_back(dim);
  }
  for (size_t d = 0; d < draft.sizes.size(); ++d) {
    const auto dim = static_cast<int>(d);
    if (std::find(order.begin(), order.end(), dim) == order.end()) order.insert(order.begin(), dim);
  }
  for (const auto& item : draft.items) {
    if (item.kind != RowProgram::Instruction::Kind::store || !is_whole(item.varies)) continue;
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return item.function.strides[a] > item.function.strides[b]; });
    break;
  }
  order.erase(std::remove_if(order.begin(), order.end(), [&](int dim) { return columns_[dim]; }), order.end());
  order.insert(order.end(), order_.begin(), order_.end());
  draft.order = order;
  draft.inner = static_cast<int>(order_.size());
}

}  // namespace ark::compiler
