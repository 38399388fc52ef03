// embedding_bag_all_to_all on CUDA tensors: one kernel pools bags and stores them on the sample's rank
// (cuda/fused/embedding_bag.cuh).
//
// tile_result.hpp tells where the result is. If ark does not carry the group's CUDA tensors, or a device has no room,
// the same kernel pools on this GPU and the group's all_to_all delivers the bags.
#include <ATen/EmptyTensor.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "collectives/cuda/fused_stubs.hpp"
#include "cuda/fused/embedding_gradient.cuh"
#include "jit/kernel.hpp"
#include "ops/embedding_bag.hpp"
#include "ops/meeting.hpp"
#include "ops/tile_result.hpp"
#include "process_group/cuda/cuda_group.hpp"

namespace ark::ops {

namespace {

constexpr const char* kName = "embedding_bag_all_to_all";
constexpr const char* kBackward = "embedding_bag_all_to_all_backward";

uint32_t grid_of(const jit::Kernel& kernel, uint64_t groups, int lanes, uint32_t most) {
  const uint64_t each = device::kBagThreads / lanes;
  const uint64_t resident = static_cast<uint64_t>(resident_blocks(kernel, device::kBagThreads, 0));
  return static_cast<uint32_t>(
      std::max<uint64_t>(1, std::min<uint64_t>({(groups + each - 1) / each, resident, uint64_t{most}})));
}

bool narrow(const BagArguments& bags) {
  return !bags.indices.empty() && bags.indices[0].scalar_type() == at::kInt;
}

// The bags of this rank's tables [from, to).
device::BagParams params_of(const BagArguments& bags, size_t from, size_t to) {
  device::BagParams params{};
  params.tables = static_cast<uint32_t>(to - from);
  params.mean = bags.mode == "mean", params.last_offset = bags.last_offset;
  for (size_t t = from; t < to; ++t) {
    device::BagTable& table = params.table[t - from];
    table.rows = bags.tables[t].const_data_ptr();
    table.indices = bags.indices[t].const_data_ptr();
    table.offsets = bags.offsets[t].const_data_ptr();
    table.weights = bags.weights.empty() ? nullptr : bags.weights[t].const_data_ptr();
    table.entries = static_cast<uint32_t>(bags.indices[t].numel());
    table.count = static_cast<uint32_t>(bags.tables[t].size(0));
    table.number = static_cast<int>(t);
  }
  return params;
}

// Launches for all tables of this rank. All ranks make equally many launches, so some of them may have no tables.
template <class Links>
void pool_tables(const BagArguments& bags, const Layout& layout, int device, int ranks, int64_t batch, int64_t all,
                 int64_t first, int64_t most_tables, uint32_t most_blocks, CUstream stream, Links&& links) {
  const uint64_t row_bytes = static_cast<uint64_t>(layout.dim) * c10::elementSize(layout.dtype);
  const RowShape shape = RowShape::of(row_bytes, c10::elementSize(layout.dtype));
  const jit::Kernel& kernel = jit::KernelLibrary::of(device).get(
      embedding_bag_stub(ark::dtype_of(layout.dtype), narrow(bags), shape.wide, shape.lanes, !bags.weights.empty()),
      "embedding_bag");
  if (static_cast<uint64_t>(ranks * batch) * shape.columns > 0x7fffffff)
    throw Error(ErrorKind::invalid_argument,
                std::to_string(ranks * batch) + " bags of " + std::to_string(layout.dim) + " columns are too many",
                ErrorContext{-1, -1, kName, 0, "Split the batch, or the columns."});
  for (size_t from = 0; from == 0 || from < static_cast<size_t>(most_tables); from += device::kMostTables) {
    const size_t begin = std::min(from, bags.tables.size());
    const size_t end = std::min(bags.tables.size(), from + device::kMostTables);
    device::BagParams params = params_of(bags, begin, std::max(begin, end));
    params.links = links();
    params.ranks = static_cast<uint32_t>(ranks), params.batch = static_cast<uint32_t>(batch);
    params.units = shape.units, params.columns = shape.columns, params.row_bytes = static_cast<uint32_t>(row_bytes);
    params.out_stride = static_cast<uint64_t>(all) * row_bytes;
    params.out_first = static_cast<uint64_t>(first + static_cast<int64_t>(begin)) * row_bytes;
    const uint64_t groups = uint64_t{params.tables} * params.ranks * params.batch * params.columns;
    const CurrentContext context(device);
    jit::launch(kernel, {grid_of(kernel, groups, shape.lanes, most_blocks)}, {device::kBagThreads}, 0, stream, params,
                jit::LaunchMode::overlapped);
  }
}

int64_t most_of(const std::vector<int64_t>& counts) {
  return *std::max_element(counts.begin(), counts.end());
}

// Bytes of the largest result that ranks store for each other, in either direction.
uint64_t place_bytes(const Layout& layout) {
  const int64_t rows =
      layout.batch * std::max(layout.all(), most_of(layout.tables) * static_cast<int64_t>(layout.tables.size()));
  return static_cast<uint64_t>(rows * layout.dim) * c10::elementSize(layout.dtype);
}

// The group's tile memory, large enough; null on all ranks if there is no room.
TileMemory* tiles_of(CudaCommunicator& communicator, const Layout& layout, bool capturing, std::string& why) {
  TileMemory* const tiles = communicator.tiles(capturing, why);
  if (tiles == nullptr || !tiles->reserve(communicator, place_bytes(layout), capturing, why)) return nullptr;
  return tiles;
}

// The bags of this rank's tables for all ranks' samples: [ranks * batch, tables, dim].
at::Tensor pool_here(const BagArguments& bags, const Layout& layout, c10::Device device) {
  const int64_t tables = static_cast<int64_t>(bags.tables.size());
  const int64_t batch = layout.batch * static_cast<int64_t>(layout.tables.size());
  at::Tensor out = at::empty({batch, tables, layout.dim}, at::TensorOptions(layout.dtype).device(device));
  if (tables == 0) return out;
  const CUstream stream = static_cast<CUstream>(native_stream(current_stream(device)));
  pool_tables(bags, layout, device.index(), 1, batch, tables, 0, tables, ~uint32_t{0}, stream,
              [&] { return alone(device.index(), out.data_ptr()); });
  return out;
}

std::vector<int64_t> times(const std::vector<int64_t>& counts, int64_t factor) {
  std::vector<int64_t> products;
  for (const int64_t count : counts) products.push_back(count * factor);
  return products;
}

at::Tensor forward_unfused(const BagArguments& bags, const Layout& layout, ProcessGroupArk& group, c10::Device device) {
  const int64_t mine = static_cast<int64_t>(bags.tables.size()), each = layout.batch * layout.dim;
  at::Tensor pooled = pool_here(bags, layout, device).flatten();
  at::Tensor received = at::empty({layout.all() * each}, pooled.options());
  all_to_all_single(group, received, pooled, times(layout.tables, each),
                    std::vector<int64_t>(layout.tables.size(), mine * each));
  std::vector<at::Tensor> parts;
  int64_t at = 0;
  for (const int64_t count : layout.tables) {
    parts.push_back(received.narrow(0, at, count * each).view({layout.batch, count, layout.dim}));
    at += count * each;
  }
  return at::cat(parts, 1);
}

at::Tensor gather_unfused(const BagArguments& bags, const Layout& layout, ProcessGroupArk& group,
                          const at::Tensor& gradient) {
  const int64_t mine = static_cast<int64_t>(bags.tables.size()), size = group.getSize();
  const int64_t each = layout.batch * layout.dim;
  std::vector<at::Tensor> parts;
  for (int r = 0; r < size; ++r)
    parts.push_back(gradient.narrow(1, layout.first(r), layout.tables[r]).transpose(0, 1).flatten());
  at::Tensor sent = at::cat(parts), received = at::empty({size * mine * each}, gradient.options());
  all_to_all_single(group, received, sent, std::vector<int64_t>(layout.tables.size(), mine * each),
                    times(layout.tables, each));
  return received.view({size, mine, layout.batch, layout.dim})
      .transpose(0, 1)
      .reshape({mine, size * layout.batch, layout.dim});
}

}  // namespace

at::Tensor forward_cuda(const BagArguments& bags, const Layout& layout, ProcessGroupArk& group) {
  const c10::Device device = device_of(bags, layout, group);
  raise_earlier(group, device, kName);
  const c10::OptionalDeviceGuard guard(device);
  const int size = group.getSize(), rank = group.getRank();
  const int64_t sizes[] = {layout.batch, layout.all(), layout.dim};
  if (size == 1) {
    group.check_region(kName, device);  // also creates the group's side on the device and the compiler's settings
    return pool_here(bags, layout, device);
  }
  const at::Tensor allocated = allocate_result(group, sizes, layout.dtype, device);
  at::Tensor out;
  bool launched = false;
  const auto launch = [&](CudaCommunicator& communicator, const Operation& operation) {
    communicator.check(operation.context);
    const CurrentContext context(device.index());  // autograd's threads have none
    const auto stream = static_cast<CUstream>(operation.stream);
    const Capture capture = capture_of(stream);
    std::string why;
    TileMemory* const tiles = tiles_of(communicator, layout, capture.id != 0, why);
    if (tiles == nullptr) return;
    const TileResult result = place_result(allocated, sizes, layout.dtype, device, communicator, *tiles, capture);
    pool_tables(bags, layout, device.index(), size, layout.batch, layout.all(), layout.first(rank),
                most_of(layout.tables), communicator.most_blocks(), stream, [&] {
                  device::TileLinks links = tiles->links(result.place);
                  links.layout = layout.fingerprint();
                  links.limit_ns = nanoseconds_of(operation.context);
                  return links;
                });
    copy_result(result, stream);
    out = result.out;
    launched = true;
  };
  if (group.launch_region(kName, device, launch) && launched) return out;
  return forward_unfused(bags, layout, group, device);
}

at::Tensor gather_gradient_cuda(const BagArguments& bags, const Layout& layout, ProcessGroupArk& group,
                                const at::Tensor& gradient) {
  const c10::Device device = gradient.device();
  raise_earlier(group, device, kName);
  const c10::OptionalDeviceGuard guard(device);
  const int size = group.getSize();
  const int64_t mine = static_cast<int64_t>(bags.tables.size());
  if (size == 1) return gradient.transpose(0, 1).contiguous();
  const uint64_t row_bytes = static_cast<uint64_t>(layout.dim) * gradient.element_size();
  const RowShape shape = RowShape::of(row_bytes, gradient.element_size());
  at::Tensor of_bags = at::empty({mine, size * layout.batch, layout.dim}, gradient.options());
  bool launched = false;
  const auto launch = [&](CudaCommunicator& communicator, const Operation& operation) {
    communicator.check(operation.context);
    const CurrentContext context(device.index());  // autograd's threads have none
    const auto stream = static_cast<CUstream>(operation.stream);
    const Capture capture = capture_of(stream);
    std::string why;
    TileMemory* const tiles = tiles_of(communicator, layout, capture.id != 0, why);
    if (tiles == nullptr) return;
    const TileMemory::Place place = tiles->staging();
    if (capture.id != 0) keep_with_graph(capture, place.keep);
    device::GradientParams params{};
    params.links = tiles->links(place);
    params.links.layout = layout.fingerprint() ^ 2;
    params.links.limit_ns = nanoseconds_of(operation.context);
    params.gradient = gradient.const_data_ptr();
    for (int r = 0; r <= size; ++r) params.first[r] = static_cast<uint32_t>(layout.first(r));
    params.ranks = static_cast<uint32_t>(size), params.batch = static_cast<uint32_t>(layout.batch);
    params.units = shape.units, params.columns = shape.columns, params.row_bytes = static_cast<uint32_t>(row_bytes);
    const jit::Kernel& kernel = jit::KernelLibrary::of(device.index())
                                    .get(embedding_gradient_stub(ark::dtype_of(layout.dtype), narrow(bags), shape.wide,
                                                                 shape.lanes, bags.mode == "mean"),
                                         "send_gradient");
    const uint64_t groups = static_cast<uint64_t>(layout.batch * layout.all()) * shape.columns;
    jit::launch(kernel, {grid_of(kernel, groups, shape.lanes, communicator.most_blocks())}, {device::kBagThreads}, 0,
                stream, params, jit::LaunchMode::overlapped);
    // The next operation reuses the staging place, so copy now, on this operation's stream.
    if (mine > 0)
      ark::check(driver().memcpy_async(reinterpret_cast<CUdeviceptr>(of_bags.data_ptr()),
                                       reinterpret_cast<CUdeviceptr>(place.data), of_bags.nbytes(), stream),
                 "cuMemcpyAsync");
    launched = true;
  };
  if (group.launch_region(kBackward, device, launch) && launched) return of_bags;
  return gather_unfused(bags, layout, group, gradient);
}

}  // namespace ark::ops
