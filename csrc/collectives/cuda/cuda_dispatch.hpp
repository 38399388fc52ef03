// Chooses the algorithm of a collective on CUDA tensors by measured thresholds, and lists the kernels.
//
// A field of CudaDispatch is a size in bytes from which (or up to which) an algorithm is used. The defaults were
// measured. A table in ARK_DISPATCH (written by tools.tune --cuda) replaces them for the group sizes that it names.
// Ranks must decide the same way, so all use rank 0's table, which they get through the store.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "collectives/operation.hpp"
#include "shm/key_value.hpp"

namespace ark {

// The kernels of a group's collectives; each is a row of the table in stubs.cpp.
enum class GroupKernel : uint8_t {
  move,
  rendezvous,
  relay,
  one_shot,
  add,
  lines,
  chunks,
  bulk,
  bulk_move,
  bulk_transfer
};
inline constexpr int kGroupKernels = 10;

// How to use peers' memory (ARK_DISABLE_P2P).
enum class PeerAccess : uint8_t {
  tested,   // use it if a test shows that values arrive, else host memory
  trusted,  // use it if the driver says so, else PyTorch's NCCL carries the group
  avoided,  // use host memory
};

// A new algorithm adds a field here, with its default, and a row to the table below.
struct CudaDispatch {
  static constexpr uint64_t kNever = ~uint64_t{0};
  static constexpr uint64_t kMostBlocks = 128;  // of a launch

  uint64_t one_shot_to = 64 << 10;   // all_reduce up to here: every input to every rank; above: rings
  uint64_t chunks_from = 8 << 20;    // of one part or message: rings of chunks from here, of lines below
  uint64_t landings_from = 8 << 20;  // of one part or message: into registered memory from here
  uint64_t relay_from = 1 << 20;     // broadcast to several peers: they pass on parts from here
  uint64_t bulk_from = kNever;       // sums of this many bytes per rank: bulk rings, few blocks
  uint64_t bulk_move_from = kNever;  // messages of all_gather, gather, scatter and broadcast: the same
  uint64_t bulk_send_from = kNever;  // messages of send and recv: the same
  uint64_t ring_blocks = 16;         // blocks of the bulk rings
  // Messages of send and recv: the two ranks wait for each other by one block before all blocks of the rings start.
  uint64_t rendezvous_from = 2 << 20;

  // In a training step that all ranks capture together (Operation::captured_step), bulk rings of their own carry these
  // sizes, before copy engines and whatever is above. A launch there waits for its peer beside computation, so few
  // blocks may win where they lose alone.
  uint64_t step_all_reduce_from = kNever;
  uint64_t step_reduce_scatter_from = kNever;  // by the bytes of all parts
  uint64_t step_move_from = kNever;            // messages of all_gather, gather, scatter and broadcast
  uint64_t step_send_from = kNever;            // messages of send and recv
  uint64_t step_blocks = 32;                   // blocks of these rings; 0: captured steps have none
  uint64_t step_all_reduce_blocks = 32;        // of these, those of an all_reduce, at most
  uint64_t step_copy_engine_from = kNever;     // all_reduces by copy engines, unless copy_engine_from is smaller

  uint64_t host_blocks = 64;           // blocks of a launch through host memory
  uint64_t move_blocks = kMostBlocks;  // blocks of a collective that moves in chunks, from chunks_from on
  uint64_t sum_blocks = kMostBlocks;   // blocks of one that adds in chunks, but not by bulk rings
  uint64_t part_bytes = 4 << 20;       // of one part per launch in a ring all_reduce; limits drift of lanes
  uint64_t copy_engine_from = kNever;  // all_reduce from here: copy engines, which leave SMs to computation
  uint64_t in_line_to = 0;             // of these, eager ones up to here use one stream, to save host time
  uint64_t buffer_bytes = 512u << 20;  // most shared memory for copy engines (ARK_BUFFER_MB)

