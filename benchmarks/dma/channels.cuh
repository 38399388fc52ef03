// One-way channels between two GPUs as a running kernel sees them, an engine each: put, signal, wait, flush.
//
// A channel is a ring of `slots` slots in the receiver's memory, a word `arrived` beside it (messages that are there,
// written by the sender) and a word `credit` in the sender's memory (messages taken, written by the receiver). One
// block or one warp on each side has a channel of its own, a lane; all its threads call the functions. Messages are
// numbered from 0.
//
// Ordering, stores: a block's stores, a barrier, then one thread's fence at system scope and its store of `arrived`:
// the fence is cumulative over what the barrier ordered before it; the receiver loads `arrived` with acquire and passes
// the knowledge on by a barrier. Packets carry their epoch with the data (cuda/packet.cuh) and need neither. Bulk: the
// engine's writes are complete and seen by the thread that waited for their group; it hands the count to the signalling
// thread (release, acquire in shared memory), which fences between the proxies and at system scope and stores
// `arrived`. Copy engine: the kernel's data, a fence at system scope, then `go`, which a stream waits for; the driver
// orders the copy behind that wait, and the write of `arrived` behind the copy. Proxy: the same with a request in host
// memory in the place of `go`. Credits: the receiver's loads are complete before its barrier, and the sender's stores
// are issued after it has read the credit.
//
// Liveness: every poll is bounded by Patience. No wait is behind more than `slots` messages, which the receiver takes
// in order.
#pragma once

#include "cuda/bulk_copy.cuh"

