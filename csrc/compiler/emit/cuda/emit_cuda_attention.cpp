// Attention as calls of the device library's kernels: whole, over a block of positions, or with a position that it
// appends to the caches; and the combination of blocks.
#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "compiler/emit/cpu/emit_cpu_loops.hpp"

namespace ark::compiler {

namespace {

// Whether a GPU with warp groups uses them for this attention (kernels/cuda/loop/attention_groups.cuh).
bool attends_by_groups(const Graph& graph, const AttentionStage& attention) {
  const auto value = [&](int index) { return graph.values()[static_cast<size_t>(index)]; };
  const Value q = value(attention.q), k = value(attention.k), v = value(attention.v);
  constexpr int64_t kColumns = 64, kMostPositions = 512, kFewRows = 16;
  const bool one_mask = attention.mask < 0 || (stride_from_end(value(attention.mask), 2) == 0 &&
                                               stride_from_end(value(attention.mask), 3) == 0);
  return size_of(q.type) == 2 && q.type == k.type && k.type == v.type && q.shape[3] == kColumns &&
         v.shape[3] == kColumns && k.shape[2] <= kMostPositions && q.shape[1] / k.shape[1] * q.shape[2] > kFewRows &&
         one_mask && !attention.causal && attention.states < 0;
}

// The flag whether queries, keys and values can be loaded 16 bytes at a time; "false" also if the kernel ignores it.
std::string aligned_rows(FunctionWriter& to, const AttentionStage& attention) {
  const Value &q = to.value(attention.q), &k = to.value(attention.k), &v = to.value(attention.v);
  constexpr int64_t kFewRows = 16, kTensorColumns = 128;  // kFewQueries and kTensor of cuda/loop/attention.cuh
  const bool tensor = size_of(q.type) == 2 && q.type == k.type && k.type == v.type &&
                      std::max(q.shape[3], v.shape[3]) <= kTensorColumns;
  if (!tensor && q.shape[1] / k.shape[1] * q.shape[2] > kFewRows) return "false";
  std::string all = "true";
  for (const int one : {attention.q, attention.k, attention.v}) {
    const Value& value = to.value(one);
    if (value.shape[3] != 1 && value.strides[3] != 1) return "false";
    std::vector<int64_t> moved;
    for (size_t d = 0; d < 3; ++d)
      if (value.shape[d] != 1) moved.push_back(value.strides[d]);
    const std::string aligned = to.aligned(one, moved);
    if (aligned == "false") return aligned;
    if (aligned != "true") all = aligned;
  }
  return all;
}

// Completes the call of an attention that appends a position.
void emit_added(FunctionWriter& to, const AttentionStage& attention, const std::string& call,
                const std::vector<std::string>& indices, const std::function<void()>& make) {
  const AttentionStage::Added& added = attention.added;
  const Value &k = to.value(attention.k), &key = to.value(added.k), &value = to.value(added.v);
  const std::string position = to.pointer(added.position, false), size = number(added.size);
  const std::string first = "(now(" + to.pointer_later(attention.k, true) + ") - now(" +
                            to.pointer_later(added.cache, false) + ")) / " + number(k.strides[2]);
  to.open(call + ", " + at(to.pointer(added.k, false), indices, {0, key.strides[1]}) + ", " +
          at(to.pointer(added.v, false), indices, {0, value.strides[1]}) + ", [&, p]() -> int64_t");
  to.line("const int64_t given = load_one(" + position + ");");
  to.line("[[maybe_unused]] const int64_t begin = " + indices[1] + ", end = begin + 1;");
  make();
  to.line(std::string("const int64_t index = ") + (added.wrap ? "given < 0 ? given + " + size + " : " : "") + "given;");
  to.line("return index_fits(context, index, " + size + ", given, " + number(added.dim) + ") ? index - " + first +
          " : -1;");
  to.close("});");
}

}  // namespace

void emit_attention(FunctionWriter& to, const AttentionStage& attention, const std::function<void()>& make) {
  const Value &q = to.value(attention.q), &k = to.value(attention.k), &v = to.value(attention.v),
              &out = to.value(attention.out);
  for (const Value* one : {&q, &k, &v, &out}) {
    if (!is_floating(one->type)) to.refuse("attention over " + std::string(name_of(one->type)));
    if (one->shape.size() != 4) to.refuse("attention over tensors that do not have 4 dimensions");
  }
  const int64_t batch = q.shape[0], kv_heads = k.shape[1], heads = q.shape[1] / kv_heads;
  auto stride = [](const Value& value, size_t d) { return value.shape[d] == 1 ? 0 : value.strides[d]; };
  auto column = [](const Value& value) { return value.shape[3] == 1 ? 1 : value.strides[3]; };
  const int64_t columns = q.shape[3], value_columns = v.shape[3];
  // A row's running result is in registers (CPU) or in a tile in shared memory (CUDA). Each size has its own code.
  const int64_t most = to.cuda() ? 256 : 512;
  if (columns > most || value_columns > most)
    to.refuse("attention with heads of " + number(columns) + " and " + number(value_columns) + " numbers");

  const bool added = attention.added.k >= 0;
  TextNest nest(to, {batch, kv_heads}, to.axis_of(attention.out, true) == 0 ? 0 : 1, "b", true);
  const std::vector<std::string>& indices = nest.names();
  auto head_strides = [&](const Value& value, int64_t shared) {
    return std::vector<int64_t>{stride(value, 0), stride(value, 1) * shared};
  };
  const std::string aligned = to.cuda() ? aligned_rows(to, attention) : "";
  const bool groups = to.cuda() && aligned != "false" && attends_by_groups(to.graph(), attention);
  // The kernel for warp groups uses each address once, at its start, so there is no need to reload them later.
  const auto place = [&](int value, bool write, const std::vector<int64_t>& strides) {
    return at(groups ? to.pointer(value, write) : to.pointer_later(value, write), indices, strides);
  };
  const std::string q_at = place(attention.q, false, head_strides(q, heads));
  const std::string k_at = place(attention.k, added, head_strides(k, 1));
  const std::string v_at = place(attention.v, added, head_strides(v, 1));
  const std::string out_at = place(attention.out, true, head_strides(out, heads));
  std::string mask_at = "static_cast<const NoMask*>(nullptr)";
  int64_t mask_head = 0, mask_row = 0, mask_column = 0;
  if (attention.mask >= 0) {
    const Value& mask = to.value(attention.mask);
    mask_head = stride_from_end(mask, 3);
    mask_row = stride_from_end(mask, 2);
    mask_column = stride_from_end(mask, 1);
    mask_at = at(to.pointer(attention.mask, false), indices, {stride_from_end(mask, 4), mask_head * heads});
    if (!is_floating(mask.type) && mask.type != ScalarType::boolean) to.refuse("attention with a mask of integers");
  }
  std::string states_at;
  if (attention.states >= 0)
    states_at =
        ", " + at(to.pointer_later(attention.states, true), indices, head_strides(to.value(attention.states), heads));
  auto head = [&](const Value& value) { return heads == 1 ? 0 : stride(value, 1); };
  Value scale;
  scale.literal = attention.scale;
  std::string factor = cpp_lanes(scale);  // splat(...)
  factor = factor.substr(6, factor.size() - 7);
  to.line("constexpr Attention s{.heads = " + number(heads) + ", .queries = " + number(q.shape[2]) +
          ", .keys = " + number(k.shape[2]) + ", .q_head = " + number(head(q)) + ", .q_row = " + number(stride(q, 2)) +
          ", .q_column = " + number(column(q)) + ",");
  to.line("                      .k_row = " + number(stride(k, 2)) + ", .k_column = " + number(column(k)) +
          ", .v_row = " + number(stride(v, 2)) + ", .v_column = " + number(column(v)) +
          ", .out_head = " + number(head(out)) + ", .out_row = " + number(stride(out, 2)) + ",");
  to.line("                      .out_column = " + number(column(out)) + ", .mask_head = " + number(mask_head) +
          ", .mask_row = " + number(mask_row) + ", .mask_column = " + number(mask_column) + ", .scale = " + factor +
          ", .causal = " + (attention.causal ? "true" : "false") +
          (to.cuda() && attention.causal ? ", .first_query = " + number(attention.first_query) : "") +
          (to.cuda() ? ", .aligned = " + aligned + ", .cache = " + to.cache_text(attention.k) : "") +
          (attention.states >= 0 ? ", .part = true" : "") + "};");
  if (!to.cuda() && (attention.first_query != 0 || attention.states >= 0)) to.refuse("a part of an attention");
  const int64_t padded = (columns + 15) / 16 * 16, padded_values = (value_columns + 15) / 16 * 16;
  if (!to.cuda())
    to.scratch((16 * (padded + padded_values) + padded * 64) * 4);  // attention_scratch() of attention.hpp
  // Strides are a template argument of the kernels that select code by them.
  if (groups) to.multiply_by_groups();
  const std::string sizes = number(columns) + ", " + number(value_columns);
  const std::string call = !to.cuda() ? "attend<" + sizes + ">(context, s, "
                           : groups   ? "attend_by_groups<s>(context, "
                                      : "attend<" + sizes + ", s>(context, ";
  const std::string operands = q_at + ", " + k_at + ", " + v_at + ", " + mask_at + ", " + out_at;
  if (added)
    emit_added(to, attention, call + operands + (states_at.empty() ? ", static_cast<float*>(nullptr)" : states_at),
               indices, make);
  else
    to.line(call + operands + states_at + ");");
  nest.close();
}

void emit_combine(FunctionWriter& to, const CombineStage& combine) {
  if (!to.cuda()) to.refuse("parts of an attention");
  const Value &sums = to.value(combine.sums), &states = to.value(combine.states), &out = to.value(combine.out);
  const int axis = to.axis_of(combine.out, true);
  TextNest nest(to, {out.shape[0]}, axis == 0 ? 0 : -1, "b");
  const std::vector<std::string>& batch = nest.names();
  to.line("constexpr AttentionParts s{.queries = " + number(out.shape[2]) + ", .sums = " + number(sums.strides[0]) +
          ", .states = " + number(states.strides[0]) + ", .out_head = " + number(out.strides[1]) +
          ", .out_row = " + number(out.strides[2]) + ", .out_column = " + number(out.strides[3]) + "};");
  to.line("combine_parts<" + number(sums.shape[0]) + ", " + number(out.shape[3]) + ", s>(" +
          at(to.pointer(combine.sums, false), batch, {sums.strides[1]}) + ", " +
          at(to.pointer(combine.states, false), batch, {states.strides[1]}) + ", " +
          at(to.pointer(combine.out, true), batch, {out.strides[0]}) + ", " +
          (axis == 0 ? "0, " + number(out.shape[1]) : to.tile_begin(out.shape[1]) + ", " + to.tile_end(out.shape[1])) +
          ");");
  nest.close();
}

}  // namespace ark::compiler
