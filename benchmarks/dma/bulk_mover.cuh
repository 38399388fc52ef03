// The bulk copy engine (TMA) driven by one thread. It copies from memory to memory through stages in shared memory,
// with several chunks in flight in each direction. Either end may be this GPU's or a peer's memory (push or pull). It
// can also add to the destination (float32, bfloat16, float16); each element is rounded separately, in no order between
// GPUs. It needs compute capability 9.0.
//
// A put completes in three steps: reusable() (the sources have been read), written() (the bytes are in place, visible
// to this thread), and the receiver's knowledge of them, which is the channel's job (channel_bulk.cuh).
//
// Ordering. A load completes on an mbarrier, and this thread waits for its phase before it stores from the stage. A
// stage is loaded again only after its store has read it (wait_group.read). After wait_group, the engine's writes are
// visible to this thread. fence_async_global() orders ordinary stores to a source before the engine's reads of it.
//
// Liveness: nothing here waits for a peer; the hardware bounds every wait.
//
// Addresses must be multiples of 16. Bytes after the last multiple of 16 are copied by ordinary accesses.
#pragma once

#include "cuda/bulk_copy.cuh"

namespace ark::device {

enum class BulkOp { copy, add_f32, add_bf16, add_f16 };

// In shared memory. kAhead is the number of chunks loaded before the oldest is stored.
template <int kStageCount, int kAheadCount, int kChunkBytes>
struct alignas(128) BulkStages {
  static constexpr int kStages = kStageCount, kAhead = kAheadCount, kChunk = kChunkBytes;
  static_assert(kAhead < kStages && kChunk % 128 == 0);
  char stages[kStages][kChunk];
  uint64 full[kStages];
  struct {
    char* to;
    uint32 bytes;
  } loaded[kStages];
  // For a stream (channel_bulk.cuh): messages that end with this chunk; messages that are written; the peer's credit.
  uint64 finished[kStages];
  uint64 written, credit;
};

#if defined(__CUDACC__)

template <BulkOp kOp>
__device__ __forceinline__ void bulk_put(void* global, const void* shared, uint32 bytes) {
#define ARK_BULK_REDUCE(type)                                                                               \
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group." type " [%0], [%1], %2;" ::"l"(global), \
               "r"(shared_address(shared)), "r"(bytes)                                                      \
               : "memory")
  if constexpr (kOp == BulkOp::copy) bulk_store(global, shared, bytes);
  if constexpr (kOp == BulkOp::add_f32) ARK_BULK_REDUCE("add.f32");
  if constexpr (kOp == BulkOp::add_bf16) ARK_BULK_REDUCE("add.noftz.bf16");
  if constexpr (kOp == BulkOp::add_f16) ARK_BULK_REDUCE("add.noftz.f16");
#undef ARK_BULK_REDUCE
}

// Copies the last bytes, fewer than 16.
template <BulkOp kOp>
__device__ __noinline__ void put_tail(char* to, const char* from, uint32 bytes) {
  constexpr uint32 kEach = kOp == BulkOp::copy ? 1 : kOp == BulkOp::add_f32 ? 4 : 2;
#pragma unroll 1
  for (uint32 i = 0; i + kEach <= bytes; i += kEach) {
    if constexpr (kOp == BulkOp::copy) {
      to[i] = from[i];
    } else if constexpr (kOp == BulkOp::add_f32) {
      const float value = *reinterpret_cast<const float*>(from + i);
      asm volatile("red.relaxed.sys.global.add.f32 [%0], %1;" ::"l"(to + i), "f"(value) : "memory");
    } else {
      const uint16 value = *reinterpret_cast<const uint16*>(from + i);
      if constexpr (kOp == BulkOp::add_bf16)
        asm volatile("red.relaxed.sys.global.add.noftz.bf16 [%0], %1;" ::"l"(to + i), "h"(value) : "memory");
      else
        asm volatile("red.relaxed.sys.global.add.noftz.f16 [%0], %1;" ::"l"(to + i), "h"(value) : "memory");
    }
  }
}

template <BulkOp kOp, class Stages>
class BulkMover {
 public:
  // The thread that will move calls this, like everything here. Once before each mover of these stages.
  static __device__ __forceinline__ void prepare(Stages& shared) {
    for (int i = 0; i < Stages::kStages; i++) barrier_init(&shared.full[i], 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_async_shared();
  }
  __device__ __forceinline__ explicit BulkMover(Stages& shared) : shared_(shared) {}
  // Waits, because loads may still write to shared memory that the block is about to release.
  __device__ __forceinline__ ~BulkMover() { written(); }
  BulkMover(const BulkMover&) = delete;
  BulkMover& operator=(const BulkMover&) = delete;

  // Call after ordinary stores to the source, by this thread or visible to it.
  static __device__ __forceinline__ void source_changed() { fence_async_global(); }

  __device__ __forceinline__ void put(void* to, const void* from, uint64 bytes) {
    put(to, from, bytes, 0, [] {});
  }
  // Stores everything that was loaded. Afterwards the sources may be overwritten.
  __device__ __forceinline__ void reusable() {
    reusable([] {});
  }
  __device__ __forceinline__ void written() {
    reusable();
    bulk_wait_written<0>();
  }

 protected:
  // Stores that may be in flight once the stage of the next load must have been read.
  static constexpr int kPending = Stages::kStages - Stages::kAhead;

  // Calls `each()` after every store of a chunk.
  template <class Each>
  __device__ __forceinline__ void put(void* to, const void* from, uint64 bytes, uint64 mark, Each each) {
    const uint64 whole = bytes & ~uint64{15};
#pragma unroll 1
    for (uint64 at = 0; at < whole; at += Stages::kChunk) {
      if (ahead_ == Stages::kAhead) store_next(each);
      bulk_wait_read<kPending>();
      const uint32 stage = load_stage_, size = static_cast<uint32>(min(whole - at, uint64{Stages::kChunk}));
      shared_.loaded[stage] = {static_cast<char*>(to) + at, size};
      shared_.finished[stage] = mark;
      barrier_expect(&shared_.full[stage], size);
      bulk_load(shared_.stages[stage], static_cast<const char*>(from) + at, size, &shared_.full[stage]);
      load_stage_ = behind(stage);
      ahead_++;
    }
    if (whole < bytes)
      put_tail<kOp>(static_cast<char*>(to) + whole, static_cast<const char*>(from) + whole,
                    static_cast<uint32>(bytes - whole));
  }
  template <class Each>
  __device__ __forceinline__ void reusable(Each each) {
#pragma unroll 1
    while (ahead_ != 0) store_next(each);
  }
  template <class Each>
  __device__ __forceinline__ void store_next(Each each) {
    const uint32 stage = store_stage_;
    while (!barrier_passed(&shared_.full[stage], phase_)) {
    }
    bulk_put<kOp>(shared_.loaded[stage].to, shared_.stages[stage], shared_.loaded[stage].bytes);
    bulk_commit();
    store_stage_ = behind(stage);
    phase_ ^= store_stage_ == 0;
    ahead_--;
    each();
  }
  static __device__ __forceinline__ uint32 behind(uint32 stage) {
    return stage + 1 == Stages::kStages ? 0 : stage + 1;
  }

  Stages& shared_;
  uint32 load_stage_ = 0, store_stage_ = 0, phase_ = 0;
  int ahead_ = 0;  // chunks loaded but not yet stored
};

#endif

}  // namespace ark::device
