// One kernel table per instruction set, each in its reduce_<isa>.cpp. Private to reduce*.cpp.
#pragma once

#include "reduce.hpp"

namespace ark {

ReduceFn find_reduce_baseline(DType dtype, ReduceOp op);
ConvertFn find_converter_baseline(DType dtype, bool widen);
#if defined(__x86_64__)
ReduceFn find_reduce_avx2(DType dtype, ReduceOp op);  // needs AVX2 and F16C
ConvertFn find_converter_avx2(DType dtype, bool widen);
ReduceFn find_reduce_avx512(DType dtype, ReduceOp op);  // needs AVX-512 F, BW, DQ and VL
ConvertFn find_converter_avx512(DType dtype, bool widen);
#endif

}  // namespace ark
