// Reductions for the architecture's baseline: SSE2 on x86-64, NEON on aarch64.
//
// Only code after the pragmas may use the instruction set. All other headers come first, so that no inline function of
// the standard library is compiled for it. Contraction into fused multiply-adds is off.
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "reduce_isa.hpp"

#define ARK_REDUCE_ISA baseline
#define ARK_REDUCE_BYTES 16

#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC push_options
#pragma GCC optimize("-ffp-contract=off")
#endif
#include "reduce_kernels.hpp"
#if !defined(__clang__)
#pragma GCC pop_options
#endif

namespace ark {

ReduceFn find_reduce_baseline(DType dtype, ReduceOp op) {
  return baseline::find(dtype, op);
}

ConvertFn find_converter_baseline(DType dtype, bool widen) {
  return baseline::find_converter(dtype, widen);
}

}  // namespace ark
