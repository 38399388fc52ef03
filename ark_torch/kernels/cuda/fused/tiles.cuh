// Tiles stored at their final place, on this GPU or a peer: the protocol shared by kernels that compute and communicate
// at once. There is no staging buffer, and no flag next to the data.
//
// A launch has a number that is the same on all ranks: its epoch. Each rank first announces to every peer where that
// peer's tiles go (a packet, packet.cuh) and the layout that it expects. Blocks compute, wait for the announcement of a
// tile's destination, and store the tile there with plain wide stores. The last block to end tells every peer that all
// tiles are stored, with one word per pair of ranks, and waits for every peer's word.
#pragma once

#include "cuda/packet.cuh"

namespace ark::device {

// Reuse. A peer stores to this rank's result only between two points of this rank's stream: the announcement, which
// follows everything that used the memory before, and the end of the kernel, which follows every peer's word. So the
// result may be used, freed and passed to the next launch in stream order, like any tensor. The announcement of epoch e
// + 1 overwrites that of epoch e only after every peer that stores here has read it, since its word for epoch e
// followed its last store.
//
// Flags. A kernel whose blocks need a peer's tiles while they run has a word per group of tiles, with the epoch in
// which it was last stored. A kernel that has waited for every flag of its peers needs no words at its end.
//
// Counts. Small numbers that every block of a peer needs are sent as one word each, with the lower half of the epoch. A
// rank sends those of its next launch only after every peer has said that it stored all tiles of this launch, before
// which it read this launch's counts. So no poll misses its epoch.
//
// Memory order. A block's stores precede its barrier, after which one thread adds to `arrived` (acquire and release at
// system scope). So the last block's thread has seen all of them, and releases the epoch to the peers at system scope.
// The peer's last block acquires it, and the kernel's end makes the tiles visible to what follows in the stream.
//
// No deadlock. The first block makes the announcements before anything else, without waiting. Blocks wait for
// announcements only; the last block alone waits for peers' words. So blocks need not be resident together. All waits
// are bounded (Patience). Counters only grow.

inline constexpr uint32 kMostFlags = 16384;  // per launch, from one rank to another
inline constexpr uint32 kMostCounts = 1024;  // the same

// One per rank, in memory mapped by all ranks of the node. Initially zero.
struct alignas(128) TileControl {
  struct alignas(32) Announcement {
    uint64 address, epoch;        // a packet
    uint64 layout, layout_epoch;  // another packet
  };
  Announcement announced[kMaxRanks];    // by each peer to this rank
  alignas(128) uint64 done[kMaxRanks];  // per peer: the last epoch whose tiles for this rank it has stored
  alignas(128) uint64 epoch;            // launches of this rank; this and the rest are used by this rank only
  uint64 arrived, arrived_before;       // blocks that have stored their tiles: in total, and before this launch
  // Per peer: the last epoch in which it stored each group of tiles for this rank. Kernel and shape define the groups.
  alignas(128) uint64 flags[kMaxRanks][kMostFlags];
  alignas(128) uint64 counts[kMaxRanks][kMostCounts];  // per peer: epoch and number
};

// What the host reads after a failed launch. The first thread to claim it is its only writer.
struct TileReport {
  enum Failure : uint32 { none = 0, index = 1, offset = 2, layout = 3, expert = 4, rows = 5 };
  uint32 claimed;
  uint32 failure;  // written last
  int item;        // the table; expert: the choice
  int peer;        // the peer with another layout; expert: choices per token; rows: the rank that gets too many
  long long value, limit;
};

struct TileLinks {
  TileControl* control[kMaxRanks];  // null: this launch stores on this GPU only
  uint64 place[kMaxRanks];          // of this rank's result, as each rank sees it
  GroupStatus* status;
  TileReport* report;
  uint64 limit_ns;
  uint64 layout;  // equal on all ranks that expect the same result
  int rank, ranks;
};

#if defined(__CUDACC__)

// Reports to the host why this launch has no result, unless another thread has.
static __device__ __noinline__ void report_tile(TileReport* report, TileReport::Failure failure, int item, int peer,
                                                long long value, long long limit) {
  if (atomicCAS_system(&report->claimed, 0u, 1u) == 0) {
    report->item = item;
    report->peer = peer;
    report->value = value;
    report->limit = limit;
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(&report->failure), "r"(static_cast<uint32>(failure))
                 : "memory");
    __threadfence_system();
  } else {
    // The first one's report must be complete before anyone ends the context.
    const uint64 began = nanoseconds();
    while (*const_cast<const volatile uint32*>(&report->failure) == 0 && nanoseconds() - began < 10000000) {
    }
  }
}