namespace ark::device {

inline constexpr uint32 kWordStride = 16;                         // words of a lane, 128 bytes from the next lane's
inline constexpr uint32 kStages = 24, kAhead = 8, kChunk = 8192;  // bulk: shared memory, and loads ahead of stores
inline constexpr uint32 kRequests = 64;                           // of a proxy's ring

// What host and device know of a run. Memory of the peer as mapped here.
struct ChannelParams {
  const char* source;  // [lanes][bytes]
  char* peer_slots;    // [lanes][slots][slot_bytes]
  const char* own_slots;
  char* result;                       // packets are unpacked to [lanes][slots][bytes]
  uint64 *peer_arrived, *own_credit;  // of what this GPU sends
  uint64 *own_arrived, *peer_credit;  // of what it receives
  uint64* go;                         // copy engine: messages that its stream may copy
  uint64* requests;                   // proxy: [kRequests][2] in host memory
  uint64* spent;                      // [lanes] nanoseconds
  GroupStatus* status;
  uint64 limit_ns;
  uint64 bytes;       // of a lane's message; a multiple of 16
  uint64 slot_bytes;  // a multiple of 128
  uint64 epoch;       // of packets: larger than all of the run before
  uint32 slots, count, warm;
  uint32 first;  // this GPU sends first
};

#if defined(__CUDACC__)

__device__ __forceinline__ uint64 load_acquire(const uint64* from) {
  uint64 value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ uint64 load_relaxed(const uint64* from) {
  uint64 value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ void store_relaxed(uint64* to, uint64 value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
__device__ __forceinline__ void fence_system() {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}

// The two words of a lane and its slots; what all engines share.
struct Lane {
  const ChannelParams& p;
  Patience patience;
  uint64 known_credit = 0;
  bool good = true;  // false: somebody waited too long

  const uint32 lane;
  const bool leader;

  // A block's lane, or a warp's.
  __device__ __forceinline__ explicit Lane(const ChannelParams& params, bool of_warp = false)
      : p(params),
        patience{params.status, params.limit_ns},
        lane(of_warp ? (blockIdx.x * blockDim.x + threadIdx.x) / 32 : blockIdx.x),
        leader((of_warp ? threadIdx.x & 31 : threadIdx.x) == 0) {}

  __device__ __forceinline__ uint64* word(uint64* of) const { return of + lane * kWordStride; }
  __device__ __forceinline__ uint64 slot(uint64 number) const {
    return (static_cast<uint64>(lane) * p.slots + number % p.slots) * p.slot_bytes;
  }
  __device__ __forceinline__ const char* source() const { return p.source + lane * p.bytes; }

  // One thread's: until the word is at least `least`.
  __device__ __forceinline__ bool until(const uint64* of, uint64 least, uint64& seen) {
    while (seen < least) {
      seen = load_acquire(of);
      if (seen < least && patience.over(0, least)) return good = false;
    }
    return good;
  }
  // One thread's: message `number` has a free slot.
  __device__ __forceinline__ bool open(uint64 number) {
    return number < p.slots || until(word(p.own_credit), number - p.slots + 1, known_credit);
  }
  // One thread's: everything up to and including `number` was taken.
  __device__ __forceinline__ bool flush(uint64 number) { return until(word(p.own_credit), number + 1, known_credit); }

  // The block's: message `number` is in its slot. All threads get the same answer.
  __device__ __forceinline__ bool wait(uint64 number) {
    uint64 seen = 0;
    if (leader) until(word(p.own_arrived), number + 1, seen);
    return __syncthreads_and(good);
  }
  // The block's: so many messages were taken.
  __device__ __forceinline__ void release(uint64 count) {
    __syncthreads();
    if (leader) store_relaxed(word(p.peer_credit), count);
  }
};

// Stores of all threads, then a fence and a word.
struct StoreChannel : Lane {
  using Lane::Lane;
  __device__ __forceinline__ void put(uint64 number, const char* from) {
    const uint64 units = p.bytes / 16;
    const auto* source = reinterpret_cast<const uint4*>(from);
    auto* to = reinterpret_cast<uint4*>(p.peer_slots + slot(number));
#pragma unroll 4
    for (uint64 i = threadIdx.x; i < units; i += blockDim.x) to[i] = source[i];
  }
  __device__ __forceinline__ void signal(uint64 number) {
    __syncthreads();
    if (!leader) return;
    fence_system();
    store_relaxed(word(p.peer_arrived), number + 1);
  }
  __device__ __forceinline__ void put_with_signal(uint64 number, const char* from) {
    put(number, from);
    signal(number);
  }
  __device__ __forceinline__ const char* received(uint64 number) const {
    return p.own_slots + slot(number);
  }
};

// The same by one warp, many of which share a block: while one waits for its release, others store.
struct WarpChannel : Lane {
  __device__ __forceinline__ explicit WarpChannel(const ChannelParams& params) : Lane(params, true) {}
  __device__ __forceinline__ void put_with_signal(uint64 number, const char* from) {
    const uint64 units = p.bytes / 16;
    const auto* source = reinterpret_cast<const uint4*>(from);
    auto* to = reinterpret_cast<uint4*>(p.peer_slots + slot(number));
#pragma unroll 8
    for (uint64 i = threadIdx.x & 31; i < units; i += 32) to[i] = source[i];
    __syncwarp();
    if (leader)
      asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word(p.peer_arrived)), "l"(number + 1) : "memory");
    __syncwarp();
  }
  __device__ __forceinline__ bool wait(uint64 number) {
    uint64 seen = 0;
    if (leader) until(word(p.own_arrived), number + 1, seen);
    return __all_sync(~0u, good);
  }
  __device__ __forceinline__ const char* received(uint64 number) const {
    return p.own_slots + slot(number);
  }
};

// Packets of 16 bytes, 8 of them the epoch: unit i is packets 64 (i / 32) + i % 32 and the one 32 behind it.
struct PacketChannel : Lane {
  using Lane::Lane;
  __device__ __forceinline__ static uint64 place(uint64 unit) { return ((unit >> 5) * 64 + (unit & 31)) * 16; }

  __device__ __forceinline__ void put_with_signal(uint64 number, const char* from) {
    const uint64 units = p.bytes / 16, epoch = p.epoch + number;
    char* to = p.peer_slots + slot(number);
#pragma unroll 2
    for (uint64 i = threadIdx.x; i < units; i += blockDim.x) {
      const Unit unit = reinterpret_cast<const Unit*>(from)[i];
      store_packet(to + place(i), unit.lo, epoch);
      store_packet(to + place(i) + 512, unit.hi, epoch);
    }
  }
  // Unpacks into the result.
  __device__ __forceinline__ bool wait(uint64 number) {
    const uint64 units = p.bytes / 16, epoch = p.epoch + number;
    const char* from = p.own_slots + slot(number);
    char* to = p.result + (static_cast<uint64>(lane) * p.slots + number % p.slots) * p.bytes;
    for (uint64 i = threadIdx.x; i < units && good; i += blockDim.x) {
      Unit unit;
      uint64 low = 0, high = 0;
      for (;;) {
        load_packet(from + place(i), unit.lo, low);
        load_packet(from + place(i) + 512, unit.hi, high);
        if (low == epoch && high == epoch) break;
        if (patience.over(0, epoch)) {
          good = false;
          break;
        }
      }
      reinterpret_cast<Unit*>(to)[i] = unit;
    }
    return __syncthreads_and(good);
  }
  __device__ __forceinline__ const char* received(uint64 number) const {
    return p.result + (static_cast<uint64>(lane) * p.slots + number % p.slots) * p.bytes;
  }
};

// The bulk copy engine, started by one thread: messages `from_number` to `from_number + count - 1`, all with the same
// source, in chunks through stages of shared memory. Thread 0 moves, thread 32 signals; other threads do nothing.
struct BulkChannel : Lane {
  uint64* full;      // [kStages], shared
  uint64* written;   // messages that are in the receiver's memory; kOver when thread 0 gave up
  char* stages;      // [kStages][kChunk]
  uint64 loads = 0;  // chunks loaded in the kernel's life, thread 0's

  __device__ __forceinline__ BulkChannel(const ChannelParams& params, uint64* barriers, uint64* count, char* memory)
      : Lane(params), full(barriers), written(count), stages(memory) {
    if (leader) {
      *written = 0;
      for (uint32 i = 0; i < kStages; i++) barrier_init(&full[i], 1);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      fence_async_shared();
    }
    __syncthreads();
  }
  // Thread 0's. What it reads from `from` was written before the kernel, or by this engine and acquired. A single
  // message finds its slot free.
  __device__ __forceinline__ bool move(uint64 number, uint64 count, const char* from) {
    const uint64 each = (p.bytes + kChunk - 1) / kChunk, chunks = each * count;
    const uint64 base = loads;
    fence_async_global();
    for (uint64 step = 0; step < chunks + kAhead; step++) {
      if (step < chunks) {
        bulk_wait_read<kStages - kAhead - 1>();  // the chunk that was in this stage has left it
        const uint64 at = step % each * kChunk;
        const uint32 stage = (base + step) % kStages, size = static_cast<uint32>(min(p.bytes - at, uint64{kChunk}));
        barrier_expect(&full[stage], size);
        bulk_load(stages + stage * kChunk, from + at, size, &full[stage]);
        loads++;
      }
      if (step < kAhead) continue;
      const uint64 chunk = step - kAhead, message = number + chunk / each, at = chunk % each * kChunk;
      const uint32 stage = (base + chunk) % kStages, size = static_cast<uint32>(min(p.bytes - at, uint64{kChunk}));
      if (count > 1 && at == 0 && !open(message)) {
        for (uint64 i = chunk; i < min(step + 1, chunks); i++) await_load(base + i);  // before the block may end
        break;
      }
      await_load(base + chunk);
      bulk_store(p.peer_slots + slot(message) + at, stages + stage * kChunk, size);
      bulk_commit();
      if (count > 1) {
        bulk_wait_written<kStages - kAhead - 1>();
        if (chunk + 1 >= kStages - kAhead) note(number + (chunk + 1 - (kStages - kAhead - 1)) / each);
      }
    }
    bulk_wait_written<0>();
    note(good ? number + count : kOver);
    return good;
  }
  // Loads read this GPU's own memory: the hardware bounds the wait.
  __device__ __forceinline__ void await_load(uint64 number) const {
    while (!barrier_passed(&full[number % kStages], number / kStages & 1)) {
    }
  }
  __device__ __forceinline__ void note(uint64 count) {
    asm volatile("st.release.cta.shared.u64 [%0], %1;" ::"r"(shared_address(written)), "l"(count) : "memory");
  }
  // One thread's: tells what was noted, until all `count` messages are.
  __device__ __forceinline__ void tell(uint64 count) {
    for (uint64 told = 0; told < count;) {
      uint64 now;
      asm volatile("ld.acquire.cta.shared.u64 %0, [%1];" : "=l"(now) : "r"(shared_address(written)) : "memory");
      if (now == kOver) return;
      if (now == told) continue;
      fence_async_global();
      fence_system();
      store_relaxed(word(p.peer_arrived), now);
      told = now;
    }
  }
  __device__ __forceinline__ void put_with_signal(uint64 number, const char* from) {
    if (!leader || !move(number, 1, from)) return;
    fence_async_global();
    fence_system();
    store_relaxed(word(p.peer_arrived), number + 1);
  }
  __device__ __forceinline__ const char* received(uint64 number) const { return p.own_slots + slot(number); }
};

// Copies that the host has posted ahead, one a message, each behind a wait for `go`.
struct EngineChannel : Lane {
  using Lane::Lane;
  __device__ __forceinline__ void put_with_signal(uint64 number, const char*) {
    if (!leader) return;
    fence_system();
    store_relaxed(p.go, number + 1);
  }
  __device__ __forceinline__ const char* received(uint64 number) const { return p.own_slots + slot(number); }
};

// Requests to a host thread. The top bit of both halves is the parity of the lap, so that neither half is taken early.
struct ProxyChannel : Lane {
  using Lane::Lane;
  __device__ __forceinline__ void put_with_signal(uint64 number, const char*) {
    if (!leader) return;
    // own_credit counts what the host thread has taken from the ring; it lies in host memory.
    if (number >= kRequests && !until(p.own_credit, number - kRequests + 1, known_credit)) return;
    fence_system();
    const uint64 parity = (number / kRequests & 1) == 0 ? uint64{1} << 63 : 0;
    store_packet(p.requests + number % kRequests * 2, number | parity, p.bytes | parity);
  }
  __device__ __forceinline__ const char* received(uint64 number) const { return p.own_slots + slot(number); }
};

#endif

}  // namespace ark::device
