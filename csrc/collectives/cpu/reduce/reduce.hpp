// Element-wise reduction of one buffer per rank; all reductions on the CPU use this arithmetic.
//
// out[i] = round(finish(src[0][i] op src[1][i] op ... op src[ranks-1][i])), always in rank order, without fused
// multiply-adds. So the bits depend only on the inputs and the number of ranks, not on instruction set, chunking,
// alignment or the thread's floating-point mode (torch.set_flush_denormal). Kernels for AVX-512, AVX2 and baseline
// x86-64 are in one binary and selected at run time.
#pragma once

#include <cstddef>

#include "util/dtype.hpp"

namespace ark {

// Reduces `count` elements. sources[r] is rank r's data. `out` and, if not null, `out2` receive the result in one pass.
// Each may equal one of the sources, but must not partially overlap. `factors`: one multiplier per rank for premul_sum,
// applied in the accumulation type; for AVG of sums (staged_reduce.hpp), the divisor to use instead of the number of
// sources; otherwise null. Pointers need no alignment.
//
// 8- and 16-bit floats are widened to float32 and rounded once at the end (to nearest even, as PyTorch converts).
// float32 and float64 accumulate in their own precision, complex numbers as pairs. Integers wrap. Any byte but 0 is a
// true bool. AVG divides before rounding. MIN and MAX follow IEEE 754-2019 minimum and maximum: NaN wins, and -0 is
// below +0. Every NaN result is the positive quiet NaN with an empty payload.
using ReduceFn = void (*)(void* out, void* out2, const void* const* sources, int ranks, size_t count,
                          const double* factors);

// Returns null if the operation is undefined for the type (why_unsupported says why).
ReduceFn find_reduce(DType dtype, ReduceOp op);

// A clause for an error message ("MIN orders numbers and complex64 has no order"); null if supported.
const char* why_unsupported(DType dtype, ReduceOp op);

// Converts `count` scalars of a type that accumulates in float32 (8- and 16-bit floats; complex32 as pairs) to float32,
// or float32 back with the rounding of a reduction's result. in and out must not overlap.
using ConvertFn = void (*)(void* out, const void* in, size_t count);
ConvertFn find_widen(DType dtype);   // null: the type accumulates as it is
ConvertFn find_narrow(DType dtype);  // null: as find_widen

// The instruction set in use: "avx512", "avx2" or "baseline". `isa`: one of these, for tests; null restores the
// default.
const char* reduce_isa();
void force_reduce_isa(const char* isa);

}  // namespace ark
