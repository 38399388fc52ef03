// Collectives whose bytes are quantised: torch.ops.ark.compressed_*, and the quantiser alone.
//
// Scatter-reduce-allgather: every rank quantises what belongs to each part's owner (collectives/compressed/layout.hpp),
// an all_to_all brings the records to the owners, an owner dequantises them, adds in float32 in rank order, divides for
// an average and quantises the sum, an all_gather brings the sums to everybody. A reduce-scatter is its first half, an
// all-gather its second. Bytes travel by the group's own exact all_to_all and all_gather, so whatever carries the group
// carries these; GPUs that share memory store records where they are needed (compressed_fused.cpp). Every rank gets the
// same bits, this rank's own part included.
//
// A rank's residual is added before the first quantisation; behind it stands there what that one lost and, in the part
// that the rank owns, what the sum's lost (times the ranks for an average), so nothing is lost over time. A group of
// one rank sends nothing: it is exact.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <string>
#include <vector>

#include "collectives/compressed/layout.hpp"
#include "process_group/process_group_ark.hpp"
#include "util/dtype.hpp"

namespace ark::ops {

struct QuantizerSettings {
  std::string format, rounding;
  int64_t seed = 0;
};

struct CompressedCall {
  at::Tensor input;
  std::optional<at::Tensor> residual;
  std::vector<int64_t> numel, bits, bucket;  // of each segment
  QuantizerSettings settings;
  std::string op, group;
};

at::Tensor compressed_all_reduce(const CompressedCall& call);
at::Tensor compressed_reduce_scatter(const CompressedCall& call);
at::Tensor compressed_all_gather(const CompressedCall& call);

at::Tensor quantize(const at::Tensor& input, int64_t bits, int64_t bucket, const QuantizerSettings& settings);
at::Tensor dequantize(const at::Tensor& codes, int64_t numel, at::ScalarType dtype, int64_t bits, int64_t bucket,
                      const std::string& format);

// Arguments that have passed the checks.
struct Coding {
  quantize::Rule rule;
  DType dtype;
  uint32_t element_bytes;
};

// A part's records begin at `begin` of a buffer of bytes.
struct PlacedPart {
  const compressed::Part* part;
  uint64_t begin;
};

// The steps, on the CPU and on CUDA's current stream.
//
// Quantises `input`; `residual`: null, or float32 of its shape.
void encode_parts(const Coding& coding, const std::vector<PlacedPart>& parts, const at::Tensor& input,
                  const at::Tensor* residual, at::Tensor& codes);
void decode_parts(const Coding& coding, const std::vector<PlacedPart>& parts, const at::Tensor& codes,
                  at::Tensor& output);
// Adds what ranks have sent of a part, one part behind the other, in rank order.
struct PartSum {
  const compressed::Part* part;
  const at::Tensor* received;
  int ranks;
  bool average;
};
// Quantised again; what that loses is added to `residual`.
void reduce_part(const Coding& coding, const PartSum& sum, const at::Tensor* residual, at::Tensor& codes);
// As elements; the part's first one comes first.
void reduce_part_to_elements(const Coding& coding, const PartSum& sum, at::Tensor& output);

void encode_parts_cuda(const Coding& coding, const std::vector<PlacedPart>& parts, const at::Tensor& input,
                       const at::Tensor* residual, at::Tensor& codes);
void decode_parts_cuda(const Coding& coding, const std::vector<PlacedPart>& parts, const at::Tensor& codes,
                       at::Tensor& output);
void reduce_part_cuda(const Coding& coding, const PartSum& sum, const at::Tensor* residual, at::Tensor& codes);
void reduce_part_to_elements_cuda(const Coding& coding, const PartSum& sum, at::Tensor& output);

// The same collectives by kernels that store records where peers need them (compressed_fused.cpp). False, alike on all
// ranks: ark does not carry the group's CUDA tensors, or there is no memory that its ranks share.
enum class FusedKind : uint8_t { all_reduce, reduce_scatter, all_gather };
struct FusedCall {
  FusedKind kind;
  const char* name;
  const Coding& coding;
  const std::vector<compressed::Part>& parts;
  const compressed::Part* own;  // all_gather: what this rank has, in its own elements
  const at::Tensor& input;
  const at::Tensor* residual;
  bool average;
  uint64_t fingerprint;
};
bool run_fused(const FusedCall& call, ProcessGroupArk& group, at::Tensor& out);

// Checks of what compressed.cpp is given (compressed_checks.cpp); they throw Error.
void check_settings(const CallSite& site, const QuantizerSettings& settings);
Coding coding_of(const CallSite& site, const QuantizerSettings& settings, at::ScalarType type, const char* argument);
std::vector<compressed::Segment> segments_of(const CallSite& site, const std::vector<int64_t>& numel,
                                             const std::vector<int64_t>& bits, const std::vector<int64_t>& bucket,
                                             const QuantizerSettings& settings, bool may_be_exact);
void check_flat(const CallSite& site, const char* argument, const at::Tensor& tensor);

}  // namespace ark::ops