  // Copy engines, by the bytes of one rank's part or message. Three are off by default, because no measurement has
  // shown a gain. `ark tune --cuda` measures each alongside computation and enables those that win on that machine.
  uint64_t reduce_scatter_engine_from = kNever;
  uint64_t all_gather_engine_from = kNever;
  uint64_t broadcast_engine_from = kNever;
  uint64_t all_to_all_engine_from = kNever;  // once another operation has created the memory

  // PyTorch's NCCL carries whole tensors from these sizes on (process_group/carriers/nccl_entry.hpp). Sums only with
  // Options::reduction "fast", because NCCL adds in another order. give_nccl() sets what was measured on some GPU
  // models, and `ark tune --cuda` what is faster on this machine.
  uint64_t nccl_all_reduce_from = kNever;
  uint64_t nccl_reduce_from = kNever;
  uint64_t nccl_reduce_scatter_from = kNever;
  uint64_t nccl_all_gather_from = kNever;
  uint64_t nccl_broadcast_from = kNever;
  uint64_t nccl_all_to_all_from = kNever;
  // And up to these sizes.
  uint64_t nccl_all_reduce_to = kNever;
  uint64_t nccl_reduce_to = kNever;
  uint64_t nccl_reduce_scatter_to = kNever;
  uint64_t nccl_all_gather_to = kNever;
  uint64_t nccl_broadcast_to = kNever;
  uint64_t nccl_all_to_all_to = kNever;

  // Rank 0's options, which are not in the table.
  PeerAccess peer_access = PeerAccess::tested;
  bool any_order = false;        // sums may be added in any order
  bool nccl_leaves_p2p = false;  // NCCL_P2P_DISABLE is set, so NCCL does not touch peers' memory either
  bool to_measure = false;       // the ranks measure another dispatch before they use the group
  bool nccl_of_model = false;    // NCCL's sizes are give_nccl()'s

