// The steps of compressed collectives on CUDA tensors: launches on the current stream, which a graph may capture.
//
// A launch's parameters hold the pieces of one kind (a width of codes; buckets of a warp or of a block), up to
// kMostPieces; more pieces take more launches. Nothing is copied to the device before, and the host waits for nothing.
#include "cuda/compressed_codes.cuh"

#include <algorithm>
#include <numeric>
#include <vector>

#include "collectives/cuda/stubs.hpp"
#include "jit/kernel.hpp"
#include "ops/compressed.hpp"
#include "ops/tile_result.hpp"
#include "process_group/cuda_group.hpp"

namespace ark::ops {

namespace {

CUstream current_cuda_stream(c10::Device device) {
  return static_cast<CUstream>(native_stream(current_stream(device)));
}

device::CodeParams code_params(const Coding& coding) {
  device::CodeParams params{};
  params.rule = coding.rule;
  params.ranks = 1;
  return params;
}

// The launches of one step. Those that fill places of several ranks are one epoch of the group's tiles.
class Launches {
 public:
  Launches(const Coding& coding, const char* entry, c10::Device device, const device::CodeParams& params,
           CUstream stream, uint64_t most_blocks = ~uint64_t{0})
      : coding_(coding), entry_(entry), device_(device), params_(params), stream_(stream), most_blocks_(most_blocks) {}

  // Its records begin at `begin` of the place of `rank`.
  void add(const compressed::Part& part, uint64_t begin, int rank = 0) {
    for (quantize::Piece piece : part.pieces) {
      piece.at += begin;
      device::CodeParams& params = params_of(piece);
      params.piece[params.pieces++] = {piece, params.buckets, rank};
      params.buckets += quantize::buckets_of(piece);
    }
  }

  void finish() {
    // Peers wait for this rank even where it has nothing for them.
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

 private:
  static bool is_wide(const quantize::Piece& piece) { return piece.bucket > device::kWarpBucket; }

  // One kernel has one width of codes and one kind of team.
  device::CodeParams& params_of(const quantize::Piece& piece) {
    for (device::CodeParams& params : launches_) {
      const quantize::Piece& known = params.piece[0].piece;
      if (known.bits == piece.bits && is_wide(known) == is_wide(piece) && params.pieces < device::kMostPieces)
        return params;
    }
    launches_.push_back(params_);
    launches_.back().piece[0].piece = piece;
    return launches_.back();
  }

  const jit::Kernel& kernel_of(const device::CodeParams& params) const {
    const quantize::Piece& piece = params.piece[0].piece;
    return jit::KernelLibrary::of(device_.index())
        .get(compressed_stub({coding_.dtype, coding_.rule.format, piece.bits, is_wide(piece)}), entry_);
  }

  // Buckets over blocks. Long runs where all multiprocessors have work without them; and where blocks wait for peers
  // that may share this GPU, so that all blocks have room at once.
  unsigned cut(device::CodeParams& params, const jit::Kernel& kernel) const {
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

  static constexpr uint64_t kFewBlocks = 1024, kLongestRun = 4;

  const Coding& coding_;
  const char* entry_;
  c10::Device device_;
  device::CodeParams params_;
  CUstream stream_;
  uint64_t most_blocks_;
  std::vector<device::CodeParams> launches_;
};

const char* encode_entry(const at::Tensor* residual) {
  return residual == nullptr ? "compressed_encode" : "compressed_encode_fed";
}
const char* reduce_entry(const at::Tensor* residual) {
  return residual == nullptr ? "compressed_reduce" : "compressed_reduce_fed";
}

float* owed_of(const at::Tensor* residual) {
  return residual == nullptr ? nullptr : static_cast<float*>(residual->data_ptr());
}

device::CodeParams code_params(const Coding& coding, const PartSum& sum) {
  device::CodeParams params = code_params(coding);
  params.input = sum.received->const_data_ptr();
  params.rank_bytes = sum.part->bytes;
  params.ranks = static_cast<uint32_t>(sum.ranks);
  params.average = sum.average;
  params.rule.stage = quantize::Stage::owner;
  return params;
}

}  // namespace

void encode_parts_cuda(const Coding& coding, const std::vector<PlacedPart>& parts, const at::Tensor& input,
                       const at::Tensor* residual, at::Tensor& codes) {
  const c10::Device device = input.device();
  device::CodeParams params = code_params(coding);
  params.links = alone(device.index(), codes.mutable_data_ptr());
  params.input = input.const_data_ptr(), params.residual = owed_of(residual);
  Launches launches(coding, encode_entry(residual), device, params, current_cuda_stream(device));
  for (const auto& [part, begin] : parts) launches.add(*part, begin);
  launches.finish();
}

void decode_parts_cuda(const Coding& coding, const std::vector<PlacedPart>& parts, const at::Tensor& codes,
                       at::Tensor& output) {
  const c10::Device device = output.device();
  device::CodeParams params = code_params(coding);
  params.input = codes.const_data_ptr(), params.output = output.mutable_data_ptr();  // the sums of one rank
  Launches launches(coding, "compressed_sum", device, params, current_cuda_stream(device));
  for (const auto& [part, begin] : parts) launches.add(*part, begin);
  launches.finish();
}

void reduce_part_cuda(const Coding& coding, const PartSum& sum, const at::Tensor* residual, at::Tensor& codes) {
  const c10::Device device = codes.device();
  device::CodeParams params = code_params(coding, sum);
  params.links = alone(device.index(), codes.mutable_data_ptr());
  params.residual = owed_of(residual);
  Launches launches(coding, reduce_entry(residual), device, params, current_cuda_stream(device));
  launches.add(*sum.part, 0);
  launches.finish();
}

void reduce_part_to_elements_cuda(const Coding& coding, const PartSum& sum, at::Tensor& output) {
  if (sum.part->pieces.empty()) return;
  const c10::Device device = output.device();
  device::CodeParams params = code_params(coding, sum);
  params.output = output.mutable_data_ptr();
  params.first_element = sum.part->pieces.front().element;
  Launches launches(coding, "compressed_sum", device, params, current_cuda_stream(device));
  launches.add(*sum.part, 0);
  launches.finish();
}

namespace {

// Memory for tiles that an all-reduce takes at most; larger ones go round by round.
constexpr uint64_t kMostTileBytes = uint64_t{64} << 20;

// What ranks store for each other in a round: [ranks' records of this rank's part | every part's sums].
struct Round {
  std::vector<compressed::Part> parts;
  uint64_t most = 0;  // bytes of the largest part

