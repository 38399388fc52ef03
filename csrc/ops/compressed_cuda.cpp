// The steps of compressed collectives on CUDA tensors: launches on the current stream, which a graph may capture.
//
// A launch's parameters hold the pieces of one kind (buckets of a warp, buckets of a block), up to kMostPieces; more
// pieces take more launches. Nothing is copied to the device before, and the host waits for nothing.
#include "cuda/compressed_codes.cuh"

#include <algorithm>

#include "collectives/cuda/stubs.hpp"
#include "jit/kernel.hpp"
#include "ops/compressed.hpp"
#include "process_group/cuda_group.hpp"

namespace ark::ops {

namespace {

device::CodeParams code_params(const Coding& coding) {
  device::CodeParams params{};
  params.rule = coding.rule;
  params.ranks = 1;
  return params;
}

class Launches {
 public:
  Launches(const Coding& coding, const char* entry, c10::Device device, const device::CodeParams& params)
      : coding_(coding), entry_(entry), device_(device), params_{params, params} {}

  void add(const compressed::Part& part, uint64_t begin) {
    for (quantize::Piece piece : part.pieces) {
      piece.at += begin;
      const bool wide = piece.bucket > device::kWarpBucket;
      device::CodeParams& params = params_[wide];
      if (params.pieces == device::kMostPieces) launch(wide);
      params.piece[params.pieces++] = {piece, params.buckets};
      params.buckets += quantize::buckets_of(piece);
    }
  }
  void finish() {
    for (const bool wide : {false, true})
      if (params_[wide].pieces != 0) launch(wide);
  }

 private:
  void launch(bool wide) {
    device::CodeParams& params = params_[wide];
    const CurrentContext context(device_.index());
    const auto stream = static_cast<CUstream>(native_stream(current_stream(device_)));
    const jit::Kernel& kernel =
        jit::KernelLibrary::of(device_.index()).get(compressed_stub(coding_.dtype, wide), entry_);
    constexpr uint64_t kEach = device::kCodeThreads / 32;
    const uint64_t blocks = wide ? params.buckets : (params.buckets + kEach - 1) / kEach;
    jit::launch(kernel, {static_cast<unsigned>(blocks)}, {device::kCodeThreads}, 0, stream, params,
                jit::LaunchMode::overlapped);
    params.pieces = 0, params.buckets = 0;
  }

  const Coding& coding_;
  const char* entry_;
  c10::Device device_;
  device::CodeParams params_[2];  // of narrow and wide buckets
};

float* owed_of(const at::Tensor* residual) {
  return residual == nullptr ? nullptr : static_cast<float*>(residual->data_ptr());
}

device::CodeParams code_params(const Coding& coding, const PartSum& sum) {
  device::CodeParams params = code_params(coding);
  params.input = sum.received->const_data_ptr();
  params.rank_bytes = sum.part->bytes;
  params.ranks = static_cast<uint32_t>(sum.ranks);
  params.average = sum.average;
  params.rule.stage = quantize::Stage::owner;
  return params;
}

}  // namespace

void encode_parts_cuda(const Coding& coding, const std::vector<PlacedPart>& parts, const at::Tensor& input,
                       const at::Tensor* residual, at::Tensor& codes) {
  device::CodeParams params = code_params(coding);
  params.input = input.const_data_ptr(), params.residual = owed_of(residual);
  params.codes = codes.mutable_data_ptr();
  Launches launches(coding, "compressed_encode", input.device(), params);
  for (const auto& [part, begin] : parts) launches.add(*part, begin);
  launches.finish();
}

void decode_parts_cuda(const Coding& coding, const std::vector<PlacedPart>& parts, const at::Tensor& codes,
                       at::Tensor& output) {
  device::CodeParams params = code_params(coding);
  params.codes = const_cast<void*>(codes.const_data_ptr()), params.output = output.mutable_data_ptr();
  Launches launches(coding, "compressed_decode", codes.device(), params);
  for (const auto& [part, begin] : parts) launches.add(*part, begin);
  launches.finish();
}

void reduce_part_cuda(const Coding& coding, const PartSum& sum, const at::Tensor* residual, at::Tensor& codes) {
  device::CodeParams params = code_params(coding, sum);
  params.residual = owed_of(residual);
  params.codes = codes.mutable_data_ptr();
  Launches launches(coding, "compressed_reduce", codes.device(), params);
  launches.add(*sum.part, 0);
  launches.finish();
}

void reduce_part_to_elements_cuda(const Coding& coding, const PartSum& sum, at::Tensor& output) {
  if (sum.part->pieces.empty()) return;
  device::CodeParams params = code_params(coding, sum);
  params.output = output.mutable_data_ptr();
  params.first_element = sum.part->pieces.front().element;
  Launches launches(coding, "compressed_sum", output.device(), params);
  launches.add(*sum.part, 0);
  launches.finish();
}

}  // namespace ark::ops
