// Quantisation of buckets on the CPU: protocol/quantize.hpp's arithmetic in vectors, and sums at a part's owner.
//
// Each call works on one bucket and passes over its memory once (a bucket stays in the L1 cache between its two
// passes). All instruction sets give the same bytes, and they are those of protocol/quantize.hpp; the reductions'
// choice of a set (collectives/cpu/reduce/reduce.hpp) is this one's, too. Results do not depend on the calling thread's
// floating-point mode. Pointers need no alignment.
#pragma once

#include <cstddef>
#include <cstdint>

#include "protocol/quantize.hpp"
#include "util/dtype.hpp"

namespace ark::compressed {

// What a residual is to a quantisation.
enum class Feedback {
  none,
  replaced,  // added to the elements; then holds what the quantisation lost
  added_to,  // what the quantisation of a sum lost, times `weight`, is added
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
  // The kernel's type is the input's. `added_to` takes float32 sums, and no exact bucket.
  void (*encode)(const EncodeJob& job, const quantize::Rule& rule, Feedback feedback);
  // To elements of the kernel's type.
  void (*decode)(const DecodeJob& job);
  // To float32: replaces (the first rank) or adds. The kernel's type is that of exact buckets.
  void (*accumulate)(const DecodeJob& job, bool first);
  // float32 sums to elements of the kernel's type.
  void (*store)(const float* sums, void* output, uint32_t numel);
  void (*divide)(float* sums, uint32_t numel, float by);
};

// Of float32, bfloat16 or float16; null for other types.
const QuantizerKernels* find_quantizer(DType dtype);

}  // namespace ark::compressed
