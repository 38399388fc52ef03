// Element-wise reduction of one buffer per rank: the project's one arithmetic.
//
// out[i] = round(finish(src[0][i] op src[1][i] op ... op src[ranks-1][i])), strictly in rank order. 8- and 16-bit
// floats are widened to float32 and rounded once at the end (nearest even, PyTorch's conversions); float32 and
// float64 add in their own precision; complex numbers as pairs of their parts; integers wrap; any byte but 0 is a
// true bool; no fused multiply-add anywhere. AVG divides by the number of ranks before the rounding. MIN and MAX let
// a NaN win and hold -0 below +0 (IEEE 754-2019 minimum, maximum). Every NaN in a result is the positive quiet NaN
// with an empty payload. The bits therefore depend on inputs and rank count alone, not on instruction set, chunking,
// alignment or the calling thread's floating-point mode (torch.set_flush_denormal). Implementations for AVX-512,
// AVX2 and baseline x86-64 live in one binary and are chosen once at run time.
#pragma once

#include <cstddef>

#include "util/dtype.hpp"

namespace ark {

// Reduces `count` elements. sources[r] is rank r's data; `out` and, when not null, `out2` both receive the result
// (a second copy costs no second pass). out or out2 may be one of the sources (same address), never a partial
// overlap. `factors` holds one multiplier a rank for premul_sum, applied in the accumulation type before adding; for
// AVG, where sources are sums already (staged_reduce.hpp), what to divide by instead of the number of sources; null
// otherwise. No pointer needs alignment beyond one byte.
using ReduceFn = void (*)(void* out, void* out2, const void* const* sources, int ranks, size_t count,
                          const double* factors);

// Null when the operation has no meaning for the type (why_unsupported says why).
ReduceFn find_reduce(DType dtype, ReduceOp op);

// One clause for an error message ("MIN orders numbers and complex64 has no order"); null when supported.
const char* why_unsupported(DType dtype, ReduceOp op);

// Scalars of a type that is added up in float32 (the 8- and 16-bit floats; complex32 as pairs) to float32 as they are,
// or float32 to such scalars, rounded as a reduction's result is. `count` scalars; in and out apart.
using ConvertFn = void (*)(void* out, const void* in, size_t count);
ConvertFn find_widen(DType dtype);   // null: the type is added up as it is
ConvertFn find_narrow(DType dtype);  // likewise

// Which instruction set is in use: "avx512", "avx2" or "baseline". `force` (tests): same names, null restores.
const char* reduce_isa();
void force_reduce_isa(const char* isa);

}  // namespace ark
