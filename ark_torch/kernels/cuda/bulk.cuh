// Large messages by the bulk copy engine (TMA): one thread a warp starts the copies, so that few SMs move as much as
// the link carries. All-gathers and all-to-alls push chunks from the input into the peers' slots, from where they are
// copied out; reductions push contributions first, add them in rank order and push the results.
//
// A block has its own rings of kBulkDepth slots of one chunk to and from every peer, one set for contributions and one
// for results and moved bytes; chunk c of a message is block c % blocks's. Warps work side by side: bulk_push() fills
// the peers' slots from the input; bulk_fetch() brings contributions to shared memory, where eight warps of bulk_add()
// add them; bulk_hand_out() stores results here and in the peers' slots; bulk_take() copies out what peers have
// delivered; bulk_signal() tells peers what is in their slots.
//
// Ordering. A sender waits until the copy engine has written a chunk (bulk_wait_written: the thread sees it), notes
// that in shared memory with release; the signalling warp acquires the note, fences between the proxies and at system
// scope, and stores the count of chunks in the receiver's memory. It is a warp of its own because that fence lasts a
// round trip over the link: a sender that made it itself kept a quarter of the bandwidth (measured), and without it
// receivers read slots that were not written yet (seen). The receiver reads the count, fences likewise, and has the
// engine read the slot. When reads have come in (the mbarrier) it stores the count of chunks taken, relaxed: nothing of
// its own is to be ordered before. The sender writes chunk s only when s - kBulkDepth was taken. Counts only grow and
// live on the device.
//
// Liveness. Every wait is bounded. take and fetch wait for their peers' push and hand_out; those wait for credits that
// the peers' take and add give, and hand_out for nothing that push holds: no cycle.
#pragma once

#include "cuda/bulk_block.cuh"

