// PTX instructions for matrix products: loads with cache hints, asynchronous copies, tensor core operations.
#pragma once

#include "cuda/loop/hinted.cuh"

namespace ark::loop {

// 16 bytes: the most that a thread loads at once.
struct alignas(16) Chunk {
  uint32 words[4];
};

template <class T>
inline constexpr int kPerChunk = 16 / sizeof(T);

template <class T>
ARK_LOOP float chunk_element(const Chunk& chunk, int i) {
  if constexpr (kSame<T, float>) {
    return bits_as<float>(chunk.words[i]);
  } else if constexpr (kSame<T, bf16>) {
    return bits_as<float>(i % 2 == 0 ? chunk.words[i / 2] << 16 : chunk.words[i / 2] & 0xffff0000u);
  } else {
    return widen(f16{static_cast<uint16>(i % 2 == 0 ? chunk.words[i / 2] : chunk.words[i / 2] >> 16)});
  }
}
template <class T>
ARK_LOOP uint32 bits_of(T x) {
  if constexpr (kSame<T, float>)
    return bits_as<uint32>(x);
  else
    return x.bits;
}
template <class T>
ARK_LOOP void set_element(Chunk& chunk, int i, T x) {
  if constexpr (kSame<T, float>)
    chunk.words[i] = bits_of(x);
  else
    chunk.words[i / 2] |= bits_of(x) << (i % 2 * 16);
}

ARK_LOOP float fused(float a, float b, float c) {
  return __fmaf_rn(a, b, c);
}

// 16-byte loads of data that only this SM uses: with a hint, they bypass the first-level cache.
template <Cache kCache>
class ChunkLoads {
 public:
  ARK_LOOP ChunkLoads() {
    if constexpr (kHasPolicy) policy_ = cache_policy<kCache, true>();
  }
  // Unless `wanted`, `chunk` keeps its contents.
  ARK_LOOP void load(Chunk& chunk, const void* from, bool wanted) const {
    if constexpr (kHasPolicy)
      asm volatile(
          "{\n"
          ".reg .pred wanted;\n"
          "setp.ne.b32 wanted, %6, 0;\n"
          "@wanted ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;\n"
          "}"
          : "+r"(chunk.words[0]), "+r"(chunk.words[1]), "+r"(chunk.words[2]), "+r"(chunk.words[3])
          : "l"(from), "l"(policy_), "r"(static_cast<int>(wanted)));
    else if constexpr (kCache == Cache::no_allocate)
      asm volatile(
          "{\n"
          ".reg .pred wanted;\n"
          "setp.ne.b32 wanted, %5, 0;\n"
          "@wanted ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
          "}"
          : "+r"(chunk.words[0]), "+r"(chunk.words[1]), "+r"(chunk.words[2]), "+r"(chunk.words[3])
          : "l"(from), "r"(static_cast<int>(wanted)));
    else
      asm volatile(
          "{\n"
          ".reg .pred wanted;\n"
          "setp.ne.b32 wanted, %5, 0;\n"
          "@wanted ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n"
          "}"
          : "+r"(chunk.words[0]), "+r"(chunk.words[1]), "+r"(chunk.words[2]), "+r"(chunk.words[3])
          : "l"(from), "r"(static_cast<int>(wanted)));
  }
  // Returns zeros unless `wanted`.
  ARK_LOOP Chunk operator()(const void* from, bool wanted) const {
    Chunk chunk{};
    load(chunk, from, wanted);
    return chunk;
  }

 private:
  static constexpr bool kHasPolicy = kCache == Cache::evict_first || kCache == Cache::evict_last;
  uint64 policy_ = 0;
};

// ---- Asynchronous copies to shared memory; wait_copies() waits for them.

// Keeps the value in a register instead of recomputing it at each use.
ARK_LOOP uint32 pinned(uint32 x) {
  asm volatile("" : "+r"(x));
  return x;
}
ARK_LOOP void copy_16(uint32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// The first `valid` bytes of 16, then zeros.
ARK_LOOP void copy_16(uint32 to, const void* from, int valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid) : "memory");
}
ARK_LOOP void copy_4(void* to, const void* from, int valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid)
               : "memory");
}
ARK_LOOP void end_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until all but the last kGroups groups of this thread's copies have completed.
template <int kGroups>
ARK_LOOP void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// ---- Tensor cores

// A float32 as tensor cores multiply it: its lower 13 bits do not count.
struct tf32 {
  uint32 bits;
};
// To nearest; of a tie away from zero.
ARK_LOOP uint32 rounded_to_tf32(uint32 x) {
  uint32 y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(bits_as<float>(x)));
  return y;
}

// Four matrices of 8 rows of 16 bytes. Lane l names row l % 8 of matrix l / 8, and gets elements 2 * (l % 4) and the
// next one of row l / 4 of each; kTransposed: of column l / 4. Of 32-bit elements it gets the one at l % 4, and none
// can be transposed.
template <bool kTransposed>
ARK_LOOP void load_matrices(uint32 (&to)[4], const void* row) {
  if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// sums (16 x 8) += a (16 x 16) b (16 x 8). Lane l has sums [l / 4][2 * (l % 4)], the next one, both also 8 rows on. Of
// tf32 the depth is 8.
template <class T>
ARK_LOOP void multiply_add(float (&sums)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  if constexpr (kSame<T, bf16>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else if constexpr (kSame<T, tf32>)
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace ark::loop
