// One kernel table per instruction set, each in its quantizer_<isa>.cpp. Private to quantizer*.cpp.
#pragma once

#include "quantizer.hpp"

namespace ark::compressed {

const QuantizerKernels* find_quantizer_baseline(DType dtype);
#if defined(__x86_64__)
const QuantizerKernels* find_quantizer_avx2(DType dtype);    // same CPU features as find_reduce_avx2
const QuantizerKernels* find_quantizer_avx512(DType dtype);  // same CPU features as find_reduce_avx512
#endif

}  // namespace ark::compressed
