// Mixtures of experts: tokens' rows go to their experts' ranks and come back. PyTorch knows the operators as ark::moe_*
// (registration.cpp); users call ark_torch.ops.
//
// Everything is checked before a byte moves, and all ranks must make the same call. On the CPU they compare every call;
// on GPUs only the first call that differs in more than its tokens.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "ops/meeting.hpp"
#include "ops/moe_routing.hpp"

// The operators:
//   moe_dispatch  counts choices, tells all ranks, and sends each token's row to each of its experts
//   moe_scatter   sends rows whose places are known: the gradient of moe_gather
//   moe_gather    brings rows back and adds a token's rows in the order of its choices in float32: moe_combine, and the
//                 gradient of the other two
//   moe_experts   the feed-forward networks in between, of this rank's experts (moe_experts.cpp)
//   moe_layer     dispatch, experts and gather in one operator
// Sizes do not depend on the routing, so no host waits for a device and calls may be captured. Rows are in a block of
// `max_rows`, equal on all ranks; the counts tell how many are used, and the rest are zeros. Two tensors tell where a
// choice went: `places` [2, tokens, k] has its row on the expert's rank and its slot here (moe_routing.hpp; -1:
// nowhere), and `rank_counts` is [ranks, experts].
namespace ark::ops {

struct MoeDispatch {
  at::Tensor x;         // [tokens, dim]
  at::Tensor topk_ids;  // [tokens, k]
  std::string group;
  int64_t experts = 0;     // of all ranks
  int64_t max_tokens = 0;  // the most of any rank
  int64_t max_rows = 0;    // of a rank's experts
  bool met = false;        // the ranks have just exchanged their arguments
  int64_t trained = 0;
  // Only for moe_layer.
  std::optional<at::Tensor> weights = {}, w1 = {}, w2 = {};
  std::string activation = {};

  const char* name() const { return w1 ? "moe_layer" : "moe_dispatch"; }
};

struct MoeRows {
  at::Tensor rows;    // scatter: [tokens, dim] or [tokens, k, dim]; gather: [max_rows, dim]
  at::Tensor places;  // [2, tokens, k]
  at::Tensor rank_counts;
  std::optional<at::Tensor> weights;  // [tokens, k]
  std::string group;
  int64_t max_tokens = 0;
  int64_t max_rows = 0;  // of scatter's result
  bool summed = true;    // gather: [tokens, dim], else [tokens, k, dim]
  int64_t trained = 0;

  int64_t tokens() const { return places.size(1); }
  int64_t k() const { return places.size(2); }
  int64_t dim() const { return rows.size(-1); }
  int64_t experts() const { return rank_counts.size(1); }
};

// rows [max_rows, dim], counts [experts of a rank], places, rank_counts.
using MoeDispatched = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// Collective. Checks the arguments and returns the number of tokens of each rank.
std::vector<int64_t> moe_layout(const MoeDispatch& call);
MoeDispatched moe_dispatch(const MoeDispatch& call);
at::Tensor moe_scatter(const MoeRows& call);
at::Tensor moe_gather(const MoeRows& call);

// The result; if `saves`, also what its gradients need (a dispatch's results and the experts'), else empty tensors.
using MoeLayer = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
MoeLayer moe_layer(const MoeDispatch& call, bool saves);

// This rank's experts. rows: sorted by expert, `counts` of each. w1: [experts, ffn, dim], or gates followed by factors
// in [experts, 2 * ffn, dim]; w2: [experts, dim, ffn]. Rows after the counts are undefined. `products`: "auto", or how
// to multiply: both by the "kernel" of moe_product.cpp or by PyTorch ("library"), or the first and the second
// ("mixed").
at::Tensor moe_experts(const at::Tensor& rows, const at::Tensor& counts, const at::Tensor& w1, const at::Tensor& w2,
                       const std::string& activation, const std::string& products = "auto");
// Gradients of rows, w1 and w2.
std::tuple<at::Tensor, at::Tensor, at::Tensor> moe_experts_backward(const at::Tensor& gradient, const at::Tensor& rows,
                                                                    const at::Tensor& counts, const at::Tensor& w1,
                                                                    const at::Tensor& w2,
                                                                    const std::string& activation);
// One kernel for all experts (moe_product.cpp). moe_product_takes() tells whether it can run. moe_product() multiplies
// rows with each expert's w [experts, n, d], gated or not, and applies the activation, if it has a name.
bool moe_product_takes(const at::Tensor& x, const at::Tensor& w1, const at::Tensor& w2);
at::Tensor moe_product(const at::Tensor& rows, const at::Tensor& counts, const at::Tensor& w, bool gated,
                       const std::string& activation);
// Whether the products read the counts on the device.
bool moe_experts_need_no_host(const at::Tensor& x, const at::Tensor& w1, const at::Tensor& w2);
void check_experts(const CallSite& site, const at::Tensor& w1, const at::Tensor& w2, const at::Tensor& x, int64_t local,
                   const std::string& activation);

// On CPU tensors (moe_cpu.cpp) and CUDA tensors (moe_cuda.cpp). The arguments are checked and contiguous; weights are
// float32 (float64 for float64 rows).
MoeDispatched moe_dispatch_cpu(const MoeDispatch& call, ProcessGroupArk& group);
MoeDispatched moe_dispatch_cuda(const MoeDispatch& call, ProcessGroupArk& group);
at::Tensor moe_scatter_cpu(const MoeRows& call, ProcessGroupArk& group);
at::Tensor moe_scatter_cuda(const MoeRows& call, ProcessGroupArk& group);
at::Tensor moe_gather_cpu(const MoeRows& call, ProcessGroupArk& group);
at::Tensor moe_gather_cuda(const MoeRows& call, ProcessGroupArk& group);
// Runs the layer in one go for experts that need no host. Returns nothing if it cannot move the rows.
std::optional<at::Tensor> moe_layer_cuda(const MoeDispatch& call, ProcessGroupArk& group);
MoeDispatched moe_dispatch_unfused(const MoeDispatch& call, ProcessGroupArk& group);
at::Tensor moe_scatter_unfused(const MoeRows& call, ProcessGroupArk& group);
at::Tensor moe_gather_unfused(const MoeRows& call, ProcessGroupArk& group);

// Collective: the ranks exchange their counts. topk_ids is a CPU tensor. Returns routing, counts, places, rank_counts.
using MoeRoute = std::tuple<MoeRouting, at::Tensor, at::Tensor, at::Tensor>;
MoeRoute moe_route(const MoeDispatch& call, ProcessGroupArk& group);
void check_ids(const CallSite& site, const at::Tensor& topk_ids, int64_t experts);  // on the CPU: every choice
// Makes the routing from all ranks' counts (a CPU tensor of int32).
MoeRouting routing_of(const at::Tensor& rank_counts);
// The choice of each slot of this rank. Throws if places and routing are not of one dispatch. CPU tensors.
std::vector<int64_t> choices_of(const at::Tensor& places, const MoeRouting& routing, const CallSite& site);
// Throws on all ranks if a rank gets more than max_rows.
void check_rows(const MoeRouting& routing, int64_t max_rows, int rank);

}  // namespace ark::ops
