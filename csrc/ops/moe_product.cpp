// The products of a rank's experts in one launch (cuda/fused/moe_product.cuh): when it can run, and with which tile
// shape.
#include <algorithm>
#include <limits>

#include "collectives/cuda/fused_stubs.hpp"
#include "jit/kernel.hpp"
#include "ops/moe.hpp"
#include "ops/tensor_map.hpp"
#include "process_group/cuda/cuda_group.hpp"

namespace ark::ops {

namespace {

using device::MatmulShape;

// Cycles per step (64 of the depth) of a tile of each of kMatmulShapes, fitted to whole products on an H200.
constexpr int64_t kStepCycles[] = {1138, 890, 510, 360};
static_assert(std::size(kStepCycles) == std::size(kMatmulShapes));
constexpr uint32_t kMultiprocessors = 132;  // as on all linked Hoppers; any number is correct

// Half groups of rows if an expert has about `rows` rows. Its last group is half full on average.
int64_t half_groups(int64_t rows, const MatmulShape& shape) {
  return rows < shape.rows ? 2 : 2 * rows / shape.rows + 1;
}

device::MoeActivation activation_of(const std::string& name) {
  if (name == "silu") return device::MoeActivation::silu;
  if (name == "gelu") return device::MoeActivation::gelu;
  if (name == "gelu_tanh") return device::MoeActivation::gelu_tanh;
  if (name == "relu") return device::MoeActivation::relu;
  return device::MoeActivation::none;
}

// Cycles per step of all waves together. A part of a tile is taken to need as many fewer than a tile as it loads less.
// Half of that gain is counted, since the number of tiles is a guess; and none for a product's only wave, since of two
// shapes with equal parts the smaller one, whose ring has more stages, has more bytes in flight.
int64_t cycles_of(const device::MoeWaves& waves, size_t i) {
  const MatmulShape& shape = kMatmulShapes[i];
  const int64_t lines = shape.rows / waves.down + shape.columns / waves.across, all = shape.rows + shape.columns;
  const int64_t part = waves.whole == 0 ? kStepCycles[i] : kStepCycles[i] * (lines + all) / (2 * all);
  return kStepCycles[i] * waves.whole + (waves.left == 0 ? 0 : part);
}

// The shape whose waves of tiles take the fewest cycles if each expert has about `rows` rows. All shapes
// give the same bits.
MatmulShape shape_of(int64_t rows, int64_t experts, int64_t columns, bool gated) {
  size_t best = 0;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (size_t i = 0; i < std::size(kMatmulShapes); ++i) {
    const MatmulShape& shape = kMatmulShapes[i];
    const int64_t out = gated ? shape.columns / 2 : shape.columns;
    const int64_t tiles = in_wholes(experts * half_groups(rows, shape) * in_wholes(columns, out), 2);
    const int64_t cycles = cycles_of({static_cast<uint32_t>(tiles), kMultiprocessors, shape}, i);
    if (cycles < least) best = i, least = cycles;
  }
  return kMatmulShapes[best];
}

at::Tensor aligned(const at::Tensor& tensor) {
  const at::Tensor plain = tensor.contiguous();
  return reinterpret_cast<uintptr_t>(plain.const_data_ptr()) % 16 == 0 ? plain : plain.clone();
}

}  // namespace

bool moe_product_takes(const at::Tensor& x, const at::Tensor& w1, const at::Tensor& w2) {
  if (!x.is_cuda() || (x.scalar_type() != at::kHalf && x.scalar_type() != at::kBFloat16)) return false;
  if (device_attribute(x.device().index(), CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) != 9) return false;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
  const bool fits = w1.numel() != 0 && w1.size(0) * w1.size(1) < kMost && w2.size(0) * w2.size(1) < kMost;
  return fits && x.size(1) % 8 == 0 && w2.size(2) % 8 == 0;
}

at::Tensor moe_product(const at::Tensor& given, const at::Tensor& counts, const at::Tensor& weight, bool gated,
                       const std::string& activation) {
  const at::Tensor rows = aligned(given), w = aligned(weight), counted = counts.contiguous();
  const int64_t experts = w.size(0), lines = w.size(1), depth = w.size(2), columns = gated ? lines / 2 : lines;
  at::Tensor out = at::empty({rows.size(0), columns}, rows.options());
  // `rows` has room for the worst case, so assume that half of it is used.
  const MatmulShape shape =
      shape_of(std::max<int64_t>(in_wholes(rows.size(0), 2 * experts), 1), experts, columns, gated);
  const int64_t of_tile = gated ? shape.columns / 2 : shape.columns;
  device::MoeProductParams params{};
  params.a = map_of(rows.const_data_ptr(), depth, rows.size(0), depth, 16);
  const auto columns_of = [&](int64_t box) {
    return map_of(w.const_data_ptr(), depth, experts * lines, depth, static_cast<int>(box));
  };
  params.b = columns_of(of_tile), params.b_part = columns_of(of_tile / device::moe_most_across(shape));
  params.counts = reinterpret_cast<const long long*>(counted.const_data_ptr<int64_t>());
  params.out = static_cast<char*>(out.data_ptr());
  params.out_bytes = static_cast<uint64_t>(columns) * 2;
  params.experts = static_cast<uint32_t>(experts), params.lines = static_cast<uint32_t>(lines);
  params.columns = static_cast<uint32_t>(columns), params.depth = static_cast<uint32_t>(depth);
  const int device = rows.device().index();
  const CurrentContext context(device);  // autograd's threads have none
  const auto stream = static_cast<CUstream>(native_stream(current_stream(rows.device())));
  const jit::Kernel& kernel = jit::KernelLibrary::of(device).get(
      moe_product_stub(dtype_of(rows.scalar_type()), shape, gated, activation_of(activation)), "moe_product");
  const auto threads = static_cast<unsigned>(shape.threads());
  const auto shared = static_cast<size_t>(shape.shared_bytes());
  const int64_t tiles = (experts + rows.size(0) / shape.rows) * in_wholes(columns, of_tile);
  const int64_t most = tiles * device::moe_most_across(shape) * device::moe_most_down(shape);
  const int64_t blocks = std::min<int64_t>(most, resident_blocks(kernel, static_cast<int>(threads), shared));
  jit::launch(kernel, {static_cast<unsigned>(blocks)}, {threads}, shared, stream, params, jit::LaunchMode::overlapped);
  return out;
}

}  // namespace ark::ops
