// The entry points of compressed collectives: check the arguments, agree on them between ranks, then quantise, exchange
// records and decode. CPU and GPU differ only in the steps, which compressed_cpu.cpp and compressed_cuda.cpp have.
#include "ops/compressed.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <numeric>

#include "ops/meeting.hpp"
#include "process_group/work.hpp"

namespace ark::ops {

namespace {

using compressed::Part;
using std::to_string;

enum class Collective : int64_t { all_reduce = 40, reduce_scatter = 41, all_gather = 42 };

const char* name_of(Collective collective) {
  switch (collective) {
    case Collective::all_reduce: return "compressed_all_reduce";
    case Collective::reduce_scatter: return "compressed_reduce_scatter";
    default: return "compressed_all_gather";
  }
}

// A call that has passed the checks.
struct Prepared {
  Coding coding;
  std::vector<compressed::Segment> segments;
};

int64_t sum_of(const std::vector<int64_t>& numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), int64_t{0});
}

void check_residual(const CallSite& site, const CompressedCall& call) {
  if (!call.residual) return;
  const at::Tensor& residual = *call.residual;
  check_flat(site, "residual", residual);
  if (residual.scalar_type() != at::kFloat)
    refuse(site, ErrorKind::type_error, "residual is " + dtype_name(residual.scalar_type()), "Pass float32.");
  check_elements(site, "residual", residual.numel(), call.input.numel(), "one for each element of input");
  if (residual.device() != call.input.device())
    refuse(site, ErrorKind::invalid_argument,
           "residual is on " + residual.device().str() + " and input on " + call.input.device().str(),
           "Keep it on the device of input.");
  if (residual.is_alias_of(call.input))
    refuse(site, ErrorKind::invalid_argument, "residual shares memory with input", "Keep it in memory of its own.");
}

void check_nonfinite(const CallSite& site, const CompressedCall& call) {
  if (!call.nonfinite) return;
  const at::Tensor& nonfinite = *call.nonfinite;
  check_flat(site, "nonfinite", nonfinite);
  if (nonfinite.scalar_type() != at::kLong)
    refuse(site, ErrorKind::type_error, "nonfinite is " + dtype_name(nonfinite.scalar_type()), "Pass int64.");
  check_elements(site, "nonfinite", nonfinite.numel(), 1, "an index");
  const bool pinned = !call.input.is_cuda() || (nonfinite.device().is_cpu() && nonfinite.is_pinned());
  if (!nonfinite.device().is_cpu() || !pinned)
    refuse(site, ErrorKind::invalid_argument,
           "nonfinite is on " + nonfinite.device().str() + (pinned ? "" : " and not in pinned memory"),
           "Pass a CPU tensor, made with pin_memory=True if input is on a CUDA device.");
}

int64_t* nonfinite_of(const CompressedCall& call) {
  return call.nonfinite ? call.nonfinite->mutable_data_ptr<int64_t>() : nullptr;
}

Prepared prepared(const CallSite& site, const CompressedCall& call, Collective collective, int size) {
  check_flat(site, "input", call.input);
  const Coding coding = coding_of(site, call.settings, call.input.scalar_type(), "input");
  if (collective != Collective::all_gather && call.op != "sum" && call.op != "avg")
    refuse(site, ErrorKind::invalid_argument, "op is '" + call.op + "'",
           "Pass 'sum' or 'avg'; other operations are all_reduce's.");
  std::vector<compressed::Segment> segments =
      segments_of(site, call.numel, call.bits, call.bucket, call.settings, true);
  const int64_t shares = collective == Collective::reduce_scatter ? size : 1;
  const int64_t each = sum_of(call.numel);
  if (each * shares != call.input.numel())
    refuse(site, ErrorKind::invalid_argument,
           "numel adds up to " + to_string(each) + (shares == 1 ? "" : " for each of " + to_string(shares) + " ranks") +
               ", and input has " + to_string(call.input.numel()) + " elements",
           "Pass the number of elements of every segment.");
  check_residual(site, call);
  check_nonfinite(site, call);
  if (size == 1)
    for (compressed::Segment& segment : segments) segment.bits = 0;
  return {coding, std::move(segments)};
}

// The value shared by all segments; for different values the largest, which still tells lists apart.
int64_t common(const std::vector<int64_t>& numbers) {
  return numbers.empty() ? 0 : *std::max_element(numbers.begin(), numbers.end());
}

int64_t fingerprint(const CompressedCall& call) {
  uint64_t hash = 13;
  for (const auto* list : {&call.numel, &call.bits, &call.bucket})
    for (const int64_t value : *list) {
      hash = (hash ^ static_cast<uint64_t>(value)) * 0x9e3779b97f4a7c15u;
      hash ^= hash >> 29;
    }
  return static_cast<int64_t>(hash >> 1);
}

constexpr size_t kFields = 11;

