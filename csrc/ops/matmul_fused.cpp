// Products and collectives in one kernel (cuda/fused/matmul.cuh).
#include "ops/matmul.hpp"

namespace ark::ops {

std::string why_not_fused(const MatmulCall&, int) {
  return "it needs CUDA tensors";
}

bool prefers_fused(const MatmulCall&, int) {
  return false;
}

}  // namespace ark::ops
