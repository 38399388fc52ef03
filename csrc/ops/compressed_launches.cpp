// Implements compressed_launches.hpp.
#include "ops/compressed_launches.hpp"

#include <algorithm>
#include <numeric>

#include "collectives/cuda/stubs.hpp"
#include "process_group/cuda/cuda_group.hpp"

namespace ark::ops {

namespace {

constexpr uint64_t kFewBlocks = 1024, kLongestRun = 4;

bool is_wide(const quantize::Piece& piece) {
  return piece.bucket > device::kWarpBucket;
}

}  // namespace

void CodeLaunches::add(const compressed::Part& part, uint64_t begin, int rank) {
  for (quantize::Piece piece : part.pieces) {
    piece.at += begin;
    device::CodeParams& params = params_of(piece);
    params.piece[params.pieces++] = {piece, params.buckets, rank};
    params.buckets += static_cast<uint32_t>(quantize::buckets_of(piece));
  }
}

void CodeLaunches::launch() {
  // Peers wait for this rank even if it has nothing for them.
  if (launches_.empty() && params_.links.ranks > 1) launches_.push_back(params_);
  const CurrentContext context(device_.index());
  std::vector<const jit::Kernel*> kernels;
  std::vector<unsigned> blocks;
  for (device::CodeParams& params : launches_) {
    kernels.push_back(&kernel_of(params));
    blocks.push_back(cut(params, *kernels.back()));
  }
  for (size_t i = 0; i < launches_.size(); ++i) {
    launches_[i].blocks = std::accumulate(blocks.begin(), blocks.end(), 0u);
    jit::launch(*kernels[i], {blocks[i]}, {device::kCodeThreads}, 0, stream_, launches_[i],
                jit::LaunchMode::overlapped);
  }
}

// A kernel handles one code width and one kind of team.
device::CodeParams& CodeLaunches::params_of(const quantize::Piece& piece) {
  for (device::CodeParams& params : launches_) {
    const quantize::Piece& known = params.piece[0].piece;
    if (known.bits == piece.bits && is_wide(known) == is_wide(piece) && params.pieces < device::kMostPieces)
      return params;
  }
  launches_.push_back(params_);
  launches_.back().piece[0].piece = piece;
  return launches_.back();
}

const jit::Kernel& CodeLaunches::kernel_of(const device::CodeParams& params) const {
  const quantize::Piece& piece = params.piece[0].piece;
  return jit::KernelLibrary::of(device_.index())
      .get(compressed_stub({coding_.dtype, coding_.rule.format, piece.bits, is_wide(piece)}, entry_), entry_);
}

// Distributes buckets over blocks. Runs are long only if all multiprocessors have work anyway. Blocks that wait for
// peers on a shared GPU are limited, so that all fit at once.
unsigned CodeLaunches::cut(device::CodeParams& params, const jit::Kernel& kernel) const {
  const uint64_t each = is_wide(params.piece[0].piece) ? 1 : device::kCodeThreads / 32;
  uint64_t run = std::clamp<uint64_t>(params.buckets / (each * kFewBlocks), 1, kLongestRun);
  if (params.links.ranks > 1) {
    const auto resident = static_cast<uint64_t>(resident_blocks(kernel, device::kCodeThreads, 0));
    const uint64_t most = each * std::min(resident, most_blocks_);
    run = std::max<uint64_t>(1, (params.buckets + most - 1) / most);
  }
  params.run = static_cast<uint32_t>(run);
  return static_cast<unsigned>(std::max<uint64_t>(1, (params.buckets + each * run - 1) / (each * run)));
}

}  // namespace ark::ops
