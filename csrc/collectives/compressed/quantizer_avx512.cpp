// Quantisation for x86-64 with AVX-512 F, BW, DQ and VL.
//
// Only code after the pragmas may use the instruction set. All other headers come first, so that no inline function of
// the standard library is compiled for it. Contraction into fused multiply-adds is off.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "quantizer_isa.hpp"

#define ARK_REDUCE_ISA avx512
#define ARK_REDUCE_BYTES 64

#if defined(__clang__)
#pragma clang fp contract(off)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c")
#pragma GCC optimize("-ffp-contract=off")
#endif
#include "quantizer_kernels.hpp"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace ark::compressed {

const QuantizerKernels* find_quantizer_avx512(DType dtype) {
  return avx512::quantizer::find(dtype);
}

}  // namespace ark::compressed
#endif
