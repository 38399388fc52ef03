// Compares the division of the experts' activation, which has no branch, with the processor's.
#include "cuda/fused/moe_product.cuh"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "cuda/formats.cuh"

namespace ark::device {
namespace {

// x * sigmoid(x) of each number of a half type, by a reciprocal that is `ulps` wrong.
template <class Decode>
void compare_quotients(Decode&& decode, int ulps, float tolerance) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float x = decode(bits), e = std::exp(-x), wanted = x / (1.0f + e);
    const float got = divide_by_one_and(e, x, [&](float d) {
      float about = 1.0f / d;
      for (int i = 0; i < std::abs(ulps) && std::isfinite(d); ++i)
        about = std::nextafter(about, ulps < 0 ? 0.0f : INFINITY);
      return about;
    });
    if (std::isnan(wanted) || std::isinf(wanted)) {
      ASSERT_TRUE(std::isnan(wanted) ? std::isnan(got) : got == wanted) << x;
    } else {
      ASSERT_LE(std::abs(got - wanted), std::abs(wanted) * tolerance) << x;
      ASSERT_EQ(std::signbit(got), std::signbit(wanted)) << x;
    }
  }
}

float bfloat16_of(uint32_t bits) {
  return std::bit_cast<float>(bits << 16);
}
float float16_of(uint32_t bits) {
  float low, high;
  decode_f16_pair(bits, low, high);
  return low;
}

TEST(MoeProduct, DividesAsTheProcessorDoes) {
  compare_quotients(bfloat16_of, 0, 0.0f);
  compare_quotients(float16_of, 0, 0.0f);
}

TEST(MoeProduct, CorrectsAReciprocalThatIsAnUlpWrong) {
  constexpr float kUlp = 0x1p-23f;
  for (const int ulps : {-1, 1}) {
    compare_quotients(bfloat16_of, ulps, kUlp);
    compare_quotients(float16_of, ulps, kUlp);
  }
}

}  // namespace
}  // namespace ark::device
