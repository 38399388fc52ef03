// Tiles that are stored at their final place, on this GPU or on a peer: what kernels that compute and communicate at
// once share.
//
// A launch has a number, the same on all ranks: its epoch. Each rank first announces to every peer where that peer's
// tiles are to go (a packet, packet.cuh) and what it takes the result for. Blocks compute, wait for the announcement of
// the rank that a tile is for, and store the tile there with plain wide stores. The block that ends last says "all of
// my tiles are stored" to every peer, a word a pair of ranks, and waits for the same word of each. There is no staging
// buffer and no flag beside the data.
//
// Reuse. A peer stores into this rank's result only between two moments of this rank's stream: the announcement, which
// comes behind everything that used the memory before, and the end of the kernel, which comes behind every peer's word.
// So the result may be used, freed and given to the next launch in the order of the stream, as any tensor. An
// announcement of epoch e + 1 overwrites the one of epoch e only when every peer that stores here has read that: its
// word for epoch e came behind its last store.
//
// Flags. A kernel whose blocks need a peer's tiles while they run has a word for each group of tiles, which holds the
// epoch in which it was stored last. A kernel that has awaited every flag of its peers needs no words at its end.
//
// Counts. Small numbers that every block of a peer needs go there in a word each, with the lower half of the epoch: a
// rank sends those of its next launch when every peer has said that it has stored all tiles of this one, for which it
// had read the counts. So who polls never misses its epoch.
//
// Memory order. A block's stores come before its barrier; behind it one thread adds to `arrived` (acquire and release
// at system scope), so the last block's thread has seen all of them, and releases the epoch to the peers at system
// scope. The peer's last block acquires it, and the kernel's end shows the tiles to what comes next in the stream.
//
// Liveness. Announcements are the first thing that the first block does and wait for nothing; blocks wait for
// announcements alone, and only the last block waits for peers' words. So blocks need not be resident together. All
// waits are bounded (Patience). Counters only grow.
#pragma once

#include "cuda/packet.cuh"

namespace ark::device {

inline constexpr uint32 kMostFlags = 16384;  // of one launch, from one rank to another
inline constexpr uint32 kMostCounts = 1024;  // the same

// Of one rank, in memory that all ranks of the node have mapped. Zero at first.
struct alignas(128) TileControl {
  struct alignas(32) Announcement {
    uint64 address, epoch;        // a packet
    uint64 layout, layout_epoch;  // another
  };
  Announcement announced[kMaxRanks];    // by each peer to this rank
  alignas(128) uint64 done[kMaxRanks];  // the last epoch whose tiles for this rank each peer has stored
  alignas(128) uint64 epoch;            // launches of this rank; the rest is its own, too
  uint64 arrived, arrived_before;       // blocks that have stored their tiles: ever, and before this launch
  // The last epoch in which each peer has stored a group of tiles for this rank; which group, kernel and shape say.
  alignas(128) uint64 flags[kMaxRanks][kMostFlags];
  alignas(128) uint64 counts[kMaxRanks][kMostCounts];  // by each peer: epoch and number
};

// What the host reads when a launch has failed. The first to claim it writes it alone.
struct TileReport {
  enum Failure : uint32 { none = 0, index = 1, offset = 2, layout = 3, expert = 4, rows = 5 };
  uint32 claimed;
  uint32 failure;  // written last
  int item;        // which table; expert: which choice
  int peer;        // whose layout is another; expert: choices of a token; rows: who gets too many
  long long value, limit;
};

struct TileLinks {
  TileControl* control[kMaxRanks];  // null: this launch stores on this GPU alone
  uint64 place[kMaxRanks];          // of this rank's result, as each rank sees it
  GroupStatus* status;
  TileReport* report;
  uint64 limit_ns;
  uint64 layout;  // alike on all ranks that mean the same result
  int rank, ranks;
};

#if defined(__CUDACC__)

// Tells the host why this launch has no result, unless another thread has.
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
    // Whoever was first has its report out before anybody ends the context.
    const uint64 began = nanoseconds();
    while (*const_cast<const volatile uint32*>(&report->failure) == 0 && nanoseconds() - began < 10000000) {
    }
  }
}

// Ends the context, as a failed assertion of an eager kernel does: what was never computed must not be taken for a
// result. The next call of the operator raises the error that names table and index. A trap, since a kernel that calls
// the function of assertions has to keep registers for it, and embedding_bag.cuh spilled.
static __device__ __noinline__ void refuse_index(TileReport* report, TileReport::Failure failure, int item,
                                                 long long value, long long limit) {
  report_tile(report, failure, item, -1, value, limit);
  asm volatile("trap;");
}

class TileExchange {
 public:
  // Every thread calls it first, behind begin_kernel(). `blocks`: of all launches of this epoch, if it takes several;
  // they follow one another, and the last block of the last one ends it. Not `announces`: another object of the launch
  // has; one for each end keeps no registers in between.
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

  // Where `peer` wants its tiles; null: time to leave. A peer that has gone on to a later launch has all tiles that it
  // is to get: who asks stores nothing there any more.
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

  // Ends the launch on all ranks where place_of() has met another layout; finish() and meet() do so, too.
  __device__ __forceinline__ void refuse_other() const {
    if (other_ >= 0) disagree(links_.report, links_.status, other_, epoch_);
  }

  // What this thread has stored for `peer`, and what it has seen others store, is the group of tiles `flag`.
  __device__ __forceinline__ void raise(int peer, uint32 flag) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(&links_.control[peer]->flags[links_.rank][flag]),
                 "l"(epoch_)
                 : "memory");
  }

  // Waits for a group of tiles of `peer`; false: time to leave.
  __device__ __forceinline__ bool await(int peer, uint32 flag) {
    const uint64* const from = &links_.control[links_.rank]->flags[peer][flag];
    for (;;) {
      uint64 seen;
      asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(from) : "memory");
      if (seen >= epoch_) return true;
      if (patience_.over_here(peer, epoch_)) return false;
    }
  }

  // A number of this rank for a block of `peer` to read.
  __device__ __forceinline__ void send_count(int peer, uint32 at, uint32 count) {
    const uint64 word = epoch_ << 32 | count;
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(&links_.control[peer]->counts[links_.rank][at]), "l"(word)
                 : "memory");
  }
  // One of a peer; false: time to leave.
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

  // Every thread of the block calls it, behind its last store. When the kernel has ended, all tiles are there; unless
  // `waits`, because the kernel has awaited every peer's by their flags.
  __device__ __forceinline__ void finish(bool waits = true) {
    if (is_local() || !arrive() || !waits) return;
    const int peer = static_cast<int>(threadIdx.x);
    if (peer >= links_.ranks || peer == links_.rank) return;
    tell_stored(peer);
    await_stored(peer);
  }

  // The same in the middle of a kernel whose blocks are resident together: behind it they may read what peers have
  // stored. False, for the whole block: time to leave.
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
  // Behind a block's last store; true, for the whole block: it was the last one.
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

  // Every rank's kernels leave, and the host finds the report before it finds that nobody was waited for.
  static __device__ __noinline__ void disagree(TileReport* report, GroupStatus* status, int peer, uint64 epoch) {
    report_tile(report, TileReport::layout, 0, peer, 0, 0);
    if (atomicExch_system(&status->gave_up, 1u) == 0) status->peer = peer, status->epoch = epoch;
    *const_cast<volatile uint32*>(&status->abort) = 1;
  }

  const TileLinks& links_;
  Patience patience_;
  uint32 blocks_;
  uint64 epoch_ = 0, before_ = 0;
  int other_ = -1;  // whose layout is another
};

#endif

}  // namespace ark::device