// Ends the context, like a failed assertion of an eager kernel: results that were never computed must not be mistaken
// for valid ones. The operator's next call raises the error with table and index. A trap, as calling the assertion
// function takes registers, and embedding_bag.cuh would spill.
static __device__ __noinline__ void refuse_index(TileReport* report, TileReport::Failure failure, int item,
                                                 long long value, long long limit) {
  report_tile(report, failure, item, -1, value, limit);
  asm volatile("trap;");
}

class TileExchange {
 public:
  // Called first by every thread, after begin_kernel(). `blocks`: the total over all launches of this epoch, if there
  // are several; they follow each other, and the last block of the last one ends the epoch. `announces` is false if
  // another object of the launch announces; separate objects at start and end keep no registers in between.
  __device__ __forceinline__ explicit TileExchange(const TileLinks& links, uint32 blocks = 0, bool announces = true)
      : links_(links), patience_{links.status, links.limit_ns}, blocks_(blocks != 0 ? blocks : gridDim.x) {
    if (is_local()) return;
    const TileControl* const own = links.control[links.rank];
    epoch_ = *const_cast<const volatile uint64*>(&own->epoch) + 1;
    before_ = *const_cast<const volatile uint64*>(&own->arrived_before);
    const int peer = static_cast<int>(threadIdx.x);
    if (!announces || blockIdx.x != 0 || peer >= links.ranks || peer == links.rank) return;
    TileControl::Announcement* const place = &links.control[peer]->announced[links.rank];
    store_packet(&place->address, links.place[peer], epoch_);
    store_packet(&place->layout, links.layout, epoch_);
  }

  // The address of `peer`'s tiles; null: give up. A peer already in a later launch has all its tiles of this one, so
  // the caller stores nothing there any more.
  __device__ __forceinline__ char* place_of(int peer) {
    if (peer == links_.rank || is_local()) return reinterpret_cast<char*>(links_.place[links_.rank]);
    const TileControl::Announcement* const announced = &links_.control[links_.rank]->announced[peer];
    for (;;) {
      uint64 address = 0, epoch = 0, layout = 0, layout_epoch = 0;
      load_packet(&announced->address, address, epoch);
      load_packet(&announced->layout, layout, layout_epoch);
      if (epoch >= epoch_ && layout_epoch >= epoch_) {
        if (layout == links_.layout || layout_epoch != epoch_) return reinterpret_cast<char*>(address);
        other_ = peer;
        return nullptr;
      }
      if (patience_.over_here(peer, epoch_)) return nullptr;
    }
  }

  // Ends the launch on all ranks if place_of() found another layout. finish() and meet() do so, too.
  __device__ __forceinline__ void refuse_other() const {
    if (other_ >= 0) disagree(links_.report, links_.status, other_, epoch_);
  }

