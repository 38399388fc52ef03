// The steps of compressed collectives on CPU tensors; PyTorch's threads share the buckets.
#include <ATen/Parallel.h>

#include <algorithm>

#include "collectives/compressed/quantizer.hpp"
#include "ops/compressed.hpp"

namespace ark::ops {

namespace {

using compressed::Bucket;

constexpr int64_t kBucketGrain = 32;

template <class Body>
void each_bucket(const Coding& coding, const compressed::Part& part, Body&& body) {
  at::parallel_for(0, static_cast<int64_t>(part.buckets), kBucketGrain, [&](int64_t from, int64_t to) {
    compressed::for_buckets(part, coding.element_bytes, static_cast<uint64_t>(from), static_cast<uint64_t>(to), body);
  });
}

const compressed::QuantizerKernels& kernels_of(const Coding& coding) {
  return *compressed::find_quantizer(coding.dtype);
}

const unsigned char* bytes_of(const at::Tensor& tensor) {
  return static_cast<const unsigned char*>(tensor.const_data_ptr());
}
unsigned char* bytes_of(at::Tensor& tensor) {
  return static_cast<unsigned char*>(tensor.mutable_data_ptr());
}

float* residual_of(const at::Tensor* residual) {
  return residual == nullptr ? nullptr : static_cast<float*>(residual->data_ptr());
}

void note_nonfinite(const Result& result) {
  if (result.nonfinite == nullptr) return;
  const at::Tensor bad = at::isfinite(result.elements).logical_not_().nonzero();
  if (bad.numel() != 0) *result.nonfinite = std::min(*result.nonfinite, bad.const_data_ptr<int64_t>()[0]);
}

// Calls finish(bucket, sums) for every bucket of the part with the sums over all ranks.
template <class Finish>
void each_sum(const Coding& coding, const PartSum& sum, Finish&& finish) {
  const auto& kernels = kernels_of(coding);
  const unsigned char* const received = bytes_of(*sum.received);
  each_bucket(coding, *sum.part, [&](const Bucket& bucket) {
    alignas(64) float sums[quantize::kMostBucket];
    for (int r = 0; r < sum.ranks; ++r) {
      const unsigned char* const record = received + static_cast<uint64_t>(r) * sum.part->bytes + bucket.at;
      kernels.accumulate({record, sums, bucket.numel, bucket.piece->bits, coding.rule.format}, r == 0);
    }
    if (sum.average) kernels.divide(sums, bucket.numel, static_cast<float>(sum.ranks));
    finish(bucket, sums);
  });
}

}  // namespace

void encode_parts(const Coding& coding, const std::vector<PlacedPart>& parts, const at::Tensor& input,
                  const at::Tensor* residual, at::Tensor& codes) {
  const auto& kernels = kernels_of(coding);
  const unsigned char* const from = bytes_of(input);
  float* const owed = residual_of(residual);
  unsigned char* const to = bytes_of(codes);
  const auto feedback = owed == nullptr ? compressed::Feedback::none : compressed::Feedback::replaced;
  for (const auto& [part, begin] : parts) {
    each_bucket(coding, *part, [&, begin = begin](const Bucket& bucket) {
      kernels.encode({from + bucket.element * coding.element_bytes, owed == nullptr ? nullptr : owed + bucket.element,
                      to + begin + bucket.at, bucket.numel, bucket.piece->bits, bucket.number, 1.0f},
                     coding.rule, feedback);
    });
  }
}

void decode_parts(const Coding& coding, const std::vector<PlacedPart>& parts, const at::Tensor& codes,
                  const Result& result) {
  const auto& kernels = kernels_of(coding);
  const unsigned char* const from = bytes_of(codes);
  unsigned char* const to = bytes_of(result.elements);
  for (const auto& [part, begin] : parts) {
    each_bucket(coding, *part, [&, begin = begin](const Bucket& bucket) {
      kernels.decode({from + begin + bucket.at, to + bucket.element * coding.element_bytes, bucket.numel,
                      bucket.piece->bits, coding.rule.format});
    });
  }
  note_nonfinite(result);
}

void reduce_part(const Coding& coding, const PartSum& sum, const at::Tensor* residual, at::Tensor& codes) {
  const auto& kernels = kernels_of(coding);
  const auto& floats = *compressed::find_quantizer(DType::f32);
  quantize::Rule rule = coding.rule;
  rule.stage = quantize::Stage::owner;
  float* const owed = residual_of(residual);
  const auto feedback = owed == nullptr ? compressed::Feedback::none : compressed::Feedback::added_to;
  unsigned char* const to = bytes_of(codes);
  each_sum(coding, sum, [&](const Bucket& bucket, const float* sums) {
    if (bucket.piece->bits == 0) {
      kernels.store(sums, to + bucket.at, bucket.numel);
      return;
    }
    floats.encode({sums, owed == nullptr ? nullptr : owed + bucket.element, to + bucket.at, bucket.numel,
                   bucket.piece->bits, bucket.number, sum.average ? static_cast<float>(sum.ranks) : 1.0f},
                  rule, feedback);
  });
}

void reduce_part_to_elements(const Coding& coding, const PartSum& sum, const Result& result) {
  if (sum.part->pieces.empty()) return;
  const auto& kernels = kernels_of(coding);
  const uint64_t first = sum.part->pieces.front().element;
  unsigned char* const to = bytes_of(result.elements);
  each_sum(coding, sum, [&](const Bucket& bucket, const float* sums) {
    kernels.store(sums, to + (bucket.element - first) * coding.element_bytes, bucket.numel);
  });
  note_nonfinite(result);
}

}  // namespace ark::ops
