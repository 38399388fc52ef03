// Launches the kernels of compressed collectives (cuda/compressed.cuh).
//
// A launch's parameters hold up to kMostPieces pieces of one kind (code width; buckets per warp or per block); more
// pieces take more launches. Nothing is copied to the device beforehand, so a captured launch keeps them and the host
// never waits.
#pragma once

#include "cuda/compressed_codes.cuh"

#include <ATen/ATen.h>

#include <vector>

#include "jit/kernel.hpp"
#include "ops/compressed.hpp"

namespace ark::ops {

inline device::CodeParams code_params(const Coding& coding) {
  device::CodeParams params{};
  params.rule = coding.rule;
  params.ranks = 1;
  return params;
}
inline void write_to(device::CodeParams& params, const Result& result) {
  params.output = result.elements.mutable_data_ptr();
  params.nonfinite = reinterpret_cast<long long*>(result.nonfinite);
}
inline const char* encode_entry(const at::Tensor* residual) {
  return residual == nullptr ? "compressed_encode" : "compressed_encode_fed";
}
inline const char* reduce_entry(const at::Tensor* residual) {
  return residual == nullptr ? "compressed_reduce" : "compressed_reduce_fed";
}
inline float* owed_of(const at::Tensor* residual) {
  return residual == nullptr ? nullptr : static_cast<float*>(residual->data_ptr());
}

// The launches of one step. Those that fill places of several ranks form one epoch of the group's tiles.
class CodeLaunches {
 public:
  // `most_blocks`: limit for a launch that waits for peers.
  CodeLaunches(const Coding& coding, const char* entry, c10::Device device, const device::CodeParams& params,
               CUstream stream, uint64_t most_blocks = ~uint64_t{0})
      : coding_(coding), entry_(entry), device_(device), params_(params), stream_(stream), most_blocks_(most_blocks) {}

  // The part's records begin at `begin` of the place of `rank` (or device::kEveryRank).
  void add(const compressed::Part& part, uint64_t begin, int rank = 0);
  void launch();

 private:
  struct CodeKernel;

  device::CodeParams& params_of(const quantize::Piece& piece);
  const CodeKernel& kernel_of(const device::CodeParams& params) const;
  unsigned cut(device::CodeParams& params, uint64_t resident) const;

  const Coding& coding_;
  const char* entry_;  // a literal: it identifies the kernel
  c10::Device device_;
  device::CodeParams params_;
  CUstream stream_;
  uint64_t most_blocks_;
  std::vector<device::CodeParams> launches_;
};

}  // namespace ark::ops
