// The entry points of the mixture-of-experts operators: check the arguments, agree on them between ranks, and call the
// CPU's or the GPU's implementation.
#include "ops/moe.hpp"

#include <ATen/core/LegacyTypeDispatch.h>

#include <limits>

#include "cuda/fused/tiles.cuh"

namespace ark::ops {

namespace {

using std::to_string;

constexpr size_t kFields = 10;  // and one word, in every call; ranks that make a different call fail on the fields
constexpr int64_t kMost = std::numeric_limits<int32_t>::max();                                // places are int32
enum MoeOperator : int64_t { kDispatch = 101, kScatter = 102, kGather = 103, kLayer = 104 };  // distinct from matmul's

[[noreturn]] void refuse_value(const CallSite& site, const std::string& what, const std::string& remedy) {
  refuse(site, ErrorKind::invalid_argument, what, remedy);
}

void check_rows_type(const CallSite& site, const char* argument, const at::Tensor& rows) {
  check_tensor(site, argument, rows);
  const at::ScalarType type = rows.scalar_type();
  const bool known = type == at::kFloat || type == at::kHalf || type == at::kBFloat16 || type == at::kDouble;
  if (!known || (type == at::kDouble && rows.is_cuda()))
    refuse(site, ErrorKind::type_error,
           std::string(argument) + " is " + dtype_name(type) + " on " + rows.device().str(),
           "Pass float32, float16 or bfloat16 (on the CPU float64, too).");
}

void check_weights(const CallSite& site, const at::Tensor& weights, int64_t tokens, int64_t k, c10::Device device) {
  check_tensor(site, "topk_weights", weights);
  if (!weights.is_floating_point())
    refuse(site, ErrorKind::type_error, "topk_weights is " + dtype_name(weights.scalar_type()),
           "Pass a floating point dtype; float32 is the most exact.");
  if (weights.dim() != 2 || weights.size(0) != tokens || weights.size(1) != k || weights.device() != device)
    refuse_value(site,
                 "topk_weights is " + shape_of(weights) + " on " + weights.device().str() + ", and topk_ids is [" +
                     to_string(tokens) + ", " + to_string(k) + "] on " + device.str(),
                 "Pass a weight for each choice.");
}

void check(const CallSite& site, const MoeDispatch& call, int size, bool sized) {
  check_rows_type(site, "x", call.x);
  if (call.x.dim() != 2)
    refuse_value(site, "x is " + shape_of(call.x) + ", not a matrix",
                 "Pass [tokens, dim]; flatten(0, -2) makes one of a batch.");
  check_tensor(site, "topk_ids", call.topk_ids);
  const at::ScalarType type = call.topk_ids.scalar_type();
  if (type != at::kInt && type != at::kLong)
    refuse(site, ErrorKind::type_error, "topk_ids is " + dtype_name(type), "Pass torch.int32 or torch.int64.");
  if (call.topk_ids.dim() != 2 || call.topk_ids.size(0) != call.x.size(0))
    refuse_value(site, "topk_ids is " + shape_of(call.topk_ids) + " and x is " + shape_of(call.x),
                 "Pass topk_ids as [tokens, k], a row for each row of x.");
  if (call.topk_ids.device() != call.x.device())
    refuse_value(site, "topk_ids is on " + call.topk_ids.device().str() + " but x is on " + call.x.device().str(),
                 "Move it there.");
  if (call.experts <= 0 || call.experts % size != 0)
    refuse_value(
        site, "num_experts is " + to_string(call.experts) + ", which " + to_string(size) + " ranks cannot share evenly",
        "Pass the number of experts of all ranks, a multiple of the group's size.");
  if (sized && call.x.size(0) > call.max_tokens)
    refuse_value(site, "x has " + to_string(call.x.size(0)) + " rows, and max_tokens is " + to_string(call.max_tokens),
                 "Pass the most tokens that any rank has, alike on all ranks.");
  if (sized && (call.max_rows < 0 || call.max_rows > kMost))
    refuse_value(site, "max_rows is " + to_string(call.max_rows), "Pass how many rows a rank may get, or nothing.");
  if (call.topk_ids.numel() > kMost)
    refuse_value(site, "topk_ids has " + to_string(call.topk_ids.numel()) + " elements", "Split the batch.");
  if (call.x.is_cuda() && call.experts > device::kMostCounts)
    refuse_value(
        site,
        "num_experts is " + to_string(call.experts) + ", and a GPU counts at most " + to_string(device::kMostCounts),
        "Spread the experts over several groups.");
  if (call.w1) {
    check_weights(site, *call.weights, call.x.size(0), call.topk_ids.size(1), call.x.device());
    check_experts(site, *call.w1, *call.w2, call.x, call.experts / size, call.activation);
  }
  if (!call.x.is_cuda()) check_ids(site, call.topk_ids, call.experts);
}

std::vector<Field> fields_of(const MoeDispatch& call, bool sized) {
  return {{"operator", call.w1 ? kLayer : kDispatch},
          {"dtype", static_cast<int64_t>(call.x.scalar_type())},
          {"number of columns of x", call.x.size(1)},
          {"number of choices of a token (columns of topk_ids)", call.topk_ids.size(1)},
          {"num_experts", call.experts},
          {"kind of device", static_cast<int64_t>(call.x.device().type())},
          {"max_tokens", sized ? call.max_tokens : -1},
          {"max_rows", call.max_rows},
          {"answer to which arguments take gradients", call.trained},
          {"way of meeting", sized ? 1 : 0}};
}

void check(const CallSite& site, const MoeRows& call, int size, bool gathers) {
  const char* const name = gathers ? "y" : "x";
  check_rows_type(site, name, call.rows);
  check_tensor(site, "places", call.places);
  check_tensor(site, "rank_counts", call.rank_counts);
  const bool fits = call.places.scalar_type() == at::kInt && call.places.dim() == 3 && call.places.size(0) == 2 &&
                    call.rank_counts.scalar_type() == at::kInt && call.rank_counts.dim() == 2 &&
                    call.rank_counts.size(0) == size && call.experts() % size == 0 &&
                    call.places.device() == call.rows.device() && call.rank_counts.device() == call.rows.device();
  if (!fits)
    refuse_value(site,
                 "the handle (places " + shape_of(call.places) + " on " + call.places.device().str() +
                     ", rank_counts " + shape_of(call.rank_counts) + ") is not of a dispatch over " + to_string(size) +
                     " ranks to " + call.rows.device().str(),
                 "Pass what moe_dispatch returned, over the same group.");
  if (gathers ? call.rows.dim() != 2 : call.rows.dim() != 2 && (call.rows.dim() != 3 || call.rows.size(1) != call.k()))
    refuse_value(site, std::string(name) + " is " + shape_of(call.rows),
                 gathers ? "Pass [max_rows, dim], as moe_dispatch's rows." : "Pass [tokens, dim] or [tokens, k, dim].");
  if (!gathers && call.rows.size(0) != call.tokens())
    refuse_value(
        site,
        "x has " + to_string(call.rows.size(0)) + " rows, and the dispatch had " + to_string(call.tokens()) + " tokens",
        "Pass a row for each token.");
  if (call.tokens() > call.max_tokens)
    refuse_value(
        site,
        "the handle has " + to_string(call.tokens()) + " tokens and a max_tokens of " + to_string(call.max_tokens),
        "Pass what moe_dispatch returned.");
  if (call.weights) check_weights(site, *call.weights, call.tokens(), call.k(), call.rows.device());
  if (!call.rows.is_cuda()) choices_of(call.places.contiguous(), routing_of(call.rank_counts.contiguous()), site);
}

// A fingerprint that differs between dispatches. On GPUs it is not computed.
int64_t print_of(const at::Tensor& rank_counts) {
  if (rank_counts.is_cuda()) return 0;
  uint64_t hash = 5;
  const at::Tensor plain = rank_counts.contiguous();
  for (int64_t i = 0; i < plain.numel(); ++i) {
    hash = (hash ^ static_cast<uint64_t>(plain.const_data_ptr<int32_t>()[i])) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 29;
  }
  return static_cast<int64_t>(hash >> 1);
}

std::vector<Field> fields_of(const MoeRows& call, bool gathers) {
  return {{"operator", gathers ? kGather : kScatter},
          {"dtype", static_cast<int64_t>(call.rows.scalar_type())},
          {gathers ? "number of columns of y" : "number of columns of x", call.dim()},
          {"number of choices of a token", call.k()},
          {"number of experts", call.experts()},
          {"kind of device", static_cast<int64_t>(call.rows.device().type())},
          {"max_tokens", call.max_tokens},
          {gathers ? "number of rows of y" : "max_rows", gathers ? call.rows.size(0) : call.max_rows},
          {"answer to which arguments take gradients", call.trained},
          {"handle", print_of(call.rank_counts)}};
}

at::Tensor as_summed(const at::Tensor& weights, const at::Tensor& rows) {
  return weights.to(rows.scalar_type() == at::kDouble ? at::kDouble : at::kFloat).contiguous();
}

// Makes tensors contiguous, as launches require.
MoeRows prepared(const MoeRows& call) {
  MoeRows plain = call;
  plain.rows = plain.rows.contiguous();
  plain.places = plain.places.contiguous();
  plain.rank_counts = plain.rank_counts.contiguous();
  if (plain.weights) plain.weights = as_summed(*plain.weights, call.rows);
  return plain;
}

MoeDispatch weighted(const MoeDispatch& call) {
  MoeDispatch plain = call;
  plain.weights = as_summed(*plain.weights, call.x);
  return plain;
}

// Returns the checked call, after the ranks have met.
MoeDispatch prepared(const MoeDispatch& given, ProcessGroupArk& group) {
  const CallSite site{group.getRank(), given.name()};
  const auto checked = [&] {
    check(site, given, group.getSize(), true);
    return fields_of(given, true);
  };
  if (given.met)
    checked();
  else
    compare(group, site, kFields, checked, {0}, given.x.defined() && given.x.is_cuda());
  MoeDispatch call = given;
  call.x = call.x.contiguous(), call.topk_ids = call.topk_ids.contiguous();
  return call;
}

MoeDispatched dispatched(const MoeDispatch& call, ProcessGroupArk& group) {
  return call.x.is_cuda() ? moe_dispatch_cuda(call, group) : moe_dispatch_cpu(call, group);
}

template <class Run>
at::Tensor moved(const MoeRows& call, bool gathers, const char* name, Run&& run) {
  return with_torch_errors([&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    ProcessGroupArk& group = backend_of(call.group, name);
    const CallSite site{group.getRank(), name};
    const auto checked = [&] {
      check(site, call, group.getSize(), gathers);
      return fields_of(call, gathers);
    };
    compare(group, site, kFields, checked, {0}, call.rows.defined() && call.rows.is_cuda());
    return run(prepared(call), group);
  });
}

}  // namespace

void check_ids(const CallSite& site, const at::Tensor& topk_ids, int64_t experts) {
  const at::Tensor wide = topk_ids.to(at::kLong).contiguous();
  const int64_t* const ids = wide.const_data_ptr<int64_t>();
  const int64_t k = wide.size(1);
  for (int64_t i = 0; i < wide.numel(); ++i) {
    if (ids[i] >= -1 && ids[i] < experts) continue;
    refuse(site, ErrorKind::out_of_range,
           "topk_ids[" + to_string(i / k) + "][" + to_string(i % k) + "] is " + to_string(ids[i]) + ", and there are " +
               to_string(experts) + " experts",
           "Pass numbers from 0 to below num_experts, or -1 for a choice that goes nowhere.");
  }
}

MoeRouting routing_of(const at::Tensor& rank_counts) {
  const int32_t* const counts = rank_counts.const_data_ptr<int32_t>();
  return {static_cast<int>(rank_counts.size(0)), rank_counts.size(1),
          std::vector<int64_t>(counts, counts + rank_counts.numel())};
}

void check_rows(const MoeRouting& routing, int64_t max_rows, int rank) {
  for (int r = 0; r < routing.ranks(); ++r) {
    if (routing.rows(r) <= max_rows) continue;
    throw Error(ErrorKind::invalid_argument,
                "the experts of rank " + to_string(r) + " get " + to_string(routing.rows(r)) +
                    " rows, and max_rows is " + to_string(max_rows),
                ErrorContext{rank, r, "moe_dispatch", 0, "Pass a larger max_rows, or none for the most there can be."});
  }
}

std::vector<int64_t> moe_layout(const MoeDispatch& call) {
  return with_torch_errors([&] {
    ProcessGroupArk& group = backend_of(call.group, call.name());
    const CallSite site{group.getRank(), call.name()};
    const auto checked = [&] {
      check(site, call, group.getSize(), false);
      return fields_of(call, false);
    };
    const int64_t tokens = call.x.defined() && call.x.dim() > 0 ? call.x.size(0) : 0;
    std::vector<int64_t> all;
    for (const auto& words : compare(group, site, kFields, checked, {tokens}, false)) all.push_back(words[0]);
    return all;
  });
}

MoeDispatched moe_dispatch(const MoeDispatch& call) {
  return with_torch_errors([&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    ProcessGroupArk& group = backend_of(call.group, call.name());
    return dispatched(prepared(call, group), group);
  });
}

MoeLayer moe_layer(const MoeDispatch& given, bool saves) {
  return with_torch_errors([&]() -> MoeLayer {
    const at::AutoDispatchBelowADInplaceOrView below;
    ProcessGroupArk& group = backend_of(given.group, given.name());
    const MoeDispatch call = prepared(given, group);
    // An operator's outputs must be separate tensors.
    const auto alone = [&](const at::Tensor& out) -> MoeLayer {
      const auto none = [&](at::ScalarType type) { return at::empty({0}, out.options().dtype(type)); };
      return {out, none(out.scalar_type()), none(at::kLong), none(at::kInt), none(at::kInt), none(out.scalar_type())};
    };
    if (!saves && call.x.is_cuda() && moe_experts_need_no_host(call.x, *call.w1, *call.w2)) {
      if (const auto out = moe_layer_cuda(weighted(call), group)) return alone(*out);
    }
    const auto [rows, counts, places, rank_counts] = dispatched(call, group);
    const at::Tensor y = moe_experts(rows, counts, *call.w1, *call.w2, call.activation);
    const MoeRows back = prepared({y, places, rank_counts, call.weights, call.group, call.max_tokens});
    at::Tensor out = y.is_cuda() ? moe_gather_cuda(back, group) : moe_gather_cpu(back, group);
    if (saves) return {out, rows, counts, places, rank_counts, y};
    return alone(out);
  });
}

at::Tensor moe_scatter(const MoeRows& call) {
  return moved(call, false, "moe_scatter", [](const MoeRows& plain, ProcessGroupArk& group) {
    return plain.rows.is_cuda() ? moe_scatter_cuda(plain, group) : moe_scatter_cpu(plain, group);
  });
}

at::Tensor moe_gather(const MoeRows& call) {
  return moved(call, true, "moe_combine", [](const MoeRows& plain, ProcessGroupArk& group) {
    return plain.rows.is_cuda() ? moe_gather_cuda(plain, group) : moe_gather_cpu(plain, group);
  });
}

}  // namespace ark::ops
