// The entry point of products with collectives: checks the arguments, agrees on them between ranks, and runs the fused
// form or the product and collective one after the other.
#include "ops/matmul.hpp"

#include <ATen/core/LegacyTypeDispatch.h>

#include <optional>

namespace ark::ops {

namespace {

using std::to_string;

void check(const CallSite& site, const MatmulCall& call, int size) {
  if (call.form != "auto" && call.form != "fused" && call.form != "unfused")
    refuse(site, ErrorKind::invalid_argument, "form is '" + call.form + "'", "Pass 'auto', 'fused' or 'unfused'.");
  check_tensor(site, "a", call.a);
  check_tensor(site, "b", call.b);
  const at::ScalarType type = call.a.scalar_type();
  if (type != at::kFloat && type != at::kHalf && type != at::kBFloat16 && type != at::kDouble)
    refuse(site, ErrorKind::type_error, "a is " + dtype_name(type), "Pass float32, float16, bfloat16 or float64.");
  check_same_dtype(site, "b", call.b, "a", call.a);
  if (call.a.dim() != 2 || call.b.dim() != 2)
    refuse(site, ErrorKind::invalid_argument,
           "a is " + shape_of(call.a) + " and b is " + shape_of(call.b) + ", not two matrices",
           "Pass a as [m, k] and b as [k, n]; flatten(0, -2) makes one of a batch.");
  if (call.a.device() != call.b.device())
    refuse(site, ErrorKind::invalid_argument,
           "b is on " + call.b.device().str() + " but a is on " + call.a.device().str(), "Move it there.");
  if (call.a.size(1) != call.b.size(0))
    refuse(site, ErrorKind::invalid_argument,
           "a is " + shape_of(call.a) + " and b is " + shape_of(call.b) + ": columns of a are not rows of b",
           "Pass [m, k] and [k, n]; a weight of torch.nn.Linear is passed as weight.t().");
  if (call.bias) {
    check_tensor(site, "bias", *call.bias);
    check_same_dtype(site, "bias", *call.bias, "a", call.a);
    if (call.bias->device() != call.a.device())
      refuse(site, ErrorKind::invalid_argument,
             "bias is on " + call.bias->device().str() + " but a is on " + call.a.device().str(), "Move it there.");
    if (call.bias->dim() != 1 || call.bias->size(0) != call.columns())
      refuse(site, ErrorKind::invalid_argument, "bias is " + shape_of(*call.bias) + " but b is " + shape_of(call.b),
             "Pass an element for each column of b.");
  }
  if (call.kind == MatmulKind::reduce_scatter && call.rows() % size != 0)
    refuse(site, ErrorKind::invalid_argument,
           "a has " + to_string(call.rows()) + " rows, which " + to_string(size) + " ranks cannot share evenly",
           "Pad a to a multiple of the group's size.");
  if (call.form == "fused") {
    const std::string why = why_not_fused(call, size);
    if (!why.empty())
      refuse(site, ErrorKind::invalid_argument, "form is 'fused', and " + why, "Pass form='auto', or another shape.");
  }
}

// Ranks may differ in depth (sums) or in columns (all_gather).
std::vector<Field> fields_of(const MatmulCall& call) {
  const bool gathers = call.kind == MatmulKind::all_gather;
  // If the backward pass has its own collective, all ranks or none must take part in it.
  const int64_t trained = call.kind == MatmulKind::all_reduce ? 0 : call.trained;
  return {{"operator", static_cast<int64_t>(call.kind)},
          {"number of rows of a", call.rows()},
          {gathers ? "number of columns of a" : "number of columns of b", gathers ? call.depth() : call.columns()},
          {"dtype", static_cast<int64_t>(call.a.scalar_type())},
          {"kind of device", static_cast<int64_t>(call.a.device().type())},
          {"form", call.form == "auto"    ? 0
                   : call.form == "fused" ? 1
                                          : 2},
          {"answer to which of a and b take gradients", trained}};
}

std::vector<int64_t> values_of(const std::vector<Field>& fields) {
  std::vector<int64_t> values;
  for (const Field& field : fields) values.push_back(field.value);
  return values;
}

// A rank that refused a CUDA call cannot know whether the others meet, so it only waits briefly.
constexpr std::chrono::milliseconds kShort{5000};

// Returns whether a single kernel takes the call, the same on all ranks.
bool agree(const MatmulCall& call, ProcessGroupArk& group, const CallSite& site) {
  std::optional<Error> refused;
  std::vector<Field> fields;
  std::vector<int64_t> words;
  const int size = group.getSize();
  try {
    check(site, call, size);
    fields = fields_of(call);
    words = values_of(fields);
  } catch (const Error& error) {
    refused = error;
  }
  const bool cuda = call.a.defined() && call.a.is_cuda();
  if (refused) {
    if (size == 1) throw *refused;
    words.assign(fields_of({MatmulKind::all_reduce, at::empty({0, 0}), at::empty({0, 0})}).size() + 1, -1);
    try {
      tell_all(group, words, cuda ? kShort : std::chrono::milliseconds{});
    } catch (const std::exception&) {  // report the first error
    }
    throw *refused;
  }
  const bool fused = cuda && (call.form == "auto" ? prefers_fused(call, size) : call.form == "fused") &&
                     why_not_fused(call, size).empty();
  if (size == 1) return fused;
  const std::vector<int64_t> key = words;
  if (const auto known = cuda ? group.agreed(key) : std::nullopt) return *known;
  words.push_back(fused);
  const auto told = tell_all(group, words);
  bool all = true;
  for (int r = 0; r < size; ++r) {
    if (told[r].back() < 0)
      throw Error(ErrorKind::mismatch, "rank " + to_string(r) + " refused its arguments",
                  ErrorContext{site.rank, r, site.operation, 0, "See that rank's error."});
    all = all && told[r].back() != 0;
    for (size_t f = 0; f < fields.size(); ++f) {
      if (told[r][f] == told[0][f]) continue;
      throw Error(ErrorKind::mismatch,
                  "rank " + to_string(r) + " has another " + fields[f].what + " than rank 0 (" + to_string(told[r][f]) +
                      ", " + to_string(told[0][f]) + ")",
                  ErrorContext{site.rank, r, site.operation, 0, "Pass the same on every rank."});
    }
  }
  if (cuda) group.agree(key, all);
  return all;
}

}  // namespace

const char* name_of(MatmulKind kind) {
  switch (kind) {
    case MatmulKind::all_reduce: return "matmul_all_reduce";
    case MatmulKind::reduce_scatter: return "matmul_reduce_scatter";
    default: return "all_gather_matmul";
  }
}

at::Tensor product_of(const at::Tensor& a, const MatmulCall& call, at::Tensor out) {
  if (!out.defined()) return call.bias ? at::addmm(*call.bias, a, call.b) : at::mm(a, call.b);
  return call.bias ? at::addmm_out(out, *call.bias, a, call.b) : at::mm_out(out, a, call.b);
}

uint64_t fingerprint(const MatmulCall& call) {
  uint64_t hash = 3;
  for (const int64_t value : values_of(fields_of(call))) {
    hash = (hash ^ static_cast<uint64_t>(value)) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 29;
  }
  return hash | 1;
}

MatmulResult matmul(const MatmulCall& call) {
  return with_torch_errors([&]() -> MatmulResult {
    const at::AutoDispatchBelowADInplaceOrView below;
    const char* const name = name_of(call.kind);
    ProcessGroupArk& group = backend_of(call.group, name);
    const bool fused = agree(call, group, {group.getRank(), name});
    if (group.getSize() == 1) {  // nothing to send
      if (call.a.is_cuda()) group.check_region(name, call.a.device());
      return {product_of(call.a, call), call.gathered ? call.a.clone() : at::empty({0}, call.a.options())};
    }
    if (!call.a.is_cuda()) return matmul_cpu(call, group);
    if (fused) {
      if (auto result = matmul_fused(call, group)) return *std::move(result);
    }
    return matmul_cuda(call, group);
  });
}

}  // namespace ark::ops