  // Marks group `flag` of tiles for `peer` as stored: by this thread, or by others whose stores it has seen.
  __device__ __forceinline__ void raise(int peer, uint32 flag) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(&links_.control[peer]->flags[links_.rank][flag]),
                 "l"(epoch_)
                 : "memory");
  }

  // Waits for a group of tiles of `peer`; false: give up.
  __device__ __forceinline__ bool await(int peer, uint32 flag) {
    const uint64* const from = &links_.control[links_.rank]->flags[peer][flag];
    for (;;) {
      uint64 seen;
      asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(from) : "memory");
      if (seen >= epoch_) return true;
      if (patience_.over_here(peer, epoch_)) return false;
    }
  }

  // Sends a number of this rank to the blocks of `peer`.
  __device__ __forceinline__ void send_count(int peer, uint32 at, uint32 count) {
    const uint64 word = epoch_ << 32 | count;
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(&links_.control[peer]->counts[links_.rank][at]), "l"(word)
                 : "memory");
  }
  // Receives one from a peer; false: give up.
  __device__ __forceinline__ bool await_count(int peer, uint32 at, uint32& count) {
    const uint64* const from = &links_.control[links_.rank]->counts[peer][at];
    for (;;) {
      uint64 word;
      asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
      count = static_cast<uint32>(word);
      if (static_cast<uint32>(word >> 32) == static_cast<uint32>(epoch_)) return true;
      if (patience_.over_here(peer, epoch_)) return false;
    }
  }

  // Called by every thread of the block after its last store. All tiles have arrived when the kernel ends. Not `waits`:
  // the kernel has already waited for every peer's tiles by their flags.
  __device__ __forceinline__ void finish(bool waits = true) {
    if (is_local() || !arrive() || !waits) return;
    const int peer = static_cast<int>(threadIdx.x);
    if (peer >= links_.ranks || peer == links_.rank) return;
    tell_stored(peer);
    await_stored(peer);
  }

  // The same in the middle of a kernel whose blocks are resident together; afterwards they may read what peers have
  // stored. Returns false for the whole block to give up.
  __device__ __forceinline__ bool meet() {
    if (is_local()) return true;
    const bool is_last = arrive();
    const int peer = static_cast<int>(threadIdx.x);
    bool well = true;
    if (peer < links_.ranks && peer != links_.rank) {
      if (is_last) tell_stored(peer);
      well = await_stored(peer);
    }
    return __syncthreads_and(well) != 0;
  }

  __device__ __forceinline__ bool is_local() const { return links_.ranks == 1; }

 private:
  // Called after a block's last store. Returns true for the whole block if it was the last one.
  __device__ __forceinline__ bool arrive() {
    refuse_other();
    __shared__ uint32 is_last;
    TileControl* const own = links_.control[links_.rank];
    __syncthreads();
    if (threadIdx.x == 0) {
      uint64 count;
      asm volatile("atom.add.acq_rel.sys.global.u64 %0, [%1], 1;" : "=l"(count) : "l"(&own->arrived) : "memory");
      is_last = count + 1 - before_ == blocks_ ? 1 : 0;
      if (is_last != 0) own->epoch = epoch_, own->arrived_before = count + 1;
    }
    __syncthreads();
    return is_last != 0;
  }
  __device__ __forceinline__ void tell_stored(int peer) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(&links_.control[peer]->done[links_.rank]), "l"(epoch_)
                 : "memory");
  }
  __device__ __forceinline__ bool await_stored(int peer) {
    const uint64* const from = &links_.control[links_.rank]->done[peer];
    uint64 seen = 0;
    while (seen < epoch_) {
      asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(from) : "memory");
      if (seen < epoch_ && patience_.over_here(peer, epoch_)) return false;
    }
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(from) : "memory");
    return true;
  }

  // Makes every rank's kernels leave. The host finds the report before it finds that a wait was given up.
  static __device__ __noinline__ void disagree(TileReport* report, GroupStatus* status, int peer, uint64 epoch) {
    report_tile(report, TileReport::layout, 0, peer, 0, 0);
    if (atomicExch_system(&status->gave_up, 1u) == 0) status->peer = peer, status->epoch = epoch;
    *const_cast<volatile uint32*>(&status->abort) = 1;
  }

  const TileLinks& links_;
  Patience patience_;
  uint32 blocks_;
  uint64 epoch_ = 0, before_ = 0;
  int other_ = -1;  // the peer with another layout
};

#endif

}  // namespace ark::device
