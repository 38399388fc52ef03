// Registers the operators of this folder with PyTorch: torch.ops.ark.*. ark_torch/ops has their fake kernels, gradients
// and user functions.
#include <torch/library.h>

#include <algorithm>
#include <iterator>

#include "ops/compressed.hpp"
#include "ops/embedding_bag.hpp"
#include "ops/exchange_bags.hpp"
#include "ops/matmul.hpp"
#include "ops/moe.hpp"

namespace {

using ark::ops::BagArguments;

BagArguments arguments_of(at::TensorList tables, at::TensorList indices, at::TensorList offsets, at::TensorList weights,
                          const std::optional<at::Tensor>& like, c10::string_view group, c10::string_view mode,
                          bool last_offset, at::OptionalIntArrayRef tables_per_rank, int64_t batch, int64_t dim,
                          bool met, c10::string_view update, at::TensorList state, const std::optional<at::Tensor>& lr,
                          double eps) {
  BagArguments bags{tables.vec(), indices.vec(),      offsets.vec(),     weights.vec(),
                    like,         std::string(group), std::string(mode), last_offset};
  if (tables_per_rank) bags.tables_per_rank = tables_per_rank->vec();
  bags.batch = batch, bags.dim = dim, bags.met = met;
  bags.update = {std::string(update), state.vec(), lr, eps};
  return bags;
}

at::Tensor embedding_bag_all_to_all(at::TensorList tables, at::TensorList indices, at::TensorList offsets,
                                    at::TensorList weights, const std::optional<at::Tensor>& like,
                                    c10::string_view group, c10::string_view mode, bool last_offset,
                                    at::OptionalIntArrayRef tables_per_rank, int64_t batch, int64_t dim, bool met,
                                    c10::string_view update, at::TensorList state, const std::optional<at::Tensor>& lr,
                                    double eps) {
  return ark::ops::forward(arguments_of(tables, indices, offsets, weights, like, group, mode, last_offset,
                                        tables_per_rank, batch, dim, met, update, state, lr, eps));
}

std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>> embedding_bag_all_to_all_backward(
    const at::Tensor& gradient, at::TensorList tables, at::TensorList indices, at::TensorList offsets,
    at::TensorList weights, const std::optional<at::Tensor>& like, c10::string_view group, c10::string_view mode,
    bool last_offset, at::OptionalIntArrayRef tables_per_rank, int64_t batch, int64_t dim, bool met,
    c10::string_view update, bool of_weights) {
  return ark::ops::backward(arguments_of(tables, indices, offsets, weights, like, group, mode, last_offset,
                                         tables_per_rank, batch, dim, met, update, {}, std::nullopt, 0),
                            gradient, of_weights);
}

// Updates tables and state. Returns the gradients of all weights, concatenated.
at::Tensor embedding_bag_all_to_all_update(const at::Tensor& gradient, at::TensorList tables, at::TensorList indices,
                                           at::TensorList offsets, at::TensorList weights,
                                           const std::optional<at::Tensor>& like, c10::string_view group,
                                           c10::string_view mode, bool last_offset,
                                           at::OptionalIntArrayRef tables_per_rank, int64_t batch, int64_t dim,
                                           bool met, c10::string_view update, at::TensorList state,
                                           const std::optional<at::Tensor>& lr, double eps, bool of_weights) {
  auto of = ark::ops::backward(arguments_of(tables, indices, offsets, weights, like, group, mode, last_offset,
                                            tables_per_rank, batch, dim, met, update, state, lr, eps),
                               gradient, of_weights)
                .second;
  // Lets autograd detect another backward pass that needs the old rows.
  for (const auto& written : {tables, state})
    for (const at::Tensor& tensor : written)
      if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  return of.empty() ? at::empty({0}, gradient.options()) : at::cat(of);
}

// Batch, columns, dtype (in the order of ark_torch/ops), whether on CUDA, whether trained, and tables by rank.
std::vector<int64_t> embedding_bag_layout(at::TensorList tables, at::TensorList indices, at::TensorList offsets,
                                          at::TensorList weights, const std::optional<at::Tensor>& like,
                                          c10::string_view group, c10::string_view mode, bool last_offset,
                                          at::OptionalIntArrayRef tables_per_rank, bool trained,
                                          c10::string_view update, at::TensorList state,
                                          const std::optional<at::Tensor>& lr, double eps) {
  const BagArguments bags = arguments_of(tables, indices, offsets, weights, like, group, mode, last_offset,
                                         tables_per_rank, -1, -1, false, update, state, lr, eps);
  return ark::with_torch_errors([&] {
    constexpr const char* kName = "embedding_bag_all_to_all";
    const ark::ops::Layout layout = ark::ops::meet(bags, ark::ops::backend_of(bags.group, kName), kName, trained);
    const at::ScalarType types[] = {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble};
    const auto type = std::find(std::begin(types), std::end(types), layout.dtype) - std::begin(types);
    std::vector<int64_t> told{layout.batch, layout.dim, type, layout.device != c10::kCPU, layout.trained};
    told.insert(told.end(), layout.tables.begin(), layout.tables.end());
    return told;
  });
}

std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>, std::vector<at::Tensor>, bool> exchange_bags(
    const at::Tensor& values, const at::Tensor& lengths, const std::optional<at::Tensor>& weights,
    c10::string_view group, at::IntArrayRef rows, at::IntArrayRef owners, const c10::List<std::string>& names,
    bool trained) {
  ark::ops::ReceivedBags bags = ark::ops::exchange_bags(
      {values, lengths, weights, std::string(group), rows.vec(), owners.vec(), names.vec(), trained});
  return {std::move(bags.indices), std::move(bags.offsets), std::move(bags.weights), bags.trained};
}

ark::ops::MatmulResult product(ark::ops::MatmulKind kind, const at::Tensor& a, const at::Tensor& b,
                               c10::string_view group, c10::string_view form, int64_t trained,
                               const std::optional<at::Tensor>& bias, bool gathered = false) {
  return ark::ops::matmul({kind, a, b, std::string(group), std::string(form), trained, gathered, bias});
}

at::Tensor matmul_all_reduce(const at::Tensor& a, const at::Tensor& b, c10::string_view group, c10::string_view form,
                             int64_t trained, const std::optional<at::Tensor>& bias) {
  return product(ark::ops::MatmulKind::all_reduce, a, b, group, form, trained, bias).first;
}

at::Tensor matmul_reduce_scatter(const at::Tensor& a, const at::Tensor& b, c10::string_view group,
                                 c10::string_view form, int64_t trained, const std::optional<at::Tensor>& bias) {
  return product(ark::ops::MatmulKind::reduce_scatter, a, b, group, form, trained, bias).first;
}

std::tuple<at::Tensor, at::Tensor> all_gather_matmul(const at::Tensor& a, const at::Tensor& b, c10::string_view group,
                                                     c10::string_view form, int64_t trained, bool return_gathered,
                                                     const std::optional<at::Tensor>& bias) {
  return product(ark::ops::MatmulKind::all_gather, a, b, group, form, trained, bias, return_gathered);
}

std::vector<int64_t> moe_layout(const at::Tensor& x, const at::Tensor& topk_ids, c10::string_view group,
                                int64_t num_experts, int64_t max_rows, int64_t trained,
                                const std::optional<at::Tensor>& weights, const std::optional<at::Tensor>& w1,
                                const std::optional<at::Tensor>& w2, c10::string_view activation) {
  return ark::ops::moe_layout({x, topk_ids, std::string(group), num_experts, -1, max_rows, false, trained, weights, w1,
                               w2, std::string(activation)});
}

ark::ops::MoeLayer moe_layer(const at::Tensor& x, const at::Tensor& topk_ids, const at::Tensor& weights,
                             const at::Tensor& w1, const at::Tensor& w2, c10::string_view group, int64_t num_experts,
                             c10::string_view activation, int64_t max_tokens, int64_t max_rows, bool met,
                             int64_t trained) {
  return ark::ops::moe_layer({x, topk_ids, std::string(group), num_experts, max_tokens, max_rows, met, trained, weights,
                              w1, w2, std::string(activation)},
                             trained != 0);
}

ark::ops::MoeDispatched moe_dispatch(const at::Tensor& x, const at::Tensor& topk_ids, c10::string_view group,
                                     int64_t num_experts, int64_t max_tokens, int64_t max_rows, bool met,
                                     int64_t trained) {
  return ark::ops::moe_dispatch({x, topk_ids, std::string(group), num_experts, max_tokens, max_rows, met, trained});
}

at::Tensor moe_scatter(const at::Tensor& x, const at::Tensor& places, const at::Tensor& rank_counts,
                       const std::optional<at::Tensor>& weights, c10::string_view group, int64_t max_tokens,
                       int64_t max_rows, int64_t trained) {
  return ark::ops::moe_scatter(
      {x, places, rank_counts, weights, std::string(group), max_tokens, max_rows, false, trained});
}

at::Tensor moe_gather(const at::Tensor& y, const at::Tensor& places, const at::Tensor& rank_counts,
                      const std::optional<at::Tensor>& weights, c10::string_view group, int64_t max_tokens, bool summed,
                      int64_t trained) {
  return ark::ops::moe_gather({y, places, rank_counts, weights, std::string(group), max_tokens, 0, summed, trained});
}

at::Tensor moe_experts(const at::Tensor& rows, const at::Tensor& counts, const at::Tensor& w1, const at::Tensor& w2,
                       c10::string_view activation) {
  return ark::ops::moe_experts(rows, counts, w1, w2, std::string(activation));
}

at::Tensor moe_experts_by(const at::Tensor& rows, const at::Tensor& counts, const at::Tensor& w1, const at::Tensor& w2,
                          c10::string_view activation, c10::string_view products) {
  return ark::ops::moe_experts(rows, counts, w1, w2, std::string(activation), std::string(products));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> moe_experts_backward(const at::Tensor& gradient, const at::Tensor& rows,
                                                                    const at::Tensor& counts, const at::Tensor& w1,
                                                                    const at::Tensor& w2, c10::string_view activation) {
  return ark::ops::moe_experts_backward(gradient, rows, counts, w1, w2, std::string(activation));
}

ark::ops::CompressedCall compressed_call(const at::Tensor& input, const std::optional<at::Tensor>& residual,
                                         at::IntArrayRef numel, at::IntArrayRef bits, at::IntArrayRef bucket,
                                         c10::string_view format, c10::string_view rounding, int64_t seed,
                                         c10::string_view op, c10::string_view group,
                                         const std::optional<at::Tensor>& nonfinite) {
  return {input,           residual,           numel.vec(),
          bits.vec(),      bucket.vec(),       {std::string(format), std::string(rounding), seed},
          std::string(op), std::string(group), nonfinite};
}

at::Tensor compressed_all_reduce(const at::Tensor& input, const std::optional<at::Tensor>& residual,
                                 at::IntArrayRef numel, at::IntArrayRef bits, at::IntArrayRef bucket,
                                 c10::string_view format, c10::string_view rounding, int64_t seed, c10::string_view op,
                                 c10::string_view group, const std::optional<at::Tensor>& nonfinite) {
  return ark::ops::compressed_all_reduce(
      compressed_call(input, residual, numel, bits, bucket, format, rounding, seed, op, group, nonfinite));
}

at::Tensor compressed_all_reduce_without_residual(const at::Tensor& input, at::IntArrayRef numel, at::IntArrayRef bits,
                                                  at::IntArrayRef bucket, c10::string_view format,
                                                  c10::string_view rounding, int64_t seed, c10::string_view op,
                                                  c10::string_view group) {
  return compressed_all_reduce(input, std::nullopt, numel, bits, bucket, format, rounding, seed, op, group,
                               std::nullopt);
}

at::Tensor compressed_reduce_scatter(const at::Tensor& input, const std::optional<at::Tensor>& residual,
                                     at::IntArrayRef numel, at::IntArrayRef bits, at::IntArrayRef bucket,
                                     c10::string_view format, c10::string_view rounding, int64_t seed,
                                     c10::string_view op, c10::string_view group,
                                     const std::optional<at::Tensor>& nonfinite) {
  return ark::ops::compressed_reduce_scatter(
      compressed_call(input, residual, numel, bits, bucket, format, rounding, seed, op, group, nonfinite));
}

at::Tensor compressed_all_gather(const at::Tensor& input, at::IntArrayRef numel, at::IntArrayRef bits,
                                 at::IntArrayRef bucket, c10::string_view format, c10::string_view rounding,
                                 int64_t seed, c10::string_view group) {
  return ark::ops::compressed_all_gather(
      compressed_call(input, std::nullopt, numel, bits, bucket, format, rounding, seed, "", group, std::nullopt));
}

at::Tensor quantize(const at::Tensor& input, int64_t bits, int64_t bucket, c10::string_view format,
                    c10::string_view rounding, int64_t seed) {
  return ark::ops::quantize(input, bits, bucket, {std::string(format), std::string(rounding), seed});
}

at::Tensor dequantize(const at::Tensor& codes, int64_t numel, at::ScalarType dtype, int64_t bits, int64_t bucket,
                      c10::string_view format) {
  return ark::ops::dequantize(codes, numel, dtype, bits, bucket, std::string(format));
}

}  // namespace

TORCH_LIBRARY(ark, library) {
  library.def(
      "embedding_bag_layout(Tensor[] tables, Tensor[] indices, Tensor[] offsets, Tensor[] per_sample_weights, "
      "Tensor? like, str group_name, str mode, bool include_last_offset, int[]? tables_per_rank, bool trained, "
      "str update, Tensor[] state, Tensor? lr, float eps) -> int[]");
  library.def(
      "embedding_bag_all_to_all(Tensor[] tables, Tensor[] indices, Tensor[] offsets, Tensor[] per_sample_weights, "
      "Tensor? like, str group_name, str mode, bool include_last_offset, int[]? tables_per_rank, SymInt batch, "
      "SymInt dim, bool met, str update, Tensor[] state, Tensor? lr, float eps) -> Tensor");
  library.def(
      "embedding_bag_all_to_all_backward(Tensor gradient, Tensor[] tables, Tensor[] indices, Tensor[] offsets, "
      "Tensor[] per_sample_weights, Tensor? like, str group_name, str mode, bool include_last_offset, "
      "int[]? tables_per_rank, SymInt batch, SymInt dim, bool met, str update, bool of_weights) -> "
      "(Tensor[], Tensor[])");
  library.def(
      "embedding_bag_all_to_all_update(Tensor gradient, Tensor(a!)[] tables, Tensor[] indices, Tensor[] offsets, "
      "Tensor[] per_sample_weights, Tensor? like, str group_name, str pooling, bool include_last_offset, "
      "int[]? tables_per_rank, SymInt batch, SymInt dim, bool met, str update, Tensor(b!)[] state, Tensor? lr, "
      "float eps, bool of_weights) -> Tensor");
  library.def(
      "exchange_bags(Tensor values, Tensor lengths, Tensor? per_sample_weights, str group_name, int[] rows, "
      "int[] owners, str[] names, bool trained) -> (Tensor[] indices, Tensor[] offsets, Tensor[] per_sample_weights, "
      "bool trained_somewhere)");
  library.def(
      "matmul_all_reduce(Tensor a, Tensor b, str group_name, str form, int trained, Tensor? bias=None) -> Tensor");
  library.def(
      "matmul_reduce_scatter(Tensor a, Tensor b, str group_name, str form, int trained, Tensor? bias=None) -> Tensor");
  library.def(
      "all_gather_matmul(Tensor a, Tensor b, str group_name, str form, int trained, bool return_gathered, "
      "Tensor? bias=None) -> (Tensor product, Tensor gathered)");
  library.def(
      "moe_layout(Tensor x, Tensor topk_ids, str group_name, int num_experts, SymInt max_rows, int trained, "
      "Tensor? topk_weights, Tensor? w1, Tensor? w2, str activation) -> int[]");
  library.def(
      "moe_layer(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w1, Tensor w2, str group_name, "
      "int num_experts, str activation, SymInt max_tokens, SymInt max_rows, bool met, int trained) -> "
      "(Tensor out, Tensor rows, Tensor counts, Tensor places, Tensor rank_counts, Tensor y)");
  library.def(
      "moe_dispatch(Tensor x, Tensor topk_ids, str group_name, int num_experts, SymInt max_tokens, SymInt max_rows, "
      "bool met, int trained) -> (Tensor rows, Tensor counts, Tensor places, Tensor rank_counts)");
  library.def(
      "moe_scatter(Tensor x, Tensor places, Tensor rank_counts, Tensor? topk_weights, str group_name, "
      "SymInt max_tokens, SymInt max_rows, int trained) -> Tensor");
  library.def(
      "moe_gather(Tensor y, Tensor places, Tensor rank_counts, Tensor? topk_weights, str group_name, "
      "SymInt max_tokens, bool summed, int trained) -> Tensor");
  library.def("moe_experts(Tensor rows, Tensor counts, Tensor w1, Tensor w2, str activation) -> Tensor");
  // For tests and benchmarks, which compare the ways.
  library.def(
      "moe_experts_by(Tensor rows, Tensor counts, Tensor w1, Tensor w2, str activation, str products) -> Tensor");
  library.def(
      "moe_experts_backward(Tensor gradient, Tensor rows, Tensor counts, Tensor w1, Tensor w2, str activation) -> "
      "(Tensor, Tensor, Tensor)");
  library.def("quantize(Tensor input, int bits, int bucket, str format, str rounding, int seed) -> Tensor");
  library.def("dequantize(Tensor codes, SymInt numel, ScalarType dtype, int bits, int bucket, str format) -> Tensor");
  library.def(
      "compressed_all_reduce(Tensor input, Tensor(a!)? residual, SymInt[] numel, int[] bits, int[] bucket, str format, "
      "str rounding, int seed, str op, str group, Tensor(b!)? nonfinite=None) -> Tensor");
  // A separate operator, because Inductor rejects one that writes an optional tensor which is not given.
  library.def(
      "compressed_all_reduce.without_residual(Tensor input, SymInt[] numel, int[] bits, int[] bucket, str format, "
      "str rounding, int seed, str op, str group) -> Tensor");
  library.def(
      "compressed_reduce_scatter(Tensor input, Tensor(a!)? residual, SymInt[] numel, int[] bits, int[] bucket, "
      "str format, str rounding, int seed, str op, str group, Tensor(b!)? nonfinite=None) -> Tensor");
  library.def(
      "compressed_all_gather(Tensor input, SymInt[] numel, int[] bits, int[] bucket, str format, str rounding, "
      "int seed, str group) -> Tensor");
}

TORCH_LIBRARY_IMPL(ark, CompositeExplicitAutograd, library) {
  library.impl("embedding_bag_layout", &embedding_bag_layout);
  library.impl("embedding_bag_all_to_all", &embedding_bag_all_to_all);
  library.impl("embedding_bag_all_to_all_backward", &embedding_bag_all_to_all_backward);
  library.impl("embedding_bag_all_to_all_update", &embedding_bag_all_to_all_update);
  library.impl("exchange_bags", &exchange_bags);
  library.impl("matmul_all_reduce", &matmul_all_reduce);
  library.impl("matmul_reduce_scatter", &matmul_reduce_scatter);
  library.impl("all_gather_matmul", &all_gather_matmul);
  library.impl("moe_layout", &moe_layout);
  library.impl("moe_dispatch", &moe_dispatch);
  library.impl("moe_layer", &moe_layer);
  library.impl("moe_scatter", &moe_scatter);
  library.impl("moe_gather", &moe_gather);
  library.impl("moe_experts", &moe_experts);
  library.impl("moe_experts_by", &moe_experts_by);
  library.impl("moe_experts_backward", &moe_experts_backward);
  library.impl("quantize", &quantize);
  library.impl("dequantize", &dequantize);
  library.impl("compressed_all_reduce", &compressed_all_reduce);
  library.impl("compressed_all_reduce.without_residual", &compressed_all_reduce_without_residual);
  library.impl("compressed_reduce_scatter", &compressed_reduce_scatter);
  library.impl("compressed_all_gather", &compressed_all_gather);
}
