// Which algorithm carries a collective on CUDA tensors, by measurement; and the kernels to choose among.
//
// A number of CudaDispatch is a size in bytes from which (or up to which) an algorithm is taken. The defaults were
// measured; ARK_DISPATCH's table (tools.tune --cuda writes one) replaces them for the sizes of groups that it names.
// Ranks must decide alike, so all take rank 0's, told through the store.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "shm/key_value.hpp"

namespace ark {

// The kernels of a group's collectives; each is a row of the table in stubs.cpp.
enum class GroupKernel : uint8_t { move, relay, one_shot, add, lines, chunks, bulk };
inline constexpr int kGroupKernels = 7;

// What is done about peers' memory (ARK_DISABLE_P2P).
enum class PeerAccess : uint8_t {
  tested,   // used where values arrive there, else memory of the host
  trusted,  // used where the driver says so, else PyTorch's NCCL carries the group
  avoided,  // memory of the host
};

// A new algorithm adds its number here, with its default, and a row to the table below.
struct CudaDispatch {
  static constexpr uint64_t kNever = ~uint64_t{0};

  uint64_t one_shot_to = 64 << 10;     // all_reduce up to here: every rank's whole input to every rank; above: rings
  uint64_t chunks_from = 8 << 20;      // of one rank's part or message: from here rings of chunks, below of lines
  uint64_t landings_from = 8 << 20;    // of one rank's part or message: from here into registered memory
  uint64_t relay_from = 1 << 20;       // broadcast to several peers: from here they hand parts on to each other
  uint64_t bulk_from = kNever;         // sums of so many bytes from every rank: from here rings in bulk, few blocks
  uint64_t ring_blocks = 16;           // so many
  uint64_t host_blocks = 16;           // of rings through memory of the host: a bus needs no more, and products do
  uint64_t part_bytes = 4 << 20;       // of one rank's part of an all_reduce by rings in one launch: lanes drift apart
  uint64_t copy_engine_from = kNever;  // all_reduce from here: copy engines, which take no SM from what computes
  uint64_t in_line_to = 0;             // of these, eager ones up to here are on one stream, for the sake of the host
  uint64_t buffer_bytes = 512u << 20;  // of shared memory for copy engines, at most (ARK_BUFFER_MB)

  // Copy engines, by the bytes of one rank's part or message. Three are never taken by default, since no measurement
  // has shown a gain. They stay, with their tests: `ark tune --cuda` measures each beside computation on the machine at
  // hand, and writes it where it wins.
  uint64_t reduce_scatter_engine_from = kNever;
  uint64_t all_gather_engine_from = kNever;
  uint64_t registered_all_gather_engine_from = kNever;  // in a group that has registered memory
  uint64_t broadcast_engine_from = kNever;
  uint64_t all_to_all_engine_from = kNever;  // once another operation's use has brought the memory

  // From these sizes of the whole tensor on PyTorch's NCCL carries it (process_group/carriers/nccl_entry.hpp); sums
  // only under Options::reduction "fast", as it adds in other orders. Never by default: it is a second communicator,
  // with memory and threads of its own. `ark tune --cuda` writes them where NCCL is faster.
  uint64_t nccl_all_reduce_from = kNever;
  uint64_t nccl_reduce_from = kNever;
  uint64_t nccl_reduce_scatter_from = kNever;
  uint64_t nccl_all_gather_from = kNever;
  uint64_t nccl_broadcast_from = kNever;
  uint64_t nccl_all_to_all_from = kNever;
  // And up to these.
  uint64_t nccl_all_reduce_to = kNever;
  uint64_t nccl_reduce_to = kNever;
  uint64_t nccl_reduce_scatter_to = kNever;
  uint64_t nccl_all_gather_to = kNever;
  uint64_t nccl_broadcast_to = kNever;
  uint64_t nccl_all_to_all_to = kNever;

  // Rank 0's options, which are in no table.
  PeerAccess peer_access = PeerAccess::tested;
  bool any_order = false;        // sums may be added in any order
  bool nccl_leaves_p2p = false;  // NCCL_P2P_DISABLE is set: NCCL does not touch peers' memory either

