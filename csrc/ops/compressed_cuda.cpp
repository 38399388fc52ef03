// The steps of compressed collectives on CUDA tensors: refused so far.
#include "ops/compressed.hpp"

namespace ark::ops {

namespace {

[[noreturn]] void refuse_cuda() {
  throw Error(ErrorKind::invalid_argument,
              "input is on a CUDA device, and compressed collectives run on the CPU so far",
              ErrorContext{-1, -1, "compressed", 0, "Pass CPU tensors."});
}

}  // namespace

void encode_parts_cuda(const Coding&, const std::vector<PlacedPart>&, const at::Tensor&, const at::Tensor*,
                       at::Tensor&) {
  refuse_cuda();
}
void decode_parts_cuda(const Coding&, const std::vector<PlacedPart>&, const at::Tensor&, at::Tensor&) {
  refuse_cuda();
}
void reduce_part_cuda(const Coding&, const PartSum&, const at::Tensor*, at::Tensor&) {
  refuse_cuda();
}
void reduce_part_to_elements_cuda(const Coding&, const PartSum&, at::Tensor&) {
  refuse_cuda();
}

}  // namespace ark::ops
