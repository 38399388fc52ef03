// Reductions for x86-64 with AVX2 and F16C.
//
// Only code after the pragmas may use the instruction set. All other headers come first, so that no inline function of
// the standard library is compiled for it. Contraction into fused multiply-adds is off.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "reduce_isa.hpp"

#define ARK_REDUCE_ISA avx2
#define ARK_REDUCE_BYTES 32

#if defined(__clang__)
#pragma clang fp contract(off)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#pragma GCC optimize("-ffp-contract=off")
#endif
#include "reduce_kernels.hpp"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace ark {

ReduceFn find_reduce_avx2(DType dtype, ReduceOp op) {
  return avx2::find(dtype, op);
}

ConvertFn find_converter_avx2(DType dtype, bool widen) {
  return avx2::find_converter(dtype, widen);
}

}  // namespace ark
#endif
