// What the kernels of experts' products have in common on the host: the costs of their tile shapes, and activations.
#pragma once

#include <cstdint>
#include <iterator>
#include <string>

#include "collectives/cuda/fused_stubs.hpp"

namespace ark::ops {

// Cycles per step (64 of the depth) of a tile of each of kMatmulShapes, fitted to whole products on an H200.
inline constexpr int64_t kStepCycles[] = {1138, 890, 510, 360};
static_assert(std::size(kStepCycles) == std::size(kMatmulShapes));
inline constexpr int64_t kMultiprocessors = 132;  // as on all linked Hoppers; any number is correct

// Half groups of rows if an expert has about `rows` rows. Its last group is half full on average.
inline int64_t half_groups(int64_t rows, const device::MatmulShape& shape) {
  return rows < shape.rows ? 2 : 2 * rows / shape.rows + 1;
}

inline device::MoeActivation activation_of(const std::string& name) {
  if (name == "silu") return device::MoeActivation::silu;
  if (name == "gelu") return device::MoeActivation::gelu;
  if (name == "gelu_tanh") return device::MoeActivation::gelu_tanh;
  if (name == "relu") return device::MoeActivation::relu;
  return device::MoeActivation::none;
}

}  // namespace ark::ops
