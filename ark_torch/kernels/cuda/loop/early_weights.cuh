// The end of a product's weights, in shared memory before the product's turn.
//
// Between two products memory would rest: sums are put together, results travel, a norm is computed. What is brought
// into the second-level cache meanwhile is no gain, as that cache is hardly faster than memory. So the last batch of
// columns that a product of few rows takes (csrc/plan/early_weights.hpp: 64 KB where it is whole) is copied into shared
// memory by the bulk copy engine while the product before it computes and waits. The product streams what comes before
// from memory and finds its end here, while the next one's end is under way.
//
// Two areas take turns; number n of a launch's copies goes to area n % 2, the n / 2-th time. One warp asks for number
// n + 2 when the task behind number n's has its turn, so behind the sync() that ends number n's, in which all threads
// have read the area. A barrier of each area counts the bytes that have landed (complete_tx); a wait for its phase's
// parity makes them visible to the waiting thread. All threads wait at the task's end too, whether they have used the
// bytes or not (weights at odd addresses are not copied), so that no phase is passed by, and who leaves early waits for
// what is under way: nothing lands in shared memory that is another block's by then. These waits have no bound of their
// own: a copy within the GPU ends, or ends the context.
#pragma once

#include "cuda/loop/launch.cuh"
#if defined(__CUDACC__)
#include "cuda/loop/ptx.cuh"
#endif

namespace ark::loop {

// Of so many columns that a warp takes together: those that are copied.
template <int kTogether>
inline constexpr int kEarlyColumns = kTogether == 8 ? 7 : kTogether;

// Of a LoadEntry.
enum Early : int { kNotEarly = 0, kEarly = 1, kLastEarly = 2 };  // kLastEarly: the last entry of the task that reads it

#if defined(__CUDACC__)

#if defined(ARK_LOOP_EARLY)

struct EarlyWeights {
  uint64 landed[2];
  uint32 asked, used;  // numbers of copies
};
ARK_LOOP EarlyWeights& early_weights() {
  __shared__ EarlyWeights now;
  return now;
}

ARK_LOOP uint32 early_area(uint32 number) {
  return shared_address(workspace()) + kWorkspaceBytes + number % 2 * kEarlyBytes;
}
ARK_LOOP uint32 early_barrier(uint32 number) {
  return shared_address(early_weights().landed + number % 2);
}

// By one thread, before a sync().
ARK_LOOP void begin_early() {
  ARK_UNROLL for (uint32 i = 0; i < 2; ++i) asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(early_barrier(i)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  early_weights().asked = early_weights().used = 0;
}

ARK_LOOP void await_early(uint32 number) {
  const uint32 barrier = early_barrier(number), parity = number / 2 % 2;
  uint32 landed;
  do {
    asm volatile(
        "{\n"
        ".reg .pred landed;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 landed, [%1], %2;\n"
        "selp.u32 %0, 1, 0, landed;\n"
        "}"
        : "=r"(landed)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (landed == 0);
}

ARK_LOOP uint32 used_early() {
  return *const_cast<volatile uint32*>(&early_weights().used);
}

// By one warp, of which no other asks.
ARK_LOOP void ask_early(const char* from, const LoadEntry& load) {
  volatile uint32* const asked = &early_weights().asked;
  const uint32 number = *asked, barrier = early_barrier(number);
  if (((bits_as<int64_t>(from) | load.bytes | load.stride) & 15) == 0) {
    if (lane() == 0)
      asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier),
                   "r"(load.rows * load.bytes)
                   : "memory");
    __syncwarp();
    uint64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
    ARK_ROLLED for (int row = lane(); row < load.rows; row += 32) asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(early_area(number) + load.to + row * load.pitch),
        "l"(from + row * load.stride), "r"(load.bytes), "r"(barrier), "l"(policy)
        : "memory");
  }
  __syncwarp();
  if (load.early == kLastEarly && lane() == 0) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
    *asked = number + 1;
  }
  __syncwarp();
}

// Of the task that runs: kCount chunks that lie `apart` bytes from each other, from byte `at` of its area on; zeros
// unless `wanted`.
template <int kCount>
ARK_LOOP void take_early(Chunk* to, int at, int apart, bool wanted) {
  const uint32 number = used_early();
  await_early(number);
  const uint32 from = early_area(number) + at;
  ARK_UNROLL for (int i = 0; i < kCount; ++i) {
    Chunk chunk{};
    if (wanted)
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(chunk.words[0]), "=r"(chunk.words[1]), "=r"(chunk.words[2]), "=r"(chunk.words[3])
                   : "r"(from + i * apart)
                   : "memory");
    to[i] = chunk;
  }
}

// By all threads at the end of such a task, before the sync() that ends it, and by one behind that.
ARK_LOOP void end_early() {
  await_early(used_early());
}
ARK_LOOP void count_early() {
  early_weights().used = used_early() + 1;
}

// By all threads that leave early, behind a sync().
ARK_LOOP void leave_early() {
  const uint32 asked = *const_cast<volatile uint32*>(&early_weights().asked);
  for (uint32 number = used_early(); number != asked; ++number) await_early(number);
}

#else  // plans without

ARK_LOOP void begin_early() {}
ARK_LOOP void ask_early(const char*, const LoadEntry&) {}
template <int kCount>
ARK_LOOP void take_early(Chunk*, int, int, bool) {}
ARK_LOOP void end_early() {}
ARK_LOOP void count_early() {}
ARK_LOOP void leave_early() {}

#endif

#endif

}  // namespace ark::loop