std::vector<Field> fields_of(const CompressedCall& call, Collective collective) {
  const bool several = call.numel.size() > 1;
  return {{"operator", static_cast<int64_t>(collective)},
          {"number of segments", static_cast<int64_t>(call.numel.size())},
          {"number of elements", call.input.numel()},
          {several ? "largest of bits" : "bits", common(call.bits)},
          {several ? "largest of bucket" : "bucket", common(call.bucket)},
          {"list of segments (numel, bits and bucket; here their fingerprint)", fingerprint(call)},
          {"dtype", static_cast<int64_t>(call.input.scalar_type())},
          {"kind of device", static_cast<int64_t>(call.input.device().type())},
          {"format (0: uniform, 1: fp8)", call.settings.format == "fp8"},
          {"rounding (0: nearest, 1: stochastic)", call.settings.rounding == "stochastic"},
          {"op (0: sum, 1: avg)", call.op == "avg"}};
}

// Places the parts one after the other.
std::vector<PlacedPart> placed(const std::vector<Part>& parts) {
  std::vector<PlacedPart> all;
  uint64_t at = 0;
  for (const Part& part : parts) {
    all.push_back({&part, at});
    at += part.bytes;
  }
  return all;
}

uint64_t all_bytes(const std::vector<Part>& parts) {
  return std::accumulate(parts.begin(), parts.end(), uint64_t{0},
                         [](uint64_t sum, const Part& part) { return sum + part.bytes; });
}

at::Tensor bytes(uint64_t count, const at::Tensor& like) {
  return at::empty({static_cast<int64_t>(count)}, like.options().dtype(at::kByte));
}

// Exchanges codes and returns every rank's codes of this rank's part, in rank order.
at::Tensor exchanged(ProcessGroupArk& group, const std::vector<Part>& parts, at::Tensor& codes) {
  const uint64_t mine = parts[static_cast<size_t>(group.getRank())].bytes;
  std::vector<int64_t> sent, received(parts.size(), static_cast<int64_t>(mine));
  for (const Part& part : parts) sent.push_back(static_cast<int64_t>(part.bytes));
  at::Tensor all = bytes(mine * parts.size(), codes);
  all_to_all_single(group, all, codes, received, sent);
  return all;
}

at::Tensor gathered(ProcessGroupArk& group, at::Tensor& codes) {
  at::Tensor all = bytes(static_cast<uint64_t>(codes.numel() * group.getSize()), codes);
  c10d::AllgatherOptions options;
  options.asyncOp = false;
  wait_for(group._allgather_base(all, codes, options));
  return all;
}

at::Tensor quantised(const Coding& coding, const std::vector<Part>& parts, const at::Tensor& input,
                     const at::Tensor* residual) {
  at::Tensor codes = bytes(all_bytes(parts), input);
  const auto encode = input.is_cuda() ? encode_parts_cuda : encode_parts;
  encode(coding, placed(parts), input, residual, codes);
  return codes;
}

// Uses kernels that send while they quantise, if available.
bool fused(const CompressedCall& call, const Prepared& ready, ProcessGroupArk& group, Collective collective,
           const std::vector<Part>& parts, const Part* own, const Result& result) {
  if (!call.input.is_cuda() || group.getSize() == 1) return false;
  const FusedKind kind = collective == Collective::all_reduce       ? FusedKind::all_reduce
                         : collective == Collective::reduce_scatter ? FusedKind::reduce_scatter
                                                                    : FusedKind::all_gather;
  return run_fused(
      {kind, name_of(collective), ready.coding, parts, own, call.input, call.residual ? &*call.residual : nullptr,
       call.op == "avg", static_cast<uint64_t>(fingerprint(call))},
      group, result);
}

at::Tensor all_reduce(const CompressedCall& call, const Prepared& ready, ProcessGroupArk& group) {
  const bool cuda = call.input.is_cuda();
  const size_t rank = static_cast<size_t>(group.getRank());
  const at::Tensor* const residual = call.residual ? &*call.residual : nullptr;
  const std::vector<Part> parts = compressed::cut(ready.segments, ready.coding.element_bytes, group.getSize());
  at::Tensor out = at::empty_like(call.input);
  const Result result{out, nonfinite_of(call)};
  if (fused(call, ready, group, Collective::all_reduce, parts, nullptr, result)) return out;
  at::Tensor codes = quantised(ready.coding, parts, call.input, residual);
  at::Tensor received = exchanged(group, parts, codes);
  // Parts differ in size, but an all_gather needs equal pieces.
  uint64_t most = 0;
  for (const Part& part : parts) most = std::max(most, part.bytes);
  at::Tensor own = bytes(most, call.input);
  (cuda ? reduce_part_cuda : reduce_part)(ready.coding, {&parts[rank], &received, group.getSize(), call.op == "avg"},
                                          residual, own);
  const at::Tensor sums = gathered(group, own);
  std::vector<PlacedPart> all;
  for (size_t r = 0; r < parts.size(); ++r) all.push_back({&parts[r], r * most});
  (cuda ? decode_parts_cuda : decode_parts)(ready.coding, all, sums, result);
  return out;
}

