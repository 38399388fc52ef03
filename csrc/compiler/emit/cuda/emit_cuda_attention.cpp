// Attention as calls of the device library's kernels: whole, over a block of positions, or with a position that it
// appends to the caches; and the combination of blocks.
#include <algorithm>
#include <cstdlib>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "compiler/emit/cpu/emit_cpu_loops.hpp"
#include "compiler/schedule/attention_kernel.hpp"

namespace ark::compiler {

namespace {

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

// The type of the counters of batches and heads: 32 bits if no offset exceeds these. Offsets that are kept across a
// head then take half the registers.
std::string counter_type(const FunctionWriter& to, const AttentionStage& attention) {
  if (!to.cuda()) return "int64_t";
  int64_t longest = 0;
  for (const int one : {attention.q, attention.k, attention.v, attention.out, attention.mask, attention.states}) {
    if (one < 0) continue;
    const Value& value = to.value(one);
    int64_t length = 0;
    for (size_t d = 0; d < value.shape.size(); ++d) length += std::abs(value.strides[d]) * (value.shape[d] - 1);
    longest = std::max(longest, length);
  }
  return longest <= std::numeric_limits<int32_t>::max() ? "int" : "int64_t";
}

// Completes the call of an attention that appends a position.
void emit_added(FunctionWriter& to, const AttentionStage& attention, const std::string& call,
                const std::vector<std::string>& indices, const std::function<void()>& make) {
  const AttentionStage::Added& added = attention.added;
  const Value &k = to.value(attention.k), &key = to.value(added.k), &value = to.value(added.v);
  const std::string position = to.pointer(added.position, false);
  const std::string cache_at = to.pointer_later(added.cache, false), k_at = to.pointer_later(attention.k, true);
  const auto step = [&](int made, const Value& rows) { return to.kept_part(made) > 0 ? 0 : rows.strides[1]; };
  const std::string new_v = at(to.pointer(added.v, false), indices, {0, step(added.v, value)}),
                    new_k = at(to.pointer(added.k, false), indices, {0, step(added.k, key)});
  to.open("{}, {}, {}, [&, p]() -> int64_t", call, new_k, new_v);
  to.line("const int64_t given = load_one({});", position);
  to.line("[[maybe_unused]] const int64_t begin = {}, end = begin + 1;", indices[1]);
  make();
  to.line("const int64_t index = {}given;", added.wrap ? formatted("given < 0 ? given + {} : ", added.size) : "");
  to.line("return index_fits(context, index, {}, given, {}) ? index - (now({}) - now({})) / {} : -1;", added.size,
          added.dim, k_at, cache_at, k.strides[2]);
  to.close("});");
}

}  // namespace

void emit(FunctionWriter& to, const AttentionStage& attention, const std::function<void()>& make) {
  const Value &q = to.value(attention.q), &k = to.value(attention.k), &v = to.value(attention.v),
              &out = to.value(attention.out);
  for (const Value* one : {&q, &k, &v, &out}) {
    if (!is_floating(one->type)) to.refuse("attention over {}", name_of(one->type));
    if (one->shape.size() != 4) to.refuse("attention over tensors that do not have 4 dimensions");
  }
  const int64_t batch = q.shape[0], kv_heads = k.shape[1], heads = q.shape[1] / kv_heads;
  auto stride = [](const Value& value, size_t d) { return value.shape[d] == 1 ? 0 : value.strides[d]; };
  auto column = [](const Value& value) { return value.shape[3] == 1 ? 1 : value.strides[3]; };
  const int64_t columns = q.shape[3], value_columns = v.shape[3];
  // A row's running result is in registers (CPU) or in a tile in shared memory (CUDA). Each size has its own code.
  const int64_t most = to.cuda() ? 256 : 512;
  if (columns > most || value_columns > most)
    to.refuse("attention with heads of {} and {} numbers", columns, value_columns);

  const bool added = attention.added.k >= 0;
  TextNest nest(to, {batch, kv_heads}, to.axis_of(attention.out, true) == 0 ? 0 : 1, "b", true,
                counter_type(to, attention));
  const std::vector<std::string>& indices = nest.names();
  auto head_strides = [&](const Value& value, int64_t shared) {
    return std::vector<int64_t>{stride(value, 0), stride(value, 1) * shared};
  };
  const std::string aligned = to.cuda() ? aligned_rows(to, attention) : "";
  const AttentionKernel chosen =
      to.cuda() && aligned != "false" ? attention_kernel(to.graph(), attention) : AttentionKernel::plain;
  const bool groups = chosen == AttentionKernel::groups;
  // This kernel uses each address once, at its start, so there is no need to reload them later.
  const auto place = [&](int value, bool write, const std::vector<int64_t>& strides) {
    return at(groups ? to.pointer(value, write) : to.pointer_later(value, write), indices, strides);
  };
  const std::string q_at =
      place(attention.q, false, to.kept_part(attention.q) > 0 ? std::vector<int64_t>{0, 0} : head_strides(q, heads));
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
    mask_at = place(attention.mask, false, {stride_from_end(mask, 4), mask_head * heads});
    if (mask_at.starts_with("later")) mask_at = formatted("now({})", mask_at);
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
  std::string rest;
  if (to.cuda() && attention.causal) append(rest, ", .first_query = {}", attention.first_query);
  if (to.cuda()) append(rest, ", .aligned = {}, .cache = {}", aligned, to.cache_text(attention.k));
  if (attention.states >= 0) rest += ", .part = true";
  to.line("constexpr Attention s{{.heads = {}, .queries = {}, .keys = {}, .q_head = {}, .q_row = {}, .q_column = {},",
          heads, q.shape[2], k.shape[2], head(q), stride(q, 2), column(q));
  to.line(
      "                      .k_row = {}, .k_column = {}, .v_row = {}, .v_column = {}, .out_head = {}, .out_row = {},",
      stride(k, 2), column(k), stride(v, 2), column(v), head(out), stride(out, 2));
  to.line(
      "                      .out_column = {}, .mask_head = {}, .mask_row = {}, .mask_column = {}, .scale = {}, "
      ".causal = {}, .nan_rows = {}{}}};",
      column(out), mask_head, mask_row, mask_column, factor, attention.causal, attention.nan_rows, rest);
  if (!to.cuda() && (attention.first_query != 0 || attention.states >= 0)) to.refuse("a part of an attention");
  const int64_t padded = (columns + 15) / 16 * 16, padded_values = (value_columns + 15) / 16 * 16;
  if (!to.cuda())
    to.scratch((16 * (padded + padded_values) + padded * 64) * 4);  // attention_scratch() of attention.hpp
  // Strides are a template argument of the kernels that select code by them.
  if (chosen != AttentionKernel::plain) to.multiply_by_groups();
  const std::string kernel = !to.cuda() ? formatted("attend<{}, {}>(context, s", columns, value_columns)
                             : groups   ? "attend_by_groups<s>(context"
                             : chosen == AttentionKernel::flash
                                 ? formatted("attend_flash<{}, s>(context", columns)
                                 : formatted("attend<{}, {}, s>(context", columns, value_columns);
  if (added && states_at.empty()) states_at = ", static_cast<float*>(nullptr)";
  const std::string call = formatted("{}, {}, {}, {}, {}, {}{}", kernel, q_at, k_at, v_at, mask_at, out_at, states_at);
  if (added)
    emit_added(to, attention, call, indices, make);
  else
    to.line("{});", call);
  nest.close();
}

void emit(FunctionWriter& to, const CombineStage& combine) {
  if (!to.cuda()) to.refuse("parts of an attention");
  const Value &sums = to.value(combine.sums), &states = to.value(combine.states), &out = to.value(combine.out);
  const int axis = to.axis_of(combine.out, true);
  TextNest nest(to, {out.shape[0]}, axis == 0 ? 0 : -1, "b");
  const std::vector<std::string>& batch = nest.names();
  to.line(
      "constexpr AttentionParts s{{.queries = {}, .sums = {}, .states = {}, .out_head = {}, .out_row = {}, "
      ".out_column = {}, .nan_rows = {}}};",
      out.shape[2], sums.strides[0], states.strides[0], out.strides[1], out.strides[2], out.strides[3],
      combine.nan_rows);
  const std::string out_at = at(to.pointer(combine.out, true), batch, {out.strides[0]}),
                    states_at = at(to.pointer(combine.states, false), batch, {states.strides[1]}),
                    sums_at = at(to.pointer(combine.sums, false), batch, {sums.strides[1]});
  const std::string begin = axis == 0 ? "0" : to.tile_begin(out.shape[1]),
                    end = axis == 0 ? formatted("{}", out.shape[1]) : to.tile_end(out.shape[1]);
  to.line("combine_parts<{}, {}, s>({}, {}, {}, {}, {});", sums.shape[0], out.shape[3], sums_at, states_at, out_at,
          begin, end);
  nest.close();
}

}  // namespace ark::compiler
