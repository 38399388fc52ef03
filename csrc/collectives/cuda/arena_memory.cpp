// Chooses where the arena is and shares it.
#include "collectives/cuda/arena_memory.hpp"

#include <algorithm>

#include "collectives/cuda/peer_test.hpp"
#include "shm/symmetric_memory.hpp"

namespace ark {

namespace {

bool copies(const CudaDispatch& dispatch) {
  return std::min({dispatch.copy_engine_from, dispatch.reduce_scatter_engine_from, dispatch.all_gather_engine_from,
                   dispatch.step_copy_engine_from, dispatch.broadcast_engine_from, dispatch.all_to_all_engine_from}) !=
         CudaDispatch::kNever;
}

SymmetricMemory::Options sharing_of(const ArenaMemory::Options& options, const ArenaLayout& layout, bool on_host) {
  SymmetricMemory::Options sharing;
  sharing.rank = options.rank;
  sharing.size = options.size;
  sharing.device = options.device;
  sharing.device_each = options.device_each;
  sharing.on_host = on_host;
  sharing.bytes = layout.total;
  sharing.timeout = options.timeout;
  return sharing;
}

enum class Peers { reached, unreached, lying, unable };

// Shares the arena on the GPUs and returns the outcome.
Peers share_on_peers(MemoryMeeting& meeting, const ArenaMemory::Options& options, const CudaDispatch& dispatch,
                     ArenaMemory& arena, std::string& why) {
  const ArenaLayout layout(options.size, bulk_blocks_of(dispatch), options.device_each);
  bool allocated = false;
  arena.parts = SymmetricMemory::create(meeting, sharing_of(options, layout, false), why, &allocated);
  if (arena.parts.empty()) return allocated ? Peers::unreached : Peers::unable;
  if (dispatch.peer_access == PeerAccess::trusted) return Peers::reached;
  PeerTest test;
  test.device = options.device;
  test.layout = &layout;
  test.memory = &arena.parts;
  test.copies = copies(dispatch);
  test.timeout = options.timeout;
  test.check = options.check;
  test.patience = std::clamp(options.timeout / 10, std::chrono::milliseconds(1000), test.patience);
  if (test.passes(meeting, why)) return Peers::reached;
  // A kernel or copy that has not ended may still write there, so leak the memory.
  if (is_stuck(options.device)) new std::vector<DeviceMemory>(std::move(arena.parts));
  arena.parts.clear();
  return Peers::lying;
}

bool share_on_host(MemoryMeeting& meeting, const ArenaMemory::Options& options, uint32_t blocks, ArenaMemory& arena,
                   std::string& why) {
  const ArenaLayout layout(options.size, {}, options.device_each, blocks);
  const auto keep_own = [&] { arena.own = DeviceMemory::allocate(options.device, layout.own_total); };
  if (!meeting.step(keep_own, why)) return false;
  arena.parts = SymmetricMemory::create(meeting, sharing_of(options, layout, true), why);
  return arena.on_host = !arena.parts.empty();
}

}  // namespace

BulkBlocks bulk_blocks_of(const CudaDispatch& dispatch) {
  const auto blocks = [](uint64_t count, std::initializer_list<uint64_t> from) {
    return std::min(from) != CudaDispatch::kNever ? static_cast<uint32_t>(count) : 0;
  };
  const uint64_t always = dispatch.ring_blocks, step = dispatch.step_blocks, sums = dispatch.step_all_reduce_from;
  return {.collectives = blocks(always, {dispatch.bulk_from, dispatch.bulk_move_from}),
          .results = blocks(always, {dispatch.bulk_from}),
          .transfers = blocks(always, {dispatch.bulk_send_from}),
          .step = blocks(step, {sums, dispatch.step_reduce_scatter_from, dispatch.step_move_from}),
          .step_results = blocks(step, {sums}),
          .step_transfers = blocks(step, {dispatch.step_send_from})};
}

std::optional<ArenaMemory> ArenaMemory::share(KeyValueStore& store, const Options& options, CudaDispatch& dispatch,
                                              std::string& why) {
  if (options.size > 1 && dispatch.peer_access == PeerAccess::tested) PeerTest::load_kernel(options.device);
  const auto meeting =
      MemoryMeeting::join(store, {options.rank, options.size, options.timeout, "arena", options.check}, why);
  if (!meeting) return std::nullopt;
  ArenaMemory arena;
  Peers peers = Peers::unreached;
  if (dispatch.peer_access != PeerAccess::avoided || options.size == 1) {
    peers = share_on_peers(*meeting, options, dispatch, arena, why);
    if (peers == Peers::reached) return arena;
    arena.why_on_host = why;
    if (peers == Peers::unable || (peers == Peers::unreached && dispatch.peer_access == PeerAccess::trusted))
      return std::nullopt;
  }
  // NCCL also trusts the driver about peer access, so it would fail where the driver reports it wrongly.
  const bool asked_for = arena.why_on_host.empty();
  const bool by_nccl = !asked_for && (peers == Peers::unreached || dispatch.nccl_leaves_p2p);
  std::string unshared;
  if (!share_on_host(*meeting, options, host_blocks_of(dispatch), arena, unshared)) {
    why = asked_for ? unshared : arena.why_on_host + "; and by way of the host: " + unshared;
    if (peers != Peers::lying || dispatch.nccl_leaves_p2p) return std::nullopt;
    throw Error(ErrorKind::system, why,
                ErrorContext{options.rank, -1, "", 0,
                             "Give the group memory of the host, or leave it to NCCL with NCCL_P2P_DISABLE=1."});
  }
  dispatch = dispatch.through_host(options.size, by_nccl);
  return arena;
}

HostUse host_use(int ranks, bool by_nccl) {
  const CudaDispatch dispatch = CudaDispatch::measured(ranks).through_host(ranks, by_nccl);
  const uint64_t bytes = ArenaLayout(ranks, {}, true, host_blocks_of(dispatch)).total;
  return {(bytes + kHostPage - 1) / kHostPage * kHostPage, dispatch.nccl_all_gather_from, dispatch.nccl_all_gather_to};
}

}  // namespace ark
