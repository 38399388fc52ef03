// The tasks that measure a machine's costs (csrc/compiler/runtime/measure.cpp): just the inner loops of the kernels
// that plans call, since anything more would add to the compile time.
#pragma once

#include "cpu/matmul.hpp"

#define ARK_MEASURED extern "C" __attribute__((visibility("default")))

namespace ark::cpu {

struct Context;

inline constexpr int64_t kMeasuredDepth = 512, kMeasuredColumns = 128;
inline constexpr Product kMeasured{.depth = kMeasuredDepth,
                                   .a_row = kMeasuredDepth,
                                   .a_depth = 1,
                                   .b_depth = 1,
                                   .b_column = kMeasuredDepth,
                                   .out_row = kMeasuredColumns,
                                   .out_column = 1,
                                   .bias_row = 0,
                                   .bias_column = 0};

}  // namespace ark::cpu

// Depth, columns and rows of the products.
ARK_MEASURED const int64_t ark_measured_shape[3] = {ark::cpu::kMeasuredDepth, ark::cpu::kMeasuredColumns,
                                                    ark::cpu::kRowBlock};

// One row times a matrix: bound by memory.
ARK_MEASURED void ark_measured_row(const ark::cpu::Context&, char* const* p, int64_t begin, int64_t end) {
  using namespace ark::cpu;
  const auto *a = reinterpret_cast<const float*>(p[0]), *b = reinterpret_cast<const float*>(p[1]);
  for (int64_t c = begin; c < end; c += kStreams)
    dot_tile<1, kStreams>(kMeasured, a, kMeasuredDepth, b, reinterpret_cast<float*>(p[2]),
                          static_cast<const NoBias*>(nullptr), 0, c);
}

// A block of rows times the same matrix: bound by arithmetic.
ARK_MEASURED void ark_measured_block(const ark::cpu::Context&, char* const* p, int64_t begin, int64_t end) {
  using namespace ark::cpu;
  const auto *a = reinterpret_cast<const float*>(p[0]), *b = reinterpret_cast<const float*>(p[1]);
  for (int64_t c = begin; c < end; c += kTileColumns)
    for (int64_t r = 0; r < kRowBlock; r += kTileRows)
      dot_tile<kTileRows, kTileColumns>(kMeasured, a + r * kMeasuredDepth, kMeasuredDepth, b,
                                        reinterpret_cast<float*>(p[2]), static_cast<const NoBias*>(nullptr), r, c);
}

// A pointwise operator with little arithmetic: reads two operands, writes one result.
ARK_MEASURED void ark_measured_add(const ark::cpu::Context&, char* const* p, int64_t begin, int64_t end) {
  using namespace ark::cpu;
  const auto *a = reinterpret_cast<const float*>(p[0]), *b = reinterpret_cast<const float*>(p[1]);
  for_columns(begin, end, [&](int64_t c, auto lanes) ARK_BODY {
    store(reinterpret_cast<float*>(p[2]) + c, load(a + c, lanes) + load(b + c, lanes), lanes);
  });
}

// GELU, which the planner counts as 14 operations: bound by arithmetic.
ARK_MEASURED void ark_measured_gelu(const ark::cpu::Context&, char* const* p, int64_t begin, int64_t end) {
  using namespace ark::cpu;
  const auto* a = reinterpret_cast<const float*>(p[0]);
  for_columns(begin, end, [&](int64_t c, auto lanes) ARK_BODY {
    const Floats x = load(a + c, lanes);
    store(reinterpret_cast<float*>(p[2]) + c, x * 0.5f * (erf(x * 0.70710678f) + 1.0f), lanes);
  });
}

// One number: measures the overhead of a task.
ARK_MEASURED void ark_measured_nothing(const ark::cpu::Context&, char* const* p, int64_t, int64_t) {
  *reinterpret_cast<float*>(p[2]) = *reinterpret_cast<const float*>(p[0]);
}
