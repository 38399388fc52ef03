// The warp group instructions of sm_90a (wgmma), by which four warps multiply matrices in shared memory. tile_group.cuh
// and attention_groups.cuh use them.
#pragma once

#include "cuda/loop/ptx.cuh"

namespace ark::loop {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
inline constexpr bool kHasGroupMultiply = true;
#else
inline constexpr bool kHasGroupMultiply = false;
#endif

// The lower half of a matrix descriptor: a matrix in shared memory with lines of 128 bytes, whose chunks are swizzled
// by the line's number modulo 8. If lines run across, the next 64 elements are `next` bytes further. The upper half
// holds the swizzle mode and the size of eight lines, 1,024 bytes.
ARK_LOOP uint32 shared_matrix(uint32 at, int next) {
  return at / 16 | static_cast<uint32>(next / 16) << 16;
}
ARK_LOOP uint64 moved_matrix(uint32 matrix, int bytes) {
  constexpr uint64 kEightLines = 1024 / 16, kExchanged = 1;
  return matrix + bytes / 16 | kEightLines << 32 | kExchanged << 62;
}

// Before the first multiplication: makes earlier writes to its sum registers visible.
ARK_LOOP void begin_group_multiply() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
ARK_LOOP void end_group_multiply() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Makes this thread's writes to shared memory visible to the multiplications of all threads that it then meets.
ARK_LOOP void show_to_group_multiply() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Waits until all but the last kLeft groups of this warp's multiplications are done.
template <int kLeft>
ARK_LOOP void wait_group_multiply() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}
// Waits for all. The sums are operands, so that they are not read before.
template <int kOver>
ARK_LOOP void wait_group_multiply(float (&sums)[kOver][4]) {
  wait_group_multiply<0>();
  ARK_UNROLL for (int j = 0; j < kOver; ++j)
      ARK_UNROLL for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(sums[j][e])::"memory");
}

#define ARK_SUMS(j) "+f"(sums[j][0]), "+f"(sums[j][1]), "+f"(sums[j][2]), "+f"(sums[j][3])
// R, C, X, Y: numbers of the operands behind the registers. Half types have both orders of lines; float8 and tf32 (X:
// whether to add) are adjacent along the depth.
#define ARK_GROUP_MULTIPLY(SIZE, TYPE, REGISTERS, R, C, X, Y, ...)                                         \
  asm volatile("wgmma.mma_async.sync.aligned." SIZE "k16.f32." TYPE "." TYPE " {" REGISTERS "}, " R ", " C \
               ", 1, 1, 1, " X ", " Y ";\n"                                                                \
               : __VA_ARGS__                                                                               \
               : "l"(rows), "l"(columns), "n"(kAAcross), "n"(kBAcross))
#define ARK_GROUP_MULTIPLY_ALONG(SIZE, TYPES, REGISTERS, R, C, X, ...)                                     \
  asm volatile("wgmma.mma_async.sync.aligned." SIZE TYPES " {" REGISTERS "}, " R ", " C ", " X ", 1, 1;\n" \
               : __VA_ARGS__                                                                               \
               : "l"(rows), "l"(columns), "n"(kAdd))
#define ARK_GROUP_MULTIPLY_OF(SIZE, REGISTERS, R, C, X, Y, ...)                           \
  if constexpr (kSame<T, e4m3>)                                                           \
    ARK_GROUP_MULTIPLY_ALONG(SIZE, "k32.f32.e4m3.e4m3", REGISTERS, R, C, X, __VA_ARGS__); \
  else if constexpr (kSame<T, tf32>)                                                      \
    ARK_GROUP_MULTIPLY_ALONG(SIZE, "k8.f32.tf32.tf32", REGISTERS, R, C, X, __VA_ARGS__);  \
  else if constexpr (kSame<T, bf16>)                                                      \
    ARK_GROUP_MULTIPLY(SIZE, "bf16", REGISTERS, R, C, X, Y, __VA_ARGS__);                 \
  else                                                                                    \
    ARK_GROUP_MULTIPLY(SIZE, "f16", REGISTERS, R, C, X, Y, __VA_ARGS__)