at::Tensor reduce_scatter(const CompressedCall& call, const Prepared& ready, ProcessGroupArk& group) {
  const std::vector<Part> parts = compressed::shares_of(ready.segments, ready.coding.element_bytes, group.getSize());
  at::Tensor out = at::empty({call.input.numel() / group.getSize()}, call.input.options());
  const Result result{out, nonfinite_of(call)};
  if (fused(call, ready, group, Collective::reduce_scatter, parts, nullptr, result)) return out;
  at::Tensor codes = quantised(ready.coding, parts, call.input, call.residual ? &*call.residual : nullptr);
  at::Tensor received = exchanged(group, parts, codes);
  (call.input.is_cuda() ? reduce_part_to_elements_cuda : reduce_part_to_elements)(
      ready.coding, {&parts[static_cast<size_t>(group.getRank())], &received, group.getSize(), call.op == "avg"},
      result);
  return out;
}

at::Tensor all_gather(const CompressedCall& call, const Prepared& ready, ProcessGroupArk& group) {
  const std::vector<Part> mine = compressed::shares_of(ready.segments, ready.coding.element_bytes, 1);
  const std::vector<Part> all = compressed::shares_of(ready.segments, ready.coding.element_bytes, group.getSize());
  at::Tensor out = at::empty({call.input.numel() * group.getSize()}, call.input.options());
  const Result result{out, nullptr};
  if (fused(call, ready, group, Collective::all_gather, all, &mine[0], result)) return out;
  at::Tensor codes = quantised(ready.coding, mine, call.input, nullptr);
  const at::Tensor received = gathered(group, codes);
  (call.input.is_cuda() ? decode_parts_cuda : decode_parts)(ready.coding, placed(all), received, result);
  return out;
}

template <class Run>
at::Tensor run(const CompressedCall& call, Collective collective, Run&& body) {
  return with_torch_errors([&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    const char* const name = name_of(collective);
    ProcessGroupArk& group = backend_of(call.group, name);
    const CallSite site{group.getRank(), name};
    Prepared ready;
    const auto checked = [&] {
      ready = prepared(site, call, collective, group.getSize());
      return fields_of(call, collective);
    };
    compare(group, site, kFields, checked, {}, true);
    if (call.residual) raise_version(*call.residual);
    if (call.nonfinite) raise_version(*call.nonfinite);
    const c10::OptionalDeviceGuard guard(call.input.device());
    return body(call, ready, group);
  });
}

}  // namespace

at::Tensor compressed_all_reduce(const CompressedCall& call) {
  return run(call, Collective::all_reduce, all_reduce);
}

at::Tensor compressed_reduce_scatter(const CompressedCall& call) {
  return run(call, Collective::reduce_scatter, reduce_scatter);
}

at::Tensor compressed_all_gather(const CompressedCall& call) {
  return run(call, Collective::all_gather, all_gather);
}

at::Tensor quantize(const at::Tensor& input, int64_t bits, int64_t bucket, const QuantizerSettings& settings) {
  return with_torch_errors([&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    const CallSite site{-1, "quantize"};
    check_flat(site, "input", input);
    const Coding coding = coding_of(site, settings, input.scalar_type(), "input");
    const std::vector<Part> parts = compressed::shares_of(
        segments_of(site, {input.numel()}, {bits}, {bucket}, settings, false), coding.element_bytes, 1);
    const c10::OptionalDeviceGuard guard(input.device());
    return quantised(coding, parts, input, nullptr);
  });
}

at::Tensor dequantize(const at::Tensor& codes, int64_t numel, at::ScalarType dtype, int64_t bits, int64_t bucket,
                      const std::string& format) {
  return with_torch_errors([&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    const CallSite site{-1, "dequantize"};
    check_flat(site, "codes", codes);
    if (codes.scalar_type() != at::kByte)
      refuse(site, ErrorKind::type_error, "codes is " + dtype_name(codes.scalar_type()), "Pass what quantize() gave.");
    const QuantizerSettings settings{format, "nearest", 0};
    const Coding coding = coding_of(site, settings, dtype, "dtype");
    const std::vector<Part> parts =
        compressed::shares_of(segments_of(site, {numel}, {bits}, {bucket}, settings, false), coding.element_bytes, 1);
    check_elements(site, "codes", codes.numel(), static_cast<int64_t>(parts[0].bytes),
                   to_string(numel) + " elements of " + to_string(bits) + " bits in buckets of " + to_string(bucket));
    const c10::OptionalDeviceGuard guard(codes.device());
    at::Tensor out = at::empty({numel}, codes.options().dtype(dtype));
    (codes.is_cuda() ? decode_parts_cuda : decode_parts)(coding, placed(parts), codes, {out, nullptr});
    return out;
  });
}

}  // namespace ark::ops
