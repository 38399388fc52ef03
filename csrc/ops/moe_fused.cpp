// A mixture of experts in one kernel (cuda/fused/moe_layer.cuh): which calls it can take, the tile shape, and the
// launch.
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <limits>
#include <mutex>

#include "jit/kernel.hpp"
#include "ops/moe_shapes.hpp"
#include "ops/moe_staging.hpp"
#include "ops/tensor_map.hpp"
#include "process_group/cuda/cuda_group.hpp"

namespace ark::ops {

namespace {

using device::MatmulShape;

// Whether form "auto" uses the kernel.
constexpr bool kPrefersFused = false;

// Chooses the shape whose tasks take the fewest cycles. Ranks must choose the same, so it depends only on what they
// have in common, which the inner dimension is not: for each 64 of it, a tile of the second product takes a step, and
// the first product as many steps as that has tiles. Tiles of the second product that fill no wave run beside the
// first.
MatmulShape tile_shape(const MoeDispatch& call, int size) {
  const int64_t local = call.experts / size, dim = call.x.size(1);
  const int64_t rows = std::min(call.max_rows, call.max_tokens * call.topk_ids.size(1)) / local;  // on average
  size_t best = 0;
  double least = std::numeric_limits<double>::max();
  for (size_t i = 0; i < std::size(kMatmulShapes); ++i) {
    const MatmulShape& shape = kMatmulShapes[i];
    const int64_t groups = in_wholes(local * half_groups(rows, shape), 2);
    const int64_t seconds = groups * in_wholes(dim, shape.columns);
    const int64_t early = seconds < kMultiprocessors ? 0 : seconds % kMultiprocessors;
    const int64_t waves = std::max<int64_t>(seconds / kMultiprocessors, 1);
    const double firsts = static_cast<double>(groups * dim) / (shape.columns / 2);
    const double cycles = static_cast<double>(kStepCycles[i]) *
                          ((firsts + static_cast<double>(early)) / kMultiprocessors + static_cast<double>(waves));
    if (cycles < least) best = i, least = cycles;
  }
  return kMatmulShapes[best];
}

uint64_t layout_of(const MoeDispatch& call, const MatmulShape& shape) {
  return moe_fingerprint({4, call.x.size(1), static_cast<int64_t>(call.x.scalar_type()), call.topk_ids.size(1),
                          call.experts, call.max_tokens, call.max_rows, shape.rows, shape.columns});
}

// Of launches that are profiled.
std::mutex profile_mutex;
std::optional<at::Tensor> profile_stamps;

}  // namespace

void moe_layer_profile(const std::optional<at::Tensor>& stamps) {
  with_torch_errors([&] {
    if (stamps && (!stamps->is_cuda() || stamps->scalar_type() != at::kLong || !stamps->is_contiguous() ||
                   stamps->dim() != 3 || stamps->size(1) != device::kMoeStamps || stamps->size(2) != 2))
      refuse({-1, "moe_layer_profile"}, ErrorKind::invalid_argument,
             "stamps is " + shape_of(*stamps) + " of " + dtype_name(stamps->scalar_type()) + " on " +
                 stamps->device().str(),
             "Pass zeros of int64 on a GPU, [blocks, " + std::to_string(device::kMoeStamps) + ", 2].");
    const std::lock_guard lock(profile_mutex);
    profile_stamps = stamps;
  });
}

std::string why_not_fused(const MoeDispatch& call) {
  if (!call.x.is_cuda()) return "it needs CUDA tensors";
  if (!moe_product_takes(call.x, *call.w1, *call.w2))
    return "it needs float16 or bfloat16, a Hopper GPU, and dimensions that are multiples of 8";
  if (call.experts > device::kMostLayerExperts)
    return "it knows at most " + std::to_string(device::kMostLayerExperts) + " experts";
  if (call.max_tokens * call.topk_ids.size(1) > device::kMostSlots)
    return "it knows at most " + std::to_string(device::kMostSlots) + " choices of a rank's tokens";
  constexpr int64_t kLeastRows = 64;
  if (call.max_rows / kLeastRows + call.experts > device::kMostGroups)
    return "it knows at most " + std::to_string((device::kMostGroups - call.experts) * kLeastRows) + " rows of a rank";
  return call.max_tokens * call.topk_ids.size(1) * call.max_rows == 0 ? "there is nothing to send" : "";
}

bool prefers_fused(const MoeDispatch&) {
  return kPrefersFused;
}

std::optional<at::Tensor> moe_layer_fused(const MoeDispatch& call, ProcessGroupArk& group) {
  const c10::Device device = call.x.device();
  raise_earlier(group, device, "moe_layer");
  const c10::OptionalDeviceGuard guard(device);
  const at::Tensor x = readable(call.x), w1 = readable(call.w1->contiguous()), w2 = readable(call.w2->contiguous());
  const int64_t dim = x.size(1), ffn = w2.size(2), lines = w1.size(1), local = w1.size(0), k = call.topk_ids.size(1);
  const bool gated = lines != ffn;
  const MatmulShape shape = tile_shape(call, group.getSize());
  const int64_t out_columns = gated ? shape.columns / 2 : shape.columns;
  const at::Tensor out = at::empty({x.size(0), dim}, x.options());
  const at::Tensor hidden = at::empty({call.max_rows, ffn}, x.options());
  const at::Tensor places = at::empty({2, x.size(0), k}, x.options().dtype(at::kInt));
  device::MoeLayerParams params{};
  params.w1 = map_of(w1.const_data_ptr(), dim, local * lines, dim, static_cast<int>(out_columns));
  params.w2 = map_of(w2.const_data_ptr(), ffn, local * dim, ffn, shape.columns);
  params.inner = map_of(hidden.const_data_ptr(), ffn, call.max_rows, ffn, 16);
  params.x = x.const_data_ptr(), params.ids = call.topk_ids.const_data_ptr();
  params.weights = call.weights->const_data_ptr<float>();
  params.places = places.data_ptr<int32_t>();
  params.hidden = static_cast<char*>(hidden.data_ptr()), params.out = out.data_ptr();
  params.tokens = static_cast<uint32_t>(x.size(0)), params.k = static_cast<uint32_t>(k);
  params.experts = static_cast<uint32_t>(call.experts), params.local = static_cast<uint32_t>(local);
  params.max_rows = static_cast<uint32_t>(call.max_rows);
  params.dim = static_cast<uint32_t>(dim), params.ffn = static_cast<uint32_t>(ffn);
  params.lines = static_cast<uint32_t>(lines);
  params.tiles[0] = static_cast<uint32_t>(in_wholes(ffn, out_columns));
  params.tiles[1] = static_cast<uint32_t>(in_wholes(dim, shape.columns));
  params.narrow_ids = call.topk_ids.scalar_type() == at::kInt;
  std::optional<at::Tensor> stamps;
  {
    const std::lock_guard lock(profile_mutex);
    if (profile_stamps && profile_stamps->device() == device) stamps = profile_stamps;
  }
  if (stamps) params.stamps = reinterpret_cast<long long*>(stamps->data_ptr<int64_t>());
  const MoeBlocks blocks(row_bytes_of(x), call.max_rows, call.max_tokens, k);
  params.slots = blocks.rows;
  bool launched = false;
  moe_staged(group, "moe_layer", device, blocks, [&](const MoeStaged& on) {
    if (on.communicator.on_host()) return;  // tiles and their sums need peers' memory
    params.links = on.links(0, layout_of(call, shape));
    params.rows = map_of(on.place.data, dim, call.max_rows, dim, 16);
    const jit::Kernel& kernel = jit::KernelLibrary::of(device.index())
                                    .get(moe_layer_stub(dtype_of(x.scalar_type()), shape, gated,
                                                        activation_of(call.activation), stamps.has_value()),
                                         "moe_layer");
    const auto threads = static_cast<unsigned>(shape.threads());
    const auto shared = static_cast<size_t>(shape.shared_bytes());
    const int64_t grid =
        std::min<int64_t>(resident_blocks(kernel, static_cast<int>(threads), shared), on.communicator.most_blocks());
    jit::launch(kernel, {static_cast<unsigned>(grid)}, {threads}, shared, on.stream, params,
                jit::LaunchMode::cooperative);
    launched = true;
  });
  return launched ? std::optional(out) : std::nullopt;
}

}  // namespace ark::ops