  static CudaDispatch measured(int ranks);
  // Through memory of the host: what needs no more of it than 16 bytes at once, and none of the peers' own. `by_nccl`:
  // NCCL carries what was measured to be faster so, where no table says otherwise; sums where they have the same bits.
  CudaDispatch through_host(int ranks, bool by_nccl) const;
};

// Lanes of the rings in bulk; 0: none are used.
inline uint32_t ring_blocks_of(const CudaDispatch& dispatch) {
  return dispatch.bulk_from == CudaDispatch::kNever ? 0 : static_cast<uint32_t>(dispatch.ring_blocks);
}

inline uint32_t host_blocks_of(const CudaDispatch& dispatch) {
  return static_cast<uint32_t>(dispatch.host_blocks);
}

struct CudaDispatchField {
  const char* name;
  uint64_t CudaDispatch::*value;
  std::optional<uint64_t> on_host = {};  // what through_host() makes of it
  uint64_t early[2] = {};                // for tests that reach it with small messages; 0: as measured
  bool fast = false;  // counts under Options::reduction "fast" alone: what it names does not add in rank order
};
inline constexpr uint64_t kNeverTaken = CudaDispatch::kNever;
inline constexpr CudaDispatchField kCudaDispatchFields[] = {
    {"one_shot_to", &CudaDispatch::one_shot_to, {}, {4 << 10, 16 << 10}},
    {"chunks_from", &CudaDispatch::chunks_from, 0, {2 << 10, 64 << 10}},  // lines need 128 bytes that arrive at once
    {"landings_from", &CudaDispatch::landings_from, kNeverTaken, {1, 8 << 10}},
    {"relay_from", &CudaDispatch::relay_from, kNeverTaken, {64, 4 << 10}},
    {"bulk_from", &CudaDispatch::bulk_from, kNeverTaken, {300'000, 64 << 10}},
    {"ring_blocks", &CudaDispatch::ring_blocks, {}, {3, 0}},
    {"host_blocks", &CudaDispatch::host_blocks, {}, {3, 0}},
    {"part_bytes", &CudaDispatch::part_bytes},
    {"copy_engine_from", &CudaDispatch::copy_engine_from, kNeverTaken, {kNeverTaken, 256 << 10}},
    {"in_line_to", &CudaDispatch::in_line_to},
    {"reduce_scatter_engine_from", &CudaDispatch::reduce_scatter_engine_from, kNeverTaken, {0, 64 << 10}},
    {"registered_all_gather_engine_from", &CudaDispatch::registered_all_gather_engine_from, kNeverTaken},
    {"all_gather_engine_from", &CudaDispatch::all_gather_engine_from, kNeverTaken, {0, 64 << 10}},
    {"broadcast_engine_from", &CudaDispatch::broadcast_engine_from, kNeverTaken, {0, 100'000}},
    {"all_to_all_engine_from", &CudaDispatch::all_to_all_engine_from, kNeverTaken, {0, 100'000}},
    {"buffer_bytes", &CudaDispatch::buffer_bytes, 0},
    {.name = "nccl_all_reduce_from", .value = &CudaDispatch::nccl_all_reduce_from, .fast = true},
    {.name = "nccl_reduce_from", .value = &CudaDispatch::nccl_reduce_from, .fast = true},
    {.name = "nccl_reduce_scatter_from", .value = &CudaDispatch::nccl_reduce_scatter_from, .fast = true},
    {"nccl_all_gather_from", &CudaDispatch::nccl_all_gather_from},
    {"nccl_broadcast_from", &CudaDispatch::nccl_broadcast_from},
    {"nccl_all_to_all_from", &CudaDispatch::nccl_all_to_all_from},
    {"nccl_all_reduce_to", &CudaDispatch::nccl_all_reduce_to},
    {"nccl_reduce_to", &CudaDispatch::nccl_reduce_to},
    {"nccl_reduce_scatter_to", &CudaDispatch::nccl_reduce_scatter_to},
    {"nccl_all_gather_to", &CudaDispatch::nccl_all_gather_to},
    {"nccl_broadcast_to", &CudaDispatch::nccl_broadcast_to},
    {"nccl_all_to_all_to", &CudaDispatch::nccl_all_to_all_to},
};

// A rule applies to groups of up to so many ranks; the first that does decides.
struct CudaRule {
  int max_ranks;
  CudaDispatch dispatch;
};
CudaDispatch choose_dispatch(const std::vector<CudaRule>& rules, int size);

struct DispatchLimits {
  uint64_t buffer_bytes;  // for copy engines, at most
  bool fast = false;      // sums may be added in any order
  PeerAccess peer_access = PeerAccess::tested;
  bool nccl_leaves_p2p = false;
};

// Collective: rank 0's choice within its limits, on every rank. `check` is called between waits and throws what ends
// the group.
CudaDispatch agree_on_dispatch(KeyValueStore& store, int rank, int size, const std::vector<CudaRule>& rules,
                               const DispatchLimits& limits, const std::function<void()>& check);

}  // namespace ark
