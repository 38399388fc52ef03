// The kernel tables of the instruction sets, one in each reduce_<isa>.cpp. Private to reduce*.cpp.
#pragma once

#include "reduce.hpp"

namespace ark {

ReduceFn find_reduce_baseline(DType dtype, ReduceOp op);
#if defined(__x86_64__)
ReduceFn find_reduce_avx2(DType dtype, ReduceOp op);    // needs AVX2 and F16C
ReduceFn find_reduce_avx512(DType dtype, ReduceOp op);  // needs AVX-512 F, BW, DQ and VL
#endif

}  // namespace ark
