// Mixtures of experts on CUDA tensors: kernels store rows in their rank's memory (cuda/fused/moe_rows.cuh), and no host
// waits.
//
// All ranks' rows arrive in the group's staging place (collectives/cuda/tile_memory.hpp): first the block of the
// experts' rows, then the slots of returning rows. Another kernel copies the block to the user's tensor and fills the
// rest with zeros; moe_layer reads it in place. If ark does not carry the group's CUDA tensors, or a device has no
// room, the group's all_to_all moves the rows (moe_unfused.cpp).
#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "collectives/cuda/fused_stubs.hpp"
#include "cuda/fused/moe_rows.cuh"
#include "jit/kernel.hpp"
#include "ops/moe_staging.hpp"
#include "process_group/cuda/cuda_group.hpp"

namespace ark::ops {

namespace {

constexpr uint64_t kMostSending = 264;  // in blocks; two per multiprocessor keep every link busy

device::MoeParams params_of(const at::Tensor& rows, const at::Tensor& places, const at::Tensor& rank_counts,
                            const device::TileLinks& links, int64_t max_rows) {
  const RowShape shape = RowShape::of(row_bytes_of(rows), rows.element_size());
  device::MoeParams params{};
  params.links = links;
  params.from = rows.const_data_ptr();
  params.places = places.data_ptr<int32_t>();
  params.rank_counts = rank_counts.data_ptr<int32_t>();
  params.tokens = static_cast<uint32_t>(places.size(1)), params.k = static_cast<uint32_t>(places.size(2));
  params.choices = params.tokens * params.k;
  params.experts = static_cast<uint32_t>(rank_counts.size(1));
  params.local = static_cast<uint32_t>(rank_counts.size(1) / rank_counts.size(0));
  params.max_rows = static_cast<uint32_t>(max_rows);
  params.units = shape.units, params.row_bytes = static_cast<uint32_t>(row_bytes_of(rows));
  return params;
}

const jit::Kernel& rows_kernel(const at::Tensor& rows, const char* entry) {
  const bool wide = RowShape::of(row_bytes_of(rows), rows.element_size()).wide;
  return jit::KernelLibrary::of(rows.device().index())
      .get(moe_rows_stub(ark::dtype_of(rows.scalar_type()), wide), entry);
}

unsigned grid_of(const jit::Kernel& kernel, uint64_t warps, uint32_t most) {
  const auto resident = static_cast<uint64_t>(resident_blocks(kernel, device::kMoeThreads, 0));
  constexpr uint64_t kEach = device::kMoeThreads / 32;
  return static_cast<unsigned>(
      std::max<uint64_t>(1, std::min({(warps + kEach - 1) / kEach, resident, uint64_t{most}, kMostSending})));
}

uint64_t pieces_of(uint32_t units) {
  return (units + 32 * device::kMoeAhead - 1) / (32 * device::kMoeAhead);
}

// Empty tensors for the outputs of a dispatch.
MoeDispatched told_of(const MoeDispatch& call, int size) {
  const auto integers = call.x.options().dtype(at::kInt);
  return {at::Tensor(), at::empty({call.experts / size}, integers.dtype(at::kLong)),
          at::empty({2, call.topk_ids.size(0), call.topk_ids.size(1)}, integers),
          at::empty({size, call.experts}, integers)};
}

void launch_dispatch(const MoeDispatch& call, const MoeDispatched& told, const device::TileLinks& links, uint32_t most,
                     CUstream stream) {
  const auto& [rows, counts, places, rank_counts] = told;
  device::MoeParams params = params_of(call.x, places, rank_counts, links, call.max_rows);
  params.ids = call.topk_ids.const_data_ptr();
  params.counts = reinterpret_cast<long long*>(counts.data_ptr<int64_t>());
  const RowShape shape = RowShape::of(row_bytes_of(call.x), call.x.element_size());
  const jit::Kernel& kernel = jit::KernelLibrary::of(call.x.device().index())
                                  .get(moe_dispatch_stub(ark::dtype_of(call.x.scalar_type()),
                                                         call.topk_ids.scalar_type() == at::kInt, shape.wide),
                                       "moe_dispatch");
  jit::launch(kernel, {grid_of(kernel, params.choices * pieces_of(params.units), most)}, {device::kMoeThreads}, 0,
              stream, params, jit::LaunchMode::overlapped);
}

void launch_scatter(const MoeRows& call, const device::TileLinks& links, uint32_t most, CUstream stream) {
  device::MoeParams params = params_of(call.rows, call.places, call.rank_counts, links, call.max_rows);
  params.weights = call.weights ? call.weights->const_data_ptr<float>() : nullptr;
  params.each = call.rows.dim() == 3;
  const jit::Kernel& kernel = rows_kernel(call.rows, "moe_scatter");
  jit::launch(kernel, {grid_of(kernel, params.choices * pieces_of(params.units), most)}, {device::kMoeThreads}, 0,
              stream, params, jit::LaunchMode::overlapped);
}

// Copies the block of rows to `out`, unless it is there already.
void launch_settle(const at::Tensor& out, const at::Tensor& rank_counts, int rank, const void* from, CUstream stream) {
  const RowShape shape = RowShape::of(row_bytes_of(out), out.element_size());
  device::SettleParams params{};
  params.from = from, params.out = out.data_ptr();
  params.rank_counts = rank_counts.const_data_ptr<int32_t>();
  params.ranks = static_cast<uint32_t>(rank_counts.size(0)), params.rank = static_cast<uint32_t>(rank);
  params.experts = static_cast<uint32_t>(rank_counts.size(1)), params.local = params.experts / params.ranks;
  params.row_units = shape.units, params.max_units = static_cast<uint64_t>(out.size(0)) * shape.units;
  const jit::Kernel& kernel = rows_kernel(out, "moe_settle");
  jit::launch(kernel, {grid_of(kernel, params.max_units / 32, ~uint32_t{0})}, {device::kMoeThreads}, 0, stream, params,
              jit::LaunchMode::overlapped);
}

void launch_gather(const MoeRows& call, const at::Tensor& out, const device::TileLinks& links, const void* slots,
                   uint32_t most, CUstream stream) {
  device::MoeParams params = params_of(call.rows, call.places, call.rank_counts, links, call.rows.size(0));
  params.weights = call.weights ? call.weights->const_data_ptr<float>() : nullptr;
  params.each = !call.summed;
  params.slots = static_cast<const char*>(slots);
  params.out = out.data_ptr();
  const jit::Kernel& kernel = rows_kernel(call.rows, "moe_gather");
  const uint64_t sent = static_cast<uint64_t>(call.rows.size(0)) * pieces_of(params.units);
  const uint64_t summed =
      static_cast<uint64_t>(call.summed ? call.tokens() : params.choices) * ((params.units + 31) / 32);
  jit::launch(kernel, {grid_of(kernel, std::max(sent, summed), most)}, {device::kMoeThreads}, 0, stream, params,
              links.ranks == 1 ? jit::LaunchMode::overlapped : jit::LaunchMode::cooperative);
}

at::Tensor empty_of(const MoeRows& call) {
  std::vector<int64_t> sizes{call.tokens(), call.dim()};
  if (!call.summed) sizes.insert(sizes.begin() + 1, call.k());
  return at::empty(sizes, call.rows.options());
}

CUstream stream_of(c10::Device device) {
  return static_cast<CUstream>(native_stream(current_stream(device)));
}

uint64_t layout_of(const MoeDispatch& call) {
  return moe_fingerprint({1, call.x.size(1), static_cast<int64_t>(call.x.scalar_type()), call.topk_ids.size(1),
                          call.experts, call.max_tokens, call.max_rows});
}

uint64_t layout_of(const MoeRows& call, bool gathers) {
  return moe_fingerprint({gathers ? 3 : 2, call.dim(), static_cast<int64_t>(call.rows.scalar_type()), call.k(),
                          call.experts(), call.max_tokens, gathers ? call.rows.size(0) : call.max_rows});
}

}  // namespace

MoeDispatched moe_dispatch_cuda(const MoeDispatch& given, ProcessGroupArk& group) {
  const c10::Device device = given.x.device();
  raise_earlier(group, device, "moe_dispatch");
  const c10::OptionalDeviceGuard guard(device);
  MoeDispatch call = given;
  call.x = readable(call.x);
  const int size = group.getSize(), rank = group.getRank();
  MoeDispatched result = told_of(call, size);
  auto& [rows, counts, places, rank_counts] = result;
  rows = at::empty({call.max_rows, call.x.size(1)}, call.x.options());
  if (size == 1) {
    group.check_region("moe_dispatch", device);
    const CurrentContext context(device.index());
    launch_dispatch(call, result, alone(device.index(), rows.data_ptr()), ~uint32_t{0}, stream_of(device));
    launch_settle(rows, rank_counts, rank, nullptr, stream_of(device));
    return result;
  }
  const MoeBlocks blocks(row_bytes_of(call.x), call.max_rows, call.max_tokens, call.topk_ids.size(1));
  const bool launched = moe_staged(group, "moe_dispatch", device, blocks, [&](const MoeStaged& on) {
    launch_dispatch(call, result, on.links(0, layout_of(call)), on.communicator.most_blocks(), on.stream);
    launch_settle(rows, rank_counts, rank, on.place.data, on.stream);
  });
  return launched ? result : moe_dispatch_unfused(call, group);
}

at::Tensor moe_scatter_cuda(const MoeRows& given, ProcessGroupArk& group) {
  const c10::Device device = given.rows.device();
  raise_earlier(group, device, "moe_scatter");
  const c10::OptionalDeviceGuard guard(device);
  MoeRows call = given;
  call.rows = readable(call.rows);
  const int rank = group.getRank();
  at::Tensor out = at::empty({call.max_rows, call.dim()}, call.rows.options());
  if (group.getSize() == 1) {
    group.check_region("moe_scatter", device);
    const CurrentContext context(device.index());
    launch_scatter(call, alone(device.index(), out.data_ptr()), ~uint32_t{0}, stream_of(device));
    launch_settle(out, call.rank_counts, rank, nullptr, stream_of(device));
    return out;
  }
  const MoeBlocks blocks(row_bytes_of(call.rows), call.max_rows, call.max_tokens, call.k());
  const bool launched = moe_staged(group, "moe_scatter", device, blocks, [&](const MoeStaged& on) {
    launch_scatter(call, on.links(0, layout_of(call, false)), on.communicator.most_blocks(), on.stream);
    launch_settle(out, call.rank_counts, rank, on.place.data, on.stream);
  });
  return launched ? out : moe_scatter_unfused(call, group);
}

at::Tensor moe_gather_cuda(const MoeRows& given, ProcessGroupArk& group) {
  const c10::Device device = given.rows.device();
  raise_earlier(group, device, "moe_combine");
  const c10::OptionalDeviceGuard guard(device);
  MoeRows call = given;
  call.rows = readable(call.rows);
  const at::Tensor out = empty_of(call);
  if (group.getSize() == 1) {
    group.check_region("moe_combine", device);
    const CurrentContext context(device.index());
    launch_gather(call, out, alone(device.index(), nullptr), nullptr, ~uint32_t{0}, stream_of(device));
    return out;
  }
  const MoeBlocks blocks(row_bytes_of(call.rows), call.rows.size(0), call.max_tokens, call.k());
  const bool launched = moe_staged(group, "moe_combine", device, blocks, [&](const MoeStaged& on) {
    launch_gather(call, out, on.links(blocks.rows, layout_of(call, true)), on.place.data + blocks.rows,
                  on.communicator.most_blocks(), on.stream);
  });
  return launched ? out : moe_gather_unfused(call, group);
}

std::optional<at::Tensor> moe_layer_cuda(const MoeDispatch& given, ProcessGroupArk& group) {
  const c10::Device device = given.x.device();
  raise_earlier(group, device, "moe_layer");
  const c10::OptionalDeviceGuard guard(device);
  MoeDispatch call = given;
  call.x = readable(call.x);
  const int64_t sizes[] = {call.max_rows, call.x.size(1)};
  const MoeBlocks blocks(row_bytes_of(call.x), call.max_rows, call.max_tokens, call.topk_ids.size(1));
  std::optional<at::Tensor> out;
  // Reads the block of rows in place.
  const auto finish = [&](const MoeDispatched& told, void* rows, auto&& links, const void* slots, uint32_t most,
                          CUstream stream) {
    const auto& [none, counts, places, rank_counts] = told;
    const at::Tensor block = at::from_blob(
        rows, sizes, [](void*) {}, call.x.options(), device);
    const at::Tensor y = moe_experts(block, counts, *call.w1, *call.w2, call.activation);
    const MoeRows back{y, places, rank_counts, call.weights, call.group, call.max_tokens};
    out = empty_of(back);
    launch_gather(back, *out, links(layout_of(back, true)), slots, most, stream);
  };
  const MoeDispatched told = told_of(call, group.getSize());
  if (group.getSize() == 1) {
    group.check_region("moe_layer", device);
    const CurrentContext context(device.index());
    const CUstream stream = stream_of(device);
    const at::Tensor rows = at::empty(sizes, call.x.options());
    launch_dispatch(call, told, alone(device.index(), rows.data_ptr()), ~uint32_t{0}, stream);
    finish(
        told, rows.data_ptr(), [&](uint64_t) { return alone(device.index(), nullptr); }, nullptr, ~uint32_t{0}, stream);
    return out;
  }
  moe_staged(group, "moe_layer", device, blocks, [&](const MoeStaged& on) {
    const uint32_t most = on.communicator.most_blocks();
    launch_dispatch(call, told, on.links(0, layout_of(call)), most, on.stream);
    finish(
        told, on.place.data, [&](uint64_t layout) { return on.links(blocks.rows, layout); },
        on.place.data + blocks.rows, most, on.stream);
  });
  return out;
}

}  // namespace ark::ops