  uint64_t half() const { return parts.size() * most; }
};

std::vector<Round> rounds_of(const std::vector<compressed::Part>& parts, uint32_t element_bytes) {
  uint64_t most = 0;
  for (const compressed::Part& part : parts) most = std::max(most, part.bytes);
  const uint64_t count = std::max<uint64_t>(1, (2 * parts.size() * most + kMostTileBytes - 1) / kMostTileBytes);
  std::vector<Round> rounds(count);
  for (uint64_t i = 0; i < count; ++i) {
    for (const compressed::Part& part : parts) {
      rounds[i].parts.push_back(slice(part, element_bytes, part.buckets * i / count, part.buckets * (i + 1) / count));
      rounds[i].most = std::max(rounds[i].most, rounds[i].parts.back().bytes);
    }
  }
  return rounds;
}

}  // namespace

std::optional<at::Tensor> all_reduce_fused(const FusedCall& call, ProcessGroupArk& group) {
  const c10::Device device = call.input.device();
  const Coding& coding = call.coding;
  const int size = group.getSize(), rank = group.getRank();
  raise_earlier(group, device, call.name);
  const std::vector<Round> rounds = rounds_of(call.parts, coding.element_bytes);
  uint64_t bytes = 0;
  for (const Round& round : rounds) bytes = std::max(bytes, 2 * round.half());
  if (bytes == 0) return std::nullopt;  // nothing to send
  at::Tensor out = at::empty_like(call.input);
  bool launched = false;
  const auto launch = [&](CudaCommunicator& communicator, const Operation& operation) {
    communicator.check(operation.context);
    const auto stream = static_cast<CUstream>(operation.stream);
    const Capture capture = capture_of(stream);
    std::string why;
    // Under capture ranks cannot meet: what there is has to do.
    TileMemory* const tiles = capture.id != 0 ? communicator.known_tiles() : communicator.tiles(false, why);
    if (tiles == nullptr || (capture.id != 0 && tiles->bytes() < bytes)) return;
    if (!tiles->reserve(communicator, bytes, capture.id != 0, why)) return;
    const TileMemory::Place place = tiles->staging();
    if (capture.id != 0) keep_with_graph(capture, place.keep);
    const auto links = [&](uint64_t offset, uint64_t step) {
      TileMemory::Place moved = place;
      moved.data += offset;
      for (char*& seen : moved.seen) seen += offset;
      device::TileLinks made = tiles->links(moved);
      made.layout = call.fingerprint ^ step;
      made.limit_ns = nanoseconds_of(operation.context);
      return made;
    };
    for (const Round& round : rounds) {
      device::CodeParams params = code_params(coding);
      params.links = links(0, 1);
      params.input = call.input.const_data_ptr(), params.residual = owed_of(call.residual);
      Launches encode(coding, encode_entry(call.residual), device, params, stream, communicator.most_blocks());
      for (int r = 0; r < size; ++r) encode.add(round.parts[r], rank * round.parts[r].bytes, r);
      encode.finish();

      params.rule.stage = quantize::Stage::owner;
      params.links = links(round.half(), 2);
      params.input = place.data, params.rank_bytes = round.parts[rank].bytes;
      params.records = rank * round.most;
      params.ranks = static_cast<uint32_t>(size), params.average = call.average;
      Launches reduce(coding, reduce_entry(call.residual), device, params, stream, communicator.most_blocks());
      reduce.add(round.parts[rank], 0, device::kEveryRank);
      reduce.finish();

      params = code_params(coding);
      params.input = place.data + round.half(), params.output = out.mutable_data_ptr();
      Launches decode(coding, "compressed_sum", device, params, stream);
      for (int r = 0; r < size; ++r) decode.add(round.parts[r], r * round.most);
      decode.finish();
    }
    launched = true;
  };
  if (!group.launch_region(call.name, device, launch) || !launched) return std::nullopt;
  return out;
}

}  // namespace ark::ops
