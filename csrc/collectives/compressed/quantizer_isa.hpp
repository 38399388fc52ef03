// The kernel tables of the instruction sets, one in each quantizer_<isa>.cpp. Private to quantizer*.cpp.
#pragma once

#include "quantizer.hpp"

namespace ark::compressed {

const QuantizerKernels* find_quantizer_baseline(DType dtype);
#if defined(__x86_64__)
const QuantizerKernels* find_quantizer_avx2(DType dtype);    // what find_reduce_avx2 needs
const QuantizerKernels* find_quantizer_avx512(DType dtype);  // what find_reduce_avx512 needs
#endif

}  // namespace ark::compressed
