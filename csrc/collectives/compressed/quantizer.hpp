// Bucket quantisation on the CPU: the arithmetic of protocol/quantize.hpp in vectors, and the sums at a part's owner.
//
// Each call handles one bucket, which stays in the L1 cache between its two passes. All instruction sets produce the
// bytes of protocol/quantize.hpp, and they follow the reductions' choice of a set (collectives/cpu/reduce/reduce.hpp).
// Results do not depend on the calling thread's floating-point mode. Pointers need no alignment.
#pragma once

#include <cstddef>
#include <cstdint>

#include "protocol/quantize.hpp"
#include "util/dtype.hpp"

namespace ark::compressed {

// How a quantisation uses the residual.
enum class Feedback {
  none,
  replaced,  // is added to the elements, then holds the quantisation error
  added_to,  // the error of quantising a sum, times `weight`, is added to it
};

struct EncodeJob {
  const void* input;
  float* residual;  // null with Feedback::none
  unsigned char* record;
  uint32_t numel, bits, number;
  float weight;
};

struct DecodeJob {
  const unsigned char* record;
  void* output;
  uint32_t numel, bits;
  quantize::Format format;
};

struct QuantizerKernels {
  // Input elements have the kernel's type. With `added_to` they are float32 sums, and no bucket is exact.
  void (*encode)(const EncodeJob& job, const quantize::Rule& rule, Feedback feedback);
  // Decodes to elements of the kernel's type.
  void (*decode)(const DecodeJob& job);
  // Decodes to float32 sums: overwrites them for the first rank, else adds. Exact buckets have the kernel's type.
  void (*accumulate)(const DecodeJob& job, bool first);
  // Converts float32 sums to elements of the kernel's type.
  void (*store)(const float* sums, void* output, uint32_t numel);
  void (*divide)(float* sums, uint32_t numel, float by);
};

// Returns the kernels for float32, bfloat16 or float16; null for other types.
const QuantizerKernels* find_quantizer(DType dtype);

}  // namespace ark::compressed
