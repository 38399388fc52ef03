// The steps of compressed collectives on CUDA tensors: launches on the current stream, which a graph may capture.
//
// A launch's parameters hold the pieces of one kind (a width of codes; buckets of a warp or of a block), up to
// kMostPieces; more pieces take more launches. Nothing is copied to the device before, and the host waits for nothing.
#include "cuda/compressed_codes.cuh"

#include <algorithm>
#include <vector>

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
      : coding_(coding), entry_(entry), device_(device), params_(params) {}

  void add(const compressed::Part& part, uint64_t begin) {
    for (quantize::Piece piece : part.pieces) {
      piece.at += begin;
      device::CodeParams& params = params_of(piece);
      if (params.pieces == device::kMostPieces) launch(params);
      params.piece[params.pieces++] = {piece, params.buckets};
      params.buckets += quantize::buckets_of(piece);
    }
  }
  void finish() {
    for (device::CodeParams& params : kinds_)
      if (params.pieces != 0) launch(params);
  }

 private:
  static bool is_wide(const quantize::Piece& piece) { return piece.bucket > device::kWarpBucket; }

  // One kernel has one width of codes and one kind of team.
  device::CodeParams& params_of(const quantize::Piece& piece) {
    for (device::CodeParams& params : kinds_) {
      const quantize::Piece& known = params.piece[0].piece;
      if (known.bits == piece.bits && is_wide(known) == is_wide(piece)) return params;
    }
    kinds_.push_back(params_);
    kinds_.back().piece[0].piece = piece;
    return kinds_.back();
  }

  void launch(device::CodeParams& params) {
    const CurrentContext context(device_.index());
    const auto stream = static_cast<CUstream>(native_stream(current_stream(device_)));
    const quantize::Piece& piece = params.piece[0].piece;
    const bool wide = is_wide(piece);
    const jit::Kernel& kernel =
        jit::KernelLibrary::of(device_.index())
            .get(compressed_stub({coding_.dtype, coding_.rule.format, piece.bits, wide}), entry_);
    const uint64_t each = wide ? 1 : device::kCodeThreads / 32;
    // Long runs where all multiprocessors have work without them.
    const uint64_t run = std::clamp<uint64_t>(params.buckets / (each * kFewBlocks), 1, kLongestRun);
    params.run = static_cast<uint32_t>(run);
    const uint64_t blocks = (params.buckets + each * run - 1) / (each * run);
    jit::launch(kernel, {static_cast<unsigned>(blocks)}, {device::kCodeThreads}, 0, stream, params,
                jit::LaunchMode::overlapped);
    params.pieces = 0, params.buckets = 0;
  }

  static constexpr uint64_t kFewBlocks = 1024, kLongestRun = 4;

  const Coding& coding_;
  const char* entry_;
  c10::Device device_;
  device::CodeParams params_;
  std::vector<device::CodeParams> kinds_;
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
  Launches launches(coding, residual == nullptr ? "compressed_encode" : "compressed_encode_fed", input.device(), params);
  for (const auto& [part, begin] : parts) launches.add(*part, begin);
  launches.finish();
}

void decode_parts_cuda(const Coding& coding, const std::vector<PlacedPart>& parts, const at::Tensor& codes,
                       at::Tensor& output) {
  device::CodeParams params = code_params(coding);
  params.input = codes.const_data_ptr(), params.output = output.mutable_data_ptr();  // the sums of one rank
  Launches launches(coding, "compressed_sum", codes.device(), params);
  for (const auto& [part, begin] : parts) launches.add(*part, begin);
  launches.finish();
}

void reduce_part_cuda(const Coding& coding, const PartSum& sum, const at::Tensor* residual, at::Tensor& codes) {
  device::CodeParams params = code_params(coding, sum);
  params.residual = owed_of(residual);
  params.codes = codes.mutable_data_ptr();
  Launches launches(coding, residual == nullptr ? "compressed_reduce" : "compressed_reduce_fed", codes.device(), params);
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
