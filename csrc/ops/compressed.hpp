// Collectives with quantised data: torch.ops.ark.compressed_*, and the quantiser alone.
//
// The group's own exact all_to_all and all_gather carry the bytes, so any carrier works. On GPUs that share memory,
// kernels store records where they are needed (compressed_fused.cpp). Every rank gets the same bits, including for its
// own part. A group of one rank sends nothing and is exact.
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

// Scatter-reduce-allgather: every rank quantises each part for its owner (collectives/compressed/layout.hpp), and an
// all_to_all delivers the records. The owner dequantises them, adds in float32 in rank order, divides for an average
// and quantises the sum. An all_gather distributes the sums. A reduce_scatter is the first half, an all_gather the
// second.
//
// A residual is added before the first quantisation and then holds that quantisation's error. In the rank's own part it
// also holds the sum's error (times the number of ranks for an average), so no error is lost over time.
//
// `nonfinite`, an int64 of the host, is lowered to the smallest index of a NaN or Inf in the result, and stays as it is
// if there is none. With CUDA tensors the kernels write it in the stream's order: it must be pinned, and must outlive
// all launches that name it, in captured graphs, too. The host may read it at any time.
struct CompressedCall {
  at::Tensor input;
  std::optional<at::Tensor> residual;
  std::vector<int64_t> numel, bits, bucket;  // per segment
  QuantizerSettings settings;
  std::string op, group;
  std::optional<at::Tensor> nonfinite;
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

// A part whose records begin at `begin` of a byte buffer.
struct PlacedPart {
  const compressed::Part* part;
  uint64_t begin;
};

// Elements that a step writes, and where it notes the smallest index of a NaN or Inf (null: nowhere).
struct Result {
  at::Tensor& elements;
  int64_t* nonfinite;
};

// The steps, on the CPU and on CUDA's current stream.
//
// Quantises `input`. `residual`: null, or float32 with its shape.
void encode_parts(const Coding& coding, const std::vector<PlacedPart>& parts, const at::Tensor& input,
                  const at::Tensor* residual, at::Tensor& codes);
void decode_parts(const Coding& coding, const std::vector<PlacedPart>& parts, const at::Tensor& codes,
                  const Result& result);
// Adds all ranks' records of a part, which follow one another, in rank order.
struct PartSum {
  const compressed::Part* part;
  const at::Tensor* received;
  int ranks;
  bool average;
};
// Quantises the sum again and adds the error to `residual`.
void reduce_part(const Coding& coding, const PartSum& sum, const at::Tensor* residual, at::Tensor& codes);
// Writes the sum as elements, starting with the part's first.
void reduce_part_to_elements(const Coding& coding, const PartSum& sum, const Result& result);

void encode_parts_cuda(const Coding& coding, const std::vector<PlacedPart>& parts, const at::Tensor& input,
                       const at::Tensor* residual, at::Tensor& codes);
void decode_parts_cuda(const Coding& coding, const std::vector<PlacedPart>& parts, const at::Tensor& codes,
                       const Result& result);
void reduce_part_cuda(const Coding& coding, const PartSum& sum, const at::Tensor* residual, at::Tensor& codes);
void reduce_part_to_elements_cuda(const Coding& coding, const PartSum& sum, const Result& result);

// The same collectives by kernels that store records where peers need them (compressed_fused.cpp). Returns false on all
// ranks if ark does not carry the group's CUDA tensors or the ranks share no memory.
enum class FusedKind : uint8_t { all_reduce, reduce_scatter, all_gather };
struct FusedCall {
  FusedKind kind;
  const char* name;
  const Coding& coding;
  const std::vector<compressed::Part>& parts;
  const compressed::Part* own;  // all_gather: this rank's part, relative to its own elements
  const at::Tensor& input;
  const at::Tensor* residual;
  bool average;
  uint64_t fingerprint;
};
bool run_fused(const FusedCall& call, ProcessGroupArk& group, const Result& result);

// Checks of the arguments (compressed_checks.cpp); they throw Error.
void check_settings(const CallSite& site, const QuantizerSettings& settings);
Coding coding_of(const CallSite& site, const QuantizerSettings& settings, at::ScalarType type, const char* argument);
std::vector<compressed::Segment> segments_of(const CallSite& site, const std::vector<int64_t>& numel,
                                             const std::vector<int64_t>& bits, const std::vector<int64_t>& bucket,
                                             const QuantizerSettings& settings, bool may_be_exact);
void check_flat(const CallSite& site, const char* argument, const at::Tensor& tensor);

}  // namespace ark::ops
