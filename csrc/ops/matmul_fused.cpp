// Products and collectives in one kernel (cuda/fused/matmul.cuh): which calls it can take, the tile shape, and the
// launch.
//
// Matrices that the copy engine cannot read (rows not aligned to 16 bytes, a stored by columns) are copied once.
// Scratch memory is the group's staging place, which also holds all_reduce's result unless a better place is known
// (tile_result.hpp), and slots after it.
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <limits>

#include "collectives/cuda/fused_stubs.hpp"
#include "jit/kernel.hpp"
#include "ops/matmul.hpp"
#include "ops/tensor_map.hpp"
#include "ops/tile_result.hpp"
#include "process_group/cuda/cuda_group.hpp"

namespace ark::ops {

namespace {

using device::MatmulMode;
using device::MatmulShape;

MatmulMode mode_of(MatmulKind kind) {
  return kind == MatmulKind::all_reduce       ? MatmulMode::all_reduce
         : kind == MatmulKind::reduce_scatter ? MatmulMode::reduce_scatter
                                              : MatmulMode::all_gather;
}

// How the result is split. For sums it depends only on what all ranks share.
struct Cut {
  MatmulShape shape;
  int64_t part_rows, row_tiles, column_tiles, part_tiles, tiles;
};

Cut cut_by(MatmulShape shape, const MatmulCall& call, int64_t ranks) {
  Cut cut{shape, call.rows(), 0, 0, 0, 0};
  if (call.kind == MatmulKind::reduce_scatter) cut.part_rows /= ranks;
  cut.row_tiles = in_wholes(cut.part_rows, shape.rows);
  cut.column_tiles = in_wholes(std::max<int64_t>(call.columns(), 1), shape.columns);
  const int64_t tiles = cut.row_tiles * cut.column_tiles;
  cut.part_tiles = call.kind == MatmulKind::all_reduce ? in_wholes(tiles, ranks) : tiles;
  cut.tiles = call.kind == MatmulKind::all_reduce ? tiles : tiles * ranks;
  return cut;
}

// Chooses the shape whose waves of tiles take the fewest cycles. A tile's stage takes the larger of two times: its
// multiply-adds (2,048 per cycle, nine tenths of which are reachable) or its bytes (the L2 cache delivers about 45 per
// cycle and multiprocessor).
Cut cut_of(const MatmulCall& call, int64_t ranks) {
  constexpr int64_t kMultiprocessors = 132;  // as on all linked Hoppers; any number is correct
  std::optional<Cut> best;
  double least = 0;
  for (const MatmulShape& shape : kMatmulShapes) {
    const Cut cut = cut_by(shape, call, ranks);
    const double multiplies = shape.rows * shape.columns * MatmulShape::kDepth / 2048.0 / 0.9;
    const double cycles =
        std::max(multiplies, shape.stage_bytes() / 45.0) * static_cast<double>(in_wholes(cut.tiles, kMultiprocessors));
    if (best && cycles >= least) continue;
    best = cut, least = cycles;
  }
  return *best;
}

// log2 of the rows in a group of all_gather's: as few as the flags allow.
uint32_t push_shift_of(int64_t rows) {
  uint32_t shift = device::kPushShift;
  while (in_wholes(rows, int64_t{1} << shift) > device::kMostFlags) ++shift;
  return shift;
}

bool is_wide(int64_t stride, const at::Tensor& tensor) {
  return stride % 8 == 0 && reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
}

at::Tensor copied(const at::Tensor& from, int64_t columns) {
  at::Tensor wide = at::empty({from.size(0), in_wholes(std::max<int64_t>(columns, 1), 8) * 8}, from.options());
  at::Tensor to = wide.narrow(1, 0, columns);
  to.copy_(from);
  return to;
}

// Returns `a` with rows that the copy engine can read.
at::Tensor readable_rows(const at::Tensor& a) {
  const bool fits = a.stride(1) == 1 && a.stride(0) >= a.size(1) && is_wide(a.stride(0), a);
  return fits || a.numel() == 0 ? a : copied(a, a.size(1));
}

// Returns `b` with rows or columns that it can read.
at::Tensor readable(const at::Tensor& b, bool& across) {
  const auto fits = [&](int adjacent) {
    return b.stride(adjacent) == 1 && b.stride(1 - adjacent) >= b.size(adjacent) && is_wide(b.stride(1 - adjacent), b);
  };
  across = !fits(0);
  return b.numel() == 0 || !across || fits(1) ? b : copied(b, b.size(1));
}

// Returns the bias, padded to the result's rows, where pairs of elements can be read.
at::Tensor readable_bias(const at::Tensor& bias, int64_t wide) {
  if (bias.is_contiguous() && bias.size(0) == wide && is_wide(0, bias)) return bias;
  at::Tensor padded = at::zeros({wide}, bias.options());
  padded.narrow(0, 0, bias.size(0)).copy_(bias);
  return padded;
}

constexpr uint64_t kSlotsAlign = 1024;

}  // namespace

std::string why_not_fused(const MatmulCall& call, int ranks) {
  if (!call.a.is_cuda()) return "it needs CUDA tensors";
  if (call.a.scalar_type() != at::kHalf && call.a.scalar_type() != at::kBFloat16)
    return "it knows float16 and bfloat16, and a is " + dtype_name(call.a.scalar_type());
  if (device_attribute(call.a.device().index(), CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) != 9)
    return "it needs a Hopper GPU";
  const bool gathers = call.kind == MatmulKind::all_gather;
  const int64_t shared = gathers ? call.depth() : call.columns();
  if (call.rows() == 0 || shared == 0) return "there is nothing to send";
  if (shared % 8 != 0) return std::string(gathers ? "the columns of a" : "the columns of b") + " are no multiple of 8";
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const auto above = [](const char* what, int64_t count, int64_t most) {
    return count <= most ? std::string()
                         : std::string(what) + " " + std::to_string(count) + ", more than " + std::to_string(most);
  };
  for (const std::string& why :
       {above("the rows of a, times the ranks, are", call.rows() * ranks, kMost),
        above("the columns of a are", call.depth(), kMost), above("the columns of b are", call.columns(), kMost - 256)})
    if (!why.empty()) return why;
  const Cut cut = cut_of(call, ranks);
  const std::string of = " of " + std::to_string(cut.shape.rows) + " x " + std::to_string(cut.shape.columns) + " are";
  if (gathers) return above(("the result's tiles" + of).c_str(), cut.tiles, kMost);
  return above(("the tiles of a rank's part of the result" + of).c_str(), cut.part_tiles,
               device::kMostFlags / cut.shape.warps());
}

// Measured on two and four H200 (benchmarks/results/fused_products*.json). The library's product is up to a tenth
// faster. So the kernel wins if there is much to send relative to the computation, and if the product is large enough
// to hide its waits for peers.
bool prefers_fused(const MatmulCall& call, int ranks) {
  const int64_t shared = call.rows() * (call.kind == MatmulKind::all_gather ? call.depth() : call.columns());
  switch (call.kind) {
    case MatmulKind::all_reduce: return shared >= 8 << 20;
    case MatmulKind::reduce_scatter: return shared >= 4 << 20 && (ranks > 2 || shared <= 8 << 20);
    default: return shared >= 1 << 20 && shared <= 4 << 20;
  }
}

std::optional<MatmulResult> matmul_fused(const MatmulCall& call, ProcessGroupArk& group) {
  const char* const name = name_of(call.kind);
  const c10::Device device = call.a.device();
  const int size = group.getSize(), rank = group.getRank();
  if (const auto report = group.tile_failure()) raise_report(*report, rank, name);
  const c10::OptionalDeviceGuard guard(device);
  const CurrentContext context(device.index());  // autograd's threads have none
  const bool gathers = call.kind == MatmulKind::all_gather, reduces = call.kind == MatmulKind::all_reduce;
  const int64_t depth = call.depth(), columns = call.columns();
  const Cut cut = cut_of(call, size);
  const at::ScalarType dtype = call.a.scalar_type();

  bool across = false;
  const at::Tensor a = readable_rows(call.a);
  // A rank without columns multiplies by zeros, because it must still send and receive rows.
  const at::Tensor b = readable(columns != 0 ? call.b : at::zeros({depth, 8}, call.b.options()), across);
  // Rows of a separate result are aligned to 16 bytes too.
  const int64_t wide = in_wholes(std::max<int64_t>(columns, 1), 8) * 8;
  const at::Tensor bias = call.bias ? readable_bias(*call.bias, wide) : at::Tensor();
  const int64_t sizes[] = {gathers ? size * call.rows() : cut.part_rows, wide};
  at::Tensor out = reduces ? allocate_result(group, sizes, dtype, device) : at::empty(sizes, call.a.options());
  at::Tensor gathered = at::empty({0}, call.a.options());
  if (call.gathered) gathered = at::empty({size * call.rows(), depth}, call.a.options());

  const uint64_t result_bytes = reduces ? in_wholes(sizes[0] * wide * 2, kSlotsAlign) * kSlotsAlign : 0;
  const uint64_t scratch_bytes = gathers ? static_cast<uint64_t>(size * call.rows() * depth * 2)
                                         : static_cast<uint64_t>(size * cut.part_tiles) * cut.shape.tile_bytes();
  device::MatmulParams params{};
  params.a = map_of(a.const_data_ptr(), depth, call.rows(), a.stride(0), cut.shape.rows);
  params.b = across ? map_of(b.const_data_ptr(), b.size(1), depth, b.stride(0), MatmulShape::kDepth)
                    : map_of(b.const_data_ptr(), depth, b.size(1), b.stride(1), cut.shape.columns);
  params.rows = static_cast<const char*>(a.const_data_ptr());
  params.bias = call.bias ? static_cast<const char*>(bias.const_data_ptr()) : nullptr;
  params.row_bytes = static_cast<uint64_t>(a.stride(0)) * 2;
  params.out_bytes = static_cast<uint64_t>(wide) * 2;
  params.part_rows = static_cast<uint32_t>(cut.part_rows);
  params.columns = static_cast<uint32_t>(wide), params.depth = static_cast<uint32_t>(depth);
  params.row_tiles = static_cast<uint32_t>(cut.row_tiles);
  params.column_tiles = static_cast<uint32_t>(cut.column_tiles);
  params.part_tiles = static_cast<uint32_t>(cut.part_tiles), params.tiles = static_cast<uint32_t>(cut.tiles);
  if (gathers) params.push_shift = push_shift_of(cut.part_rows);

  bool launched = false;
  const auto launch = [&](CudaCommunicator& communicator, const Operation& operation) {
    communicator.check(operation.context);
    const auto stream = static_cast<CUstream>(operation.stream);
    const Capture capture = capture_of(stream);
    std::string why;
    TileMemory* const tiles = communicator.tiles(capture.id != 0, why);
    if (tiles == nullptr || !tiles->reserve(communicator, result_bytes + scratch_bytes, capture.id != 0, why)) return;
    const TileMemory::Place staging = tiles->staging();
    if (capture.id != 0) keep_with_graph(capture, staging.keep);
    for (int r = 0; r < size; ++r) params.scratch[r] = staging.peers[r] + result_bytes;
    TileResult result{out, staging, false};
    if (reduces) result = place_result(out, sizes, dtype, device, communicator, *tiles, capture);
    out = result.out;
    params.out = static_cast<char*>(out.data_ptr());
    params.links = tiles->links(result.place);
    params.links.layout = fingerprint(call);
    params.links.limit_ns = nanoseconds_of(operation.context);
    if (gathers) params.gathered = map_of(params.scratch[rank], depth, size * call.rows(), depth, cut.shape.rows);
    const jit::Kernel& kernel = jit::KernelLibrary::of(device.index())
                                    .get(matmul_stub(dtype_of(dtype), cut.shape, across, mode_of(call.kind)), "matmul");
    const unsigned threads = static_cast<unsigned>(cut.shape.threads());
    const size_t shared = static_cast<size_t>(cut.shape.shared_bytes());
    // Two warps of a block send rows, several rows each.
    const int64_t wanted =
        gathers ? std::max(cut.tiles, in_wholes(cut.part_rows, int64_t{2} << params.push_shift)) : cut.tiles;
    const int64_t blocks = std::min<int64_t>(
        {wanted, resident_blocks(kernel, static_cast<int>(threads), shared), communicator.most_blocks()});
    jit::launch(kernel, {static_cast<unsigned>(blocks)}, {threads}, shared, stream, params,
                jit::LaunchMode::cooperative);
    copy_result(result, stream);
    if (call.gathered) {
      const size_t part = static_cast<size_t>(call.rows() * depth * 2);
      for (int r = 0; r < size; ++r) {
        if (r == rank) continue;
        ark::check(driver().memcpy_async(reinterpret_cast<CUdeviceptr>(gathered.data_ptr()) + r * part,
                                         reinterpret_cast<CUdeviceptr>(params.scratch[rank]) + r * part, part, stream),
                   "cuMemcpyAsync");
      }
    }
    launched = true;
  };
  if (!group.launch_region(name, device, launch) || !launched) return std::nullopt;
  if (call.gathered) gathered.narrow(0, rank * call.rows(), call.rows()).copy_(a);
  return MatmulResult{wide == columns ? out : out.narrow(1, 0, columns).contiguous(), gathered};
}

}  // namespace ark::ops