  static CudaDispatch measured(int ranks);
  // The measured one with other values in the named fields. Throws Error(invalid_argument) for an unknown name.
  static CudaDispatch measured(int ranks, const std::map<std::string, uint64_t>& numbers);
  // Gives NCCL the sizes at which it was measured to be faster on this GPU model (nccl_sizes.cpp). The name must be
  // exact, because another model may have other links.
  void give_nccl(const std::string& model, int ranks);
  // Adapts the table to host memory: only algorithms that need at most 16 bytes of it at once and no peers' memory.
  // `by_nccl`: NCCL carries what it does faster, unless a table says otherwise; sums only with equal bits. What
  // give_nccl() has set is dropped, because it was measured over peers' memory.
  CudaDispatch through_host(int ranks, bool by_nccl) const;
  // What captured steps have of their own: "32 blocks carry reduce_scatters from 1 MB on"; empty: nothing.
  std::string step_carried() const;
  void leave_step_rings();  // captured steps use what other collectives use
  void leave_bulk_rings();  // neither do other collectives have them
};

inline uint32_t host_blocks_of(const CudaDispatch& dispatch) {
  return static_cast<uint32_t>(dispatch.host_blocks);
}

struct CudaDispatchField {
  const char* name;
  uint64_t CudaDispatch::*value;
  std::optional<uint64_t> on_host = {};  // the value that through_host() sets
  uint64_t early[2] = {};                // for tests with small messages; 0: as measured
  bool fast = false;                     // only with Options::reduction "fast", because it does not add in rank order
};
inline constexpr uint64_t kNeverTaken = CudaDispatch::kNever;
inline constexpr CudaDispatchField kCudaDispatchFields[] = {
    {"one_shot_to", &CudaDispatch::one_shot_to, {}, {4 << 10, 16 << 10}},
    {"chunks_from", &CudaDispatch::chunks_from, 0, {2 << 10, 64 << 10}},  // lines need 128 bytes that arrive at once
    {"landings_from", &CudaDispatch::landings_from, kNeverTaken, {1, 8 << 10}},
    {"relay_from", &CudaDispatch::relay_from, kNeverTaken, {64, 4 << 10}},
    {"bulk_from", &CudaDispatch::bulk_from, kNeverTaken, {300'000, 64 << 10}},
    {"bulk_move_from", &CudaDispatch::bulk_move_from, kNeverTaken, {100'000, 64 << 10}},
    {"bulk_send_from", &CudaDispatch::bulk_send_from, kNeverTaken, {100'000, 64 << 10}},
    {"ring_blocks", &CudaDispatch::ring_blocks, {}, {3, 0}},
    {"rendezvous_from", &CudaDispatch::rendezvous_from, kNeverTaken, {1, 16 << 10}},
    {"step_all_reduce_from", &CudaDispatch::step_all_reduce_from, kNeverTaken},
    {"step_reduce_scatter_from", &CudaDispatch::step_reduce_scatter_from, kNeverTaken},
    {"step_move_from", &CudaDispatch::step_move_from, kNeverTaken},
    {"step_send_from", &CudaDispatch::step_send_from, kNeverTaken},
    {"step_blocks", &CudaDispatch::step_blocks},
    {"step_all_reduce_blocks", &CudaDispatch::step_all_reduce_blocks},
    {"step_copy_engine_from", &CudaDispatch::step_copy_engine_from, kNeverTaken},
    {"host_blocks", &CudaDispatch::host_blocks, {}, {3, 0}},
    {"move_blocks", &CudaDispatch::move_blocks, {}, {3, 0}},
    {"sum_blocks", &CudaDispatch::sum_blocks, {}, {2, 0}},
    {"part_bytes", &CudaDispatch::part_bytes},
    {"copy_engine_from", &CudaDispatch::copy_engine_from, kNeverTaken, {kNeverTaken, 256 << 10}},
    {"in_line_to", &CudaDispatch::in_line_to},
    {"reduce_scatter_engine_from", &CudaDispatch::reduce_scatter_engine_from, kNeverTaken, {0, 64 << 10}},
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

// The sizes that NCCL carries, by collective; no other collective has any.
struct NcclSizes {
  Kind kind;
  uint64_t CudaDispatch::*from;
  uint64_t CudaDispatch::*to;
  bool sums = false;
};
inline constexpr NcclSizes kNcclSizes[] = {
    {Kind::all_reduce, &CudaDispatch::nccl_all_reduce_from, &CudaDispatch::nccl_all_reduce_to, true},
    {Kind::reduce, &CudaDispatch::nccl_reduce_from, &CudaDispatch::nccl_reduce_to, true},
    {Kind::reduce_scatter, &CudaDispatch::nccl_reduce_scatter_from, &CudaDispatch::nccl_reduce_scatter_to, true},
    {Kind::all_gather, &CudaDispatch::nccl_all_gather_from, &CudaDispatch::nccl_all_gather_to},
    {Kind::broadcast, &CudaDispatch::nccl_broadcast_from, &CudaDispatch::nccl_broadcast_to},
    {Kind::all_to_all, &CudaDispatch::nccl_all_to_all_from, &CudaDispatch::nccl_all_to_all_to},
};

// A rule applies to groups of up to max_ranks. The first match decides.
struct CudaRule {
  int max_ranks;
  CudaDispatch dispatch;
};
// Without a match: the measured one. `model`: the GPU's name; empty if NCCL is to have no share by default.
CudaDispatch choose_dispatch(const std::vector<CudaRule>& rules, int size, const std::string& model = {});

struct DispatchLimits {
  uint64_t buffer_bytes;  // most memory for copy engines
  bool fast = false;      // sums may be added in any order
  PeerAccess peer_access = PeerAccess::tested;
  bool nccl_leaves_p2p = false;
  bool to_measure = false;
  const char* key = "dispatch";  // of the store; another one for each agreement of a group
  std::string model;             // choose_dispatch's; rank 0's counts
};

// Collective: returns rank 0's choice, within its limits, on every rank. `check` is called between waits and throws
// what ends the group.
CudaDispatch agree_on_dispatch(KeyValueStore& store, int rank, int size, const std::vector<CudaRule>& rules,
                               const DispatchLimits& limits, const std::function<void()>& check);

}  // namespace ark