namespace ark::device {

#if defined(__CUDACC__)

// Contributions or moved bytes, from the input to the peers' slots.
template <int kRanks>
__device__ __forceinline__ void bulk_push(BulkBlock<kRanks>& block, int set) {
  constexpr uint32 kChunk = bulk_chunk(kRanks);
  constexpr int kInFlight = kPushStages - 3;  // stores that are not known to be written
  const BulkParams& p = block.p;
  BulkItems<kRanks> loads(p.push_bytes, p.rank, 1), stores = loads, signals = loads;
  RankCounters<kRanks> sent, told, credit;
  ARK_UNROLL
  for (int r = 0; r < kRanks; r++) {
    sent.values[r] = told.values[r] = block.state(set, r)->sent;
    credit.values[r] = 0;
  }
  uint32 loaded = 0, stored = 0;
  bool left = false;
  const auto load = [&] {
    if (loads.over) return;
    const int stage = loaded++ % kPushStages;
    block.load(block.stages + stage * kChunk, static_cast<const char*>(p.push[loads.peer()]) + loads.at(), loads.size(),
               &block.barriers->push[stage]);
    loads.next();
  };
  const auto signal = [&] {
    const int peer = signals.peer();
    const uint64 count = told.bump(peer);
    if (block.leader) block.note_written(peer, set, count);
    signals.next();
  };
  for (int i = 0; i < kPushStages - kInFlight; i++) load();
  while (!stores.over) {
    const int peer = stores.peer(), stage = stored % kPushStages;
    const uint64 number = sent.of(peer);
    uint64 known = credit.of(peer);
    left = !block.await_room(set, peer, number, known) ||
           !block.await_barrier(&block.barriers->push[stage], stored / kPushStages & 1);
    if (left) break;
    credit.set(peer, known);
    if (block.leader) {
      bulk_store(block.slot(peer, set, p.rank, number), block.stages + stage * kChunk, block.padded(stores.size()));
      bulk_commit();
    }
    sent.bump(peer);
    stores.next();
    if (++stored > kInFlight) {
      bulk_wait_written<kInFlight>();
      __syncwarp();
      signal();
    }
    load();
  }
  if (left) block.drain(block.barriers->push, kPushStages, stored, loaded);
  bulk_wait_written<0>();
  if (left) return;
  while (!signals.over) signal();
  if (block.leader) block.finish_sending();
  ARK_UNROLL
  for (int r = 0; r < kRanks; r++)
    if (block.leader && r != p.rank) block.state(set, r)->sent = sent.values[r];
}

// All contributions to this block's chunks of this rank's part, to shared memory.
template <int kRanks>
__device__ __forceinline__ void bulk_fetch(BulkBlock<kRanks>& block, char* stages, uint64 count) {
  constexpr uint32 kChunk = bulk_chunk(kRanks);
  constexpr int kStages = bulk_add_stages(kRanks);
  const BulkParams& p = block.p;
  BulkBarriers& barriers = *block.barriers;
  RankCounters<kRanks> known{};
  uint32 turn = 0;
  bool left = false;
  for (uint64 at = blockIdx.x * uint64{kChunk}; at < p.bytes; at += gridDim.x * uint64{kChunk}) {
    const uint32 size = p.bytes - at < kChunk ? static_cast<uint32>(p.bytes - at) : kChunk;
    const int stage = turn % kStages;
    left = !block.await_barrier(&barriers.empty[stage], (turn / kStages & 1) ^ 1);
    ARK_UNROLL
    for (int r = 0; r < kRanks; r++) {
      left = left || (r != p.rank &&
                      !block.await_word(block.template word<uint64>(p.rank, p.arrived_at, block.contributions, r),
                                        known.values[r], count + 1, r));
    }
    if (left) break;
    block.acquire_slots();
    char* const to = stages + stage * kRanks * kChunk;
    block.load(to + p.rank * kChunk, static_cast<const char*>(p.in) + at, size, &barriers.full[stage],
               block.padded(size) * (kRanks - 1));
    if (block.leader) {
      ARK_UNROLL
      for (int r = 0; r < kRanks; r++) {
        if (r != p.rank)
          bulk_load(to + r * kChunk, block.slot(p.rank, block.contributions, r, count), block.padded(size),
                    &barriers.full[stage]);
      }
    }
    __syncwarp();
    count++;
    turn++;
  }
  if (left) block.drain(barriers.full, kStages, turn < kStages ? 0 : turn - kStages, turn);
  if (left || !block.leader) return;
  ARK_UNROLL
  for (int r = 0; r < kRanks; r++)
    if (r != p.rank) block.state(block.contributions, r)->received = count;
}

// Adds what bulk_fetch() brings, one unit a thread at a time.
template <class Rule, int kRanks>
__device__ __forceinline__ void bulk_add(BulkBlock<kRanks>& block, const char* stages, char* made, Rule rule,
                                         uint64 count) {
  constexpr uint32 kChunk = bulk_chunk(kRanks);
  constexpr int kStages = bulk_add_stages(kRanks);
  constexpr int kUnits = kChunk / (256 * 16);
  const BulkParams& p = block.p;
  BulkBarriers& barriers = *block.barriers;
  const int thread = threadIdx.x - kBulkMovers;
  uint32 turn = 0;
  for (uint64 at = blockIdx.x * uint64{kChunk}; at < p.bytes; at += gridDim.x * uint64{kChunk}) {
    const int stage = turn % kStages, result = turn % kResultStages;
    if (!block.await_barrier(&barriers.full[stage], turn / kStages & 1)) return;
    count++;
    if (thread < kRanks && thread != p.rank) block.tell_taken(thread, block.contributions, count);
    Unit sums[kUnits];
    ARK_UNROLL
    for (int u = 0; u < kUnits; u++) {
      const char* from = stages + stage * kRanks * kChunk + (u * 256 + thread) * 16;
      auto sum = rule.first(*reinterpret_cast<const Unit*>(from));
      ARK_UNROLL
      for (int r = 1; r < kRanks; r++) rule.add(sum, *reinterpret_cast<const Unit*>(from + r * kChunk));
      sums[u] = rule.finish(sum, kRanks, p.average != 0);
    }
    __syncwarp();
    if (block.leader) barrier_arrive(&barriers.empty[stage]);
    if (!block.await_barrier(&barriers.stored[result], (turn / kResultStages & 1) ^ 1)) return;
    ARK_UNROLL
    for (int u = 0; u < kUnits; u++)
      *reinterpret_cast<Unit*>(made + result * kChunk + (u * 256 + thread) * 16) = sums[u];
    fence_async_shared();  // behind the end of a short chunk lies what was there before: added, and not stored
    barrier_arrive(&barriers.made[result]);
    turn++;
  }
}

// Results, to this rank's output and to the slots of those who receive them.
template <int kRanks>
__device__ __forceinline__ void bulk_hand_out(BulkBlock<kRanks>& block, const char* made) {
  constexpr uint32 kChunk = bulk_chunk(kRanks);
  constexpr int kInFlight = kResultStages - 1;
  const BulkParams& p = block.p;
  BulkBarriers& barriers = *block.barriers;
  RankCounters<kRanks> sent, credit;
  ARK_UNROLL
  for (int r = 0; r < kRanks; r++) {
    sent.values[r] = block.state(block.results, r)->sent;
    credit.values[r] = 0;
  }
  const auto receives = [&](int r) { return r != p.rank && (p.receivers >> r & 1) != 0; };
  uint32 turn = 0, told = 0;
  bool left = false;
  const auto tell = [&] {
    told++;
    if (!block.leader) return;
    ARK_UNROLL
    for (int r = 0; r < kRanks; r++)
      if (receives(r)) block.note_written(r, block.results, sent.values[r] - (turn - told));
  };
  for (uint64 at = blockIdx.x * uint64{kChunk}; at < p.bytes; at += gridDim.x * uint64{kChunk}) {
    const uint32 size = p.bytes - at < kChunk ? static_cast<uint32>(p.bytes - at) : kChunk;
    const int result = turn % kResultStages;
    left = !block.await_barrier(&barriers.made[result], turn / kResultStages & 1);
    ARK_UNROLL
    for (int r = 0; r < kRanks; r++)
      left = left || (receives(r) && !block.await_room(block.results, r, sent.values[r], credit.values[r]));
    if (left) break;
    const char* from = made + result * kChunk;
    if (p.out != nullptr) block.store(static_cast<char*>(p.out) + at, from, size);
    ARK_UNROLL
    for (int d = 1; d < kRanks; d++) {
      const int r = p.rank + d < kRanks ? p.rank + d : p.rank + d - kRanks;
      if (!receives(r)) continue;
      if (block.leader) bulk_store(block.slot(r, block.results, p.rank, sent.of(r)), from, block.padded(size));
      sent.bump(r);
    }
    if (block.leader) bulk_commit();
    if (++turn >= kInFlight) {
      bulk_wait_written<kInFlight - 1>();
      __syncwarp();
      tell();
      if (block.leader) barrier_arrive(&barriers.stored[(turn - kInFlight) % kResultStages]);
    }
  }
  bulk_wait_written<0>();
  if (left) return;
  __syncwarp();
  while (told < turn) tell();
  if (block.leader) block.finish_sending();
  ARK_UNROLL
  for (int r = 0; r < kRanks; r++)
    if (block.leader && receives(r)) block.state(block.results, r)->sent = sent.values[r];
}

// What peers have delivered, from this rank's slots to the output.
template <int kRanks>
__device__ __forceinline__ void bulk_take(BulkBlock<kRanks>& block, char* stages) {
  constexpr uint32 kChunk = bulk_chunk(kRanks);
  const BulkParams& p = block.p;
  uint64* const barriers = block.barriers->take;
  BulkItems<kRanks> loads(p.take_bytes, p.rank, -1), stores = loads;
  RankCounters<kRanks> begun, taken, known;
  ARK_UNROLL
  for (int r = 0; r < kRanks; r++) {
    begun.values[r] = taken.values[r] = block.state(block.results, r)->received;
    known.values[r] = 0;
  }
  uint32 loaded = 0, stored = 0;
  bool left = false;
  while (!stores.over) {
    bool moved = false;
    if (!loads.over && loaded < stored + kTakeStages - 2) {
      const int peer = loads.peer(), stage = loaded % kTakeStages;
      const uint64 count = begun.of(peer);
      if (known.of(peer) <= count) {
        const uint64* from = block.template word<uint64>(p.rank, p.arrived_at, block.results, peer);
        known.set(peer, __shfl_sync(~0u, block.leader ? block.load_word(from) : 0, 0));
      }
      if (known.of(peer) > count) {
        block.acquire_slots();
        bulk_wait_read<1>();  // the stage's last store has left it
        __syncwarp();
        if (block.leader) {
          const uint32 bytes = block.padded(loads.size());
          barrier_expect(&barriers[stage], bytes);
          bulk_load(stages + stage * kChunk, block.slot(p.rank, block.results, peer, count), bytes, &barriers[stage]);
        }
        __syncwarp();
        begun.bump(peer);
        loads.next();
        loaded++;
        moved = true;
      }
    }
    if (stored < loaded && block.passed(&barriers[stored % kTakeStages], stored / kTakeStages & 1)) {
      const int peer = stores.peer();
      block.store(static_cast<char*>(p.take[peer]) + stores.at(), stages + stored % kTakeStages * kChunk,
                  stores.size());
      const uint64 count = taken.bump(peer);
      if (block.leader) {
        bulk_commit();
        block.tell_taken(peer, block.results, count);
      }
      stores.next();
      stored++;
      moved = true;
    }
    left = !moved && block.leaves(stores.peer(), taken.of(stores.peer()) + 1);
    if (left) break;
  }
  if (left) block.drain(barriers, kTakeStages, stored, loaded);
  bulk_wait_written<0>();
  if (left || !block.leader) return;
  ARK_UNROLL
  for (int r = 0; r < kRanks; r++)
    if (r != p.rank) block.state(block.results, r)->received = taken.values[r];
}

// Tells peers what senders of this block have written to their slots.
template <int kRanks>
__device__ __forceinline__ void bulk_signal(BulkBlock<kRanks>& block) {
  const int set = (threadIdx.x >> 3) & 1, peer = threadIdx.x & 7;  // a thread each; 16 of the warp
  const bool mine = (threadIdx.x & 31) < 16 && peer < kRanks && peer != block.p.rank;
  uint64 told = mine ? block.load_written(peer, set) : 0;
  for (bool last = false; !last;) {
    last = *const_cast<volatile uint32*>(&block.barriers->senders) == 0;
    last = __all_sync(~0u, last);
    __threadfence_block();
    const uint64 count = mine ? block.load_written(peer, set) : 0;
    if (__any_sync(~0u, count != told)) {
      fence_async_global();
      asm volatile("fence.acq_rel.sys;" ::: "memory");
      if (count != told)
        block.store_word(block.template word<uint64>(peer, block.p.arrived_at, set, block.p.rank), count);
      told = count;
    } else if (block.leaves(-1, 0)) {
      return;
    }
  }
}

template <class Rule, int kRanks, bool kReduces>
__device__ __forceinline__ void bulk(const BulkParams& p, Rule rule) {
  constexpr uint32 kChunk = bulk_chunk(kRanks);
  extern __shared__ __align__(128) char memory[];
  __shared__ BulkBarriers barriers;
  begin_kernel();
  BulkBlock<kRanks> block(p, &barriers, memory);
  if (threadIdx.x == 0) {
    for (uint64& barrier : barriers.push) barrier_init(&barrier, 1);
    for (uint64& barrier : barriers.take) barrier_init(&barrier, 1);
    for (uint64& barrier : barriers.full) barrier_init(&barrier, 1);
    for (uint64& barrier : barriers.empty) barrier_init(&barrier, 8);   // warps
    for (uint64& barrier : barriers.made) barrier_init(&barrier, 256);  // threads
    for (uint64& barrier : barriers.stored) barrier_init(&barrier, 1);
    ARK_UNROLL
    for (int r = 0; r < kRanks; r++)
      for (int set = 0; set < 2; set++) barriers.written[set][r] = block.state(set, r)->sent;
    barriers.senders = kReduces ? 2 : 1;
    barriers.left = 0;
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  char* const taking = memory + kPushStages * kChunk;
  char* const adding = taking + kTakeStages * kChunk;
  char* const made = adding + bulk_add_stages(kRanks) * kRanks * kChunk;
  // Contributions are taken in the same numbers from all peers.
  const uint64 count = kReduces ? block.state(block.contributions, p.rank == 0 ? 1 : 0)->received : 0;
  __syncthreads();  // read before it is changed
  const int warp = threadIdx.x >> 5;
  if (warp == 0) bulk_push<kRanks>(block, kReduces ? block.contributions : block.results);
  if (warp == 1 && kReduces) bulk_fetch<kRanks>(block, adding, count);
  if (warp == 2 && kReduces) bulk_hand_out<kRanks>(block, made);
  if (warp == 3) bulk_take<kRanks>(block, taking);
  if (warp == 4) bulk_signal<kRanks>(block);
  if (warp >= 5 && kReduces) bulk_add<Rule, kRanks>(block, adding, made, rule, count);
  __syncthreads();
}

#endif

}  // namespace ark::device