// sums (64 x 8 kOver) += a (64 x 16) b (16 x 8 kOver), by one warp group; each warp has 16 rows, as in multiply_add. Of
// float8 the depth is 32, of tf32 8; without kAdd, sums are replaced, of float8 alone.
template <class T, bool kAAcross, bool kBAcross, bool kAdd = true, int kOver>
ARK_LOOP void group_multiply_add(float (&sums)[kOver][4], uint64 rows, uint64 columns) {
  static_assert(kSame<T, e4m3> || kAdd);
  static_assert(!(kSame<T, e4m3> || kSame<T, tf32>) || (!kAAcross && !kBAcross));
  static_assert(kOver == 4 || kOver == 8 || kOver == 12 || kOver == 16 || kOver == 32);
  if constexpr (kOver == 4)
    ARK_GROUP_MULTIPLY_OF("m64n32", "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15", "%16",
                          "%17", "%18", "%19", ARK_SUMS(0), ARK_SUMS(1), ARK_SUMS(2), ARK_SUMS(3));
  if constexpr (kOver == 8)
    ARK_GROUP_MULTIPLY_OF("m64n64",
                          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
                          "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31",
                          "%32", "%33", "%34", "%35", ARK_SUMS(0), ARK_SUMS(1), ARK_SUMS(2), ARK_SUMS(3), ARK_SUMS(4),
                          ARK_SUMS(5), ARK_SUMS(6), ARK_SUMS(7));
  if constexpr (kOver == 12)
    ARK_GROUP_MULTIPLY_OF("m64n96",
                          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
                          "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "
                          "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47",
                          "%48", "%49", "%50", "%51", ARK_SUMS(0), ARK_SUMS(1), ARK_SUMS(2), ARK_SUMS(3), ARK_SUMS(4),
                          ARK_SUMS(5), ARK_SUMS(6), ARK_SUMS(7), ARK_SUMS(8), ARK_SUMS(9), ARK_SUMS(10), ARK_SUMS(11));
  if constexpr (kOver == 16)
    ARK_GROUP_MULTIPLY_OF(
        "m64n128",
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "
        "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63",
        "%64", "%65", "%66", "%67", ARK_SUMS(0), ARK_SUMS(1), ARK_SUMS(2), ARK_SUMS(3), ARK_SUMS(4), ARK_SUMS(5),
        ARK_SUMS(6), ARK_SUMS(7), ARK_SUMS(8), ARK_SUMS(9), ARK_SUMS(10), ARK_SUMS(11), ARK_SUMS(12), ARK_SUMS(13),
        ARK_SUMS(14), ARK_SUMS(15));
  if constexpr (kOver == 32)
    ARK_GROUP_MULTIPLY_OF(
        "m64n256",
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
        "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
        "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "
        "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, "
        "%101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, "
        "%117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127",
        "%128", "%129", "%130", "%131", ARK_SUMS(0), ARK_SUMS(1), ARK_SUMS(2), ARK_SUMS(3), ARK_SUMS(4), ARK_SUMS(5),
        ARK_SUMS(6), ARK_SUMS(7), ARK_SUMS(8), ARK_SUMS(9), ARK_SUMS(10), ARK_SUMS(11), ARK_SUMS(12), ARK_SUMS(13),
        ARK_SUMS(14), ARK_SUMS(15), ARK_SUMS(16), ARK_SUMS(17), ARK_SUMS(18), ARK_SUMS(19), ARK_SUMS(20), ARK_SUMS(21),
        ARK_SUMS(22), ARK_SUMS(23), ARK_SUMS(24), ARK_SUMS(25), ARK_SUMS(26), ARK_SUMS(27), ARK_SUMS(28), ARK_SUMS(29),
        ARK_SUMS(30), ARK_SUMS(31));
}

// The same, with each warp's 16 rows of a in registers, as in multiply_add.
#define ARK_GROUP_MULTIPLY_ROWS(TYPE)                                                                               \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE                                          \
               " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "  \
               "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, 1, 1, 1, %37;\n" \
               : ARK_SUMS(0), ARK_SUMS(1), ARK_SUMS(2), ARK_SUMS(3), ARK_SUMS(4), ARK_SUMS(5), ARK_SUMS(6),         \
                 ARK_SUMS(7)                                                                                        \
               : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "l"(columns), "n"(kBAcross))
template <class T, bool kBAcross>
ARK_LOOP void group_multiply_add(float (&sums)[8][4], const uint32 (&rows)[4], uint64 columns) {
  if constexpr (kSame<T, bf16>)
    ARK_GROUP_MULTIPLY_ROWS("bf16");
  else
    ARK_GROUP_MULTIPLY_ROWS("f16");
}

#undef ARK_GROUP_MULTIPLY_ROWS
#undef ARK_GROUP_MULTIPLY_OF
#undef ARK_GROUP_MULTIPLY_ALONG
#undef ARK_GROUP_MULTIPLY
#undef ARK_SUMS

}  // namespace ark::loop
