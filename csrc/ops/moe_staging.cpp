// Reserves the staging place for one operation of a mixture of experts, and keeps it with a graph under capture.
#include "ops/moe_staging.hpp"

#include <algorithm>

#include "process_group/cuda/cuda_group.hpp"

namespace ark::ops {

namespace {

uint64_t aligned(uint64_t bytes) {
  constexpr uint64_t kAlign = 1024;
  return (std::max<uint64_t>(bytes, 1) + kAlign - 1) / kAlign * kAlign;
}

}  // namespace

MoeBlocks::MoeBlocks(uint64_t row_bytes, int64_t max_rows, int64_t max_tokens, int64_t k)
    : rows(aligned(static_cast<uint64_t>(max_rows) * row_bytes)),
      slots(aligned(static_cast<uint64_t>(max_tokens * k) * row_bytes)) {}

device::TileLinks MoeStaged::links(uint64_t offset, uint64_t layout) const {
  TileMemory::Place moved = place;
  moved.data += offset;
  for (char*& seen : moved.seen) seen += seen == nullptr ? 0 : offset;
  device::TileLinks links = tiles.links(moved);
  links.layout = layout, links.limit_ns = limit_ns;
  return links;
}

bool moe_staged(ProcessGroupArk& group, const char* name, c10::Device device, const MoeBlocks& blocks,
                c10::function_ref<void(const MoeStaged&)> launch) {
  bool launched = false;
  const auto body = [&](CudaCommunicator& communicator, const Operation& operation) {
    communicator.check(operation.context);
    const CurrentContext context(device.index());  // autograd's threads have none
    const auto stream = static_cast<CUstream>(operation.stream);
    const Capture capture = capture_of(stream);
    std::string why;
    TileMemory* const tiles = communicator.tiles(capture.id != 0, why);
    if (tiles == nullptr || !tiles->reserve(communicator, blocks.rows + blocks.slots, capture.id != 0, why)) return;
    const TileMemory::Place place = tiles->staging();
    if (capture.id != 0) keep_with_graph(capture, place.keep);
    launch({communicator, *tiles, place, stream, nanoseconds_of(operation.context)});
    launched = true;
  };
  return group.launch_region(name, device, body) && launched;
}

uint64_t moe_fingerprint(std::initializer_list<int64_t> values) {
  uint64_t hash = 11;
  for (const int64_t value : values) {
    hash = (hash ^ static_cast<uint64_t>(value)) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 29;
  }
  return hash | 1;
}

}  // namespace ark::ops
