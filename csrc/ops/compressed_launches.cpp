// Groups pieces into launches by kernel, and distributes buckets over blocks. Blocks that wait for peers must all be
// resident at once, also on a shared GPU, so their number is limited and each may get more buckets.
#include "ops/compressed_launches.hpp"

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>
#include <string_view>
#include <tuple>
#include <type_traits>

#include "collectives/cuda/stubs.hpp"
#include "process_group/cuda/cuda_group.hpp"

namespace ark::ops {

namespace {

constexpr uint64_t kFewBlocks = 1024, kLongestRun = 4;

bool is_wide(const quantize::Piece& piece) {
  return piece.bucket > device::kWarpBucket;
}

}  // namespace

struct CodeLaunches::CodeKernel {
  const jit::Kernel* kernel;
  uint64_t resident;  // blocks on the device at once
};

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
  std::vector<const CodeKernel*> kernels;
  std::vector<unsigned> blocks;
  for (device::CodeParams& params : launches_) {
    kernels.push_back(&kernel_of(params));
    blocks.push_back(cut(params, kernels.back()->resident));
  }
  for (size_t i = 0; i < launches_.size(); ++i) {
    launches_[i].blocks = std::accumulate(blocks.begin(), blocks.end(), 0u);
    jit::launch(*kernels[i]->kernel, {blocks[i]}, {device::kCodeThreads}, 0, stream_, launches_[i],
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

// Looking one up builds its source and asks the driver, which costs as much host time as a launch. So each kind is
// looked up once; the library keeps kernels as long as the process lives.
const CodeLaunches::CodeKernel& CodeLaunches::kernel_of(const device::CodeParams& params) const {
  const quantize::Piece& piece = params.piece[0].piece;
  const CompressedKind kind{coding_.dtype, coding_.rule.format, piece.bits, is_wide(piece)};
  const std::tuple key{device_.index(), kind.dtype, kind.format, kind.bits, kind.wide, std::string_view(entry_)};
  static std::mutex mutex;
  static auto* const known = new std::map<std::remove_const_t<decltype(key)>, CodeKernel>;
  {
    const std::lock_guard lock(mutex);
    if (const auto found = known->find(key); found != known->end()) return found->second;
  }
  // Without the mutex, since it may have to be compiled.
  const jit::Kernel& kernel = jit::KernelLibrary::of(device_.index()).get(compressed_stub(kind, entry_), entry_);
  const CodeKernel made{&kernel, static_cast<uint64_t>(resident_blocks(kernel, device::kCodeThreads, 0))};
  const std::lock_guard lock(mutex);
  return known->emplace(key, made).first->second;
}

// Distributes buckets over blocks. Runs are long only if all multiprocessors have work anyway. Blocks that wait for
// peers on a shared GPU are limited, so that all fit at once.
unsigned CodeLaunches::cut(device::CodeParams& params, uint64_t resident) const {
  const uint64_t each = is_wide(params.piece[0].piece) ? 1 : device::kCodeThreads / 32;
  uint64_t run = std::clamp<uint64_t>(params.buckets / (each * kFewBlocks), 1, kLongestRun);
  if (params.links.ranks > 1) {
    const uint64_t most = each * std::min(resident, most_blocks_);
    run = std::max<uint64_t>(1, (params.buckets + most - 1) / most);
  }
  params.run = static_cast<uint32_t>(run);
  return static_cast<unsigned>(std::max<uint64_t>(1, (params.buckets + each * run - 1) / (each * run)));
}

}  // namespace ark::ops
