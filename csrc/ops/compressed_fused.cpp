// Compressed collectives whose kernels store records where peers need them, in tile memory that all ranks of the node
// map (collectives/cuda/tile_memory.hpp).
//
// Each step is an epoch of the group's tiles: once its kernels have ended, everything that peers stored for this rank
// is there. The staging place holds first all ranks' records of this rank's part, then the records that every rank
// gets.
#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "collectives/cuda/tile_memory.hpp"
#include "ops/compressed_launches.hpp"
#include "ops/tile_result.hpp"
#include "process_group/cuda/cuda_group.hpp"

namespace ark::ops {

namespace {

using compressed::Part;

// Most tile memory per call. Larger calls go in several rounds.
constexpr uint64_t kMostTileBytes = uint64_t{64} << 20;

struct Round {
  std::vector<Part> parts;
  Part own;           // all_gather: this rank's part
  uint64_t most = 0;  // bytes of the largest part

  uint64_t half() const { return parts.size() * most; }
};

Part ith_of(const Part& part, uint32_t element_bytes, uint64_t i, uint64_t count) {
  return slice(part, element_bytes, part.buckets * i / count, part.buckets * (i + 1) / count);
}

std::vector<Round> rounds_of(const FusedCall& call, uint64_t halves) {
  uint64_t most = 0;
  for (const Part& part : call.parts) most = std::max(most, part.bytes);
  const uint64_t bytes = halves * call.parts.size() * most;
  std::vector<Round> rounds(std::max<uint64_t>(1, (bytes + kMostTileBytes - 1) / kMostTileBytes));
  for (uint64_t i = 0; i < rounds.size(); ++i) {
    Round& round = rounds[i];
    for (const Part& part : call.parts) {
      round.parts.push_back(ith_of(part, call.coding.element_bytes, i, rounds.size()));
      round.most = std::max(round.most, round.parts.back().bytes);
    }
    if (call.own != nullptr) round.own = ith_of(*call.own, call.coding.element_bytes, i, rounds.size());
  }
  return rounds;
}

class Steps {
 public:
  Steps(const FusedCall& call, ProcessGroupArk& group, CudaCommunicator& communicator, const Operation& operation,
        const TileMemory& tiles)
      : call_(call),
        device_(call.input.device()),
        rank_(group.getRank()),
        size_(group.getSize()),
        tiles_(tiles),
        place_(tiles.staging()),
        stream_(static_cast<CUstream>(operation.stream)),
        limit_ns_(nanoseconds_of(operation.context)),
        most_blocks_(communicator.most_blocks()) {}

  const TileMemory::Place& place() const { return place_; }

  // Sends every part to its owner.
  void scatter(const Round& round) const {
    device::CodeParams params = sending(0, 1);
    params.input = call_.input.const_data_ptr(), params.residual = owed_of(call_.residual);
    CodeLaunches launches = launches_of(encode_entry(call_.residual), params);
    for (int r = 0; r < size_; ++r) launches.add(round.parts[r], rank_ * round.parts[r].bytes, r);
    launches.launch();
  }
  // Sends the sums of this rank's part to all ranks.
  void reduce(const Round& round) const {
    device::CodeParams params = sending(round.half(), 2);
    add_ranks(params, round);
    params.residual = owed_of(call_.residual);
    params.rule.stage = quantize::Stage::owner;
    params.records = rank_ * round.most;
    CodeLaunches launches = launches_of(reduce_entry(call_.residual), params);
    launches.add(round.parts[rank_], 0, device::kEveryRank);
    launches.launch();
  }
  // Sends this rank's elements to all ranks.
  void share(const Round& round) const {
    device::CodeParams params = sending(0, 3);
    params.input = call_.input.const_data_ptr();
    params.records = rank_ * round.most;
    CodeLaunches launches = launches_of(encode_entry(nullptr), params);
    launches.add(round.own, 0, device::kEveryRank);
    launches.launch();
  }
  // Decodes what all ranks received to elements.
  void decode(const Round& round, uint64_t offset, const Result& result) const {
    device::CodeParams params = code_params(call_.coding);
    params.input = place_.data + offset;
    write_to(params, result);
    CodeLaunches launches = launches_of("compressed_sum", params);
    for (int r = 0; r < size_; ++r) launches.add(round.parts[r], r * round.most);
    launches.launch();
  }
  // Writes the sums of this rank's part as elements.
  void sum(const Round& round, const Result& result) const {
    if (round.parts[rank_].pieces.empty()) return;
    device::CodeParams params = code_params(call_.coding);
    add_ranks(params, round);
    write_to(params, result);
    params.first_element = call_.parts[rank_].pieces.front().element;
    CodeLaunches launches = launches_of("compressed_sum", params);
    launches.add(round.parts[rank_], 0);
    launches.launch();
  }

 private:
  device::CodeParams sending(uint64_t offset, uint64_t step) const {
    TileMemory::Place moved = place_;
    moved.data += offset;
    for (char*& seen : moved.seen) seen += offset;
    device::CodeParams params = code_params(call_.coding);
    params.links = tiles_.links(moved);
    params.links.layout = call_.fingerprint ^ step;
    params.links.limit_ns = limit_ns_;
    return params;
  }
  void add_ranks(device::CodeParams& params, const Round& round) const {
    params.input = place_.data, params.rank_bytes = round.parts[rank_].bytes;
    params.ranks = static_cast<uint32_t>(size_), params.average = call_.average;
  }
  CodeLaunches launches_of(const char* entry, const device::CodeParams& params) const {
    return {call_.coding, entry, device_, params, stream_, most_blocks_};
  }

  const FusedCall& call_;
  const c10::Device device_;
  const int rank_, size_;
  const TileMemory& tiles_;
  const TileMemory::Place place_;
  const CUstream stream_;
  const uint64_t limit_ns_, most_blocks_;
};

}  // namespace

bool run_fused(const FusedCall& call, ProcessGroupArk& group, const Result& result) {
  const c10::Device device = call.input.device();
  raise_earlier(group, device, call.name);
  const bool reduces = call.kind == FusedKind::all_reduce;
  const std::vector<Round> rounds = rounds_of(call, reduces ? 2 : 1);
  uint64_t bytes = 0;
  for (const Round& round : rounds) bytes = std::max(bytes, (reduces ? 2 : 1) * round.half());
  if (bytes == 0) return false;  // nothing to send
  bool launched = false;
  const auto launch = [&](CudaCommunicator& communicator, const Operation& operation) {
    communicator.check(operation.context);
    const Capture capture = capture_of(static_cast<CUstream>(operation.stream));
    const bool capturing = capture.id != 0;
    std::string why;
    // During capture ranks cannot meet, so use the existing memory.
    TileMemory* const tiles = capturing ? communicator.known_tiles() : communicator.tiles(false, why);
    if (tiles == nullptr || (capturing && tiles->bytes() < bytes)) return;
    if (!tiles->reserve(communicator, bytes, capturing, why)) return;
    const Steps steps(call, group, communicator, operation, *tiles);
    if (capturing) keep_with_graph(capture, steps.place().keep);
    for (const Round& round : rounds) {
      switch (call.kind) {
        case FusedKind::all_reduce:
          steps.scatter(round), steps.reduce(round), steps.decode(round, round.half(), result);
          break;
        case FusedKind::reduce_scatter: steps.scatter(round), steps.sum(round, result); break;
        case FusedKind::all_gather: steps.share(round), steps.decode(round, 0, result); break;
      }
    }
    launched = true;
  };
  return group.launch_region(call.name, device, launch) && launched;
}

}  // namespace ark::ops
