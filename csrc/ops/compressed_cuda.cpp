// The steps of compressed collectives on this GPU's tensors only, on the current stream.
#include "ops/compressed_launches.hpp"
#include "ops/tile_result.hpp"
#include "process_group/cuda/cuda_group.hpp"

namespace ark::ops {

namespace {

CUstream current_cuda_stream(c10::Device device) {
  return static_cast<CUstream>(native_stream(current_stream(device)));
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
  const c10::Device device = input.device();
  device::CodeParams params = code_params(coding);
  params.links = alone(device.index(), codes.mutable_data_ptr());
  params.input = input.const_data_ptr(), params.residual = owed_of(residual);
  CodeLaunches launches(coding, encode_entry(residual), device, params, current_cuda_stream(device));
  for (const auto& [part, begin] : parts) launches.add(*part, begin);
  launches.launch();
}

void decode_parts_cuda(const Coding& coding, const std::vector<PlacedPart>& parts, const at::Tensor& codes,
                       const Result& result) {
  const c10::Device device = codes.device();
  device::CodeParams params = code_params(coding);
  params.input = codes.const_data_ptr();  // sums over a single rank
  write_to(params, result);
  CodeLaunches launches(coding, "compressed_sum", device, params, current_cuda_stream(device));
  for (const auto& [part, begin] : parts) launches.add(*part, begin);
  launches.launch();
}

void reduce_part_cuda(const Coding& coding, const PartSum& sum, const at::Tensor* residual, at::Tensor& codes) {
  const c10::Device device = codes.device();
  device::CodeParams params = code_params(coding, sum);
  params.links = alone(device.index(), codes.mutable_data_ptr());
  params.residual = owed_of(residual);
  CodeLaunches launches(coding, reduce_entry(residual), device, params, current_cuda_stream(device));
  launches.add(*sum.part, 0);
  launches.launch();
}

void reduce_part_to_elements_cuda(const Coding& coding, const PartSum& sum, const Result& result) {
  if (sum.part->pieces.empty()) return;
  const c10::Device device = result.elements.device();
  device::CodeParams params = code_params(coding, sum);
  write_to(params, result);
  params.first_element = sum.part->pieces.front().element;
  CodeLaunches launches(coding, "compressed_sum", device, params, current_cuda_stream(device));
  launches.add(*sum.part, 0);
  launches.launch();
}

}  // namespace ark::ops
