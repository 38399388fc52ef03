// Compares the vector kernels of quantisation with protocol/quantize.hpp bit for bit, for every instruction set of this
// CPU. Also tests the guarantees (errors, expectation, NaN) and Philox's known answers.
#include "collectives/compressed/quantizer.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "collectives/cpu/reduce/reduce.hpp"
#include "util/error.hpp"

namespace ark::compressed {
namespace {

using quantize::Format;
using quantize::Rounding;
using quantize::Rule;
using quantize::Scale;
using quantize::Stage;

constexpr unsigned char kPoison = 0xa5;
const uint32_t kSizes[] = {1, 2, 7, 8, 9, 31, 33, 63, 64, 65, 127, 128, 511, 512, 1000, 4095, 4096};

std::vector<const char*> sets() {
  std::vector<const char*> all;
  for (const char* isa : {"baseline", "avx2", "avx512"}) {
    try {
      force_reduce_isa(isa);
      all.push_back(isa);
    } catch (const Error&) {  // not available on this CPU
    }
  }
  force_reduce_isa(nullptr);
  return all;
}

struct Isa {
  explicit Isa(const char* name) { force_reduce_isa(name); }
  ~Isa() { force_reduce_isa(nullptr); }
};

std::vector<float> drawn(uint32_t count, unsigned seed, float scale = 3.0f) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> x(count);
  for (float& one : x) one = normal(generator);
  return x;
}

Scale scale_of(const std::vector<float>& x, Format format, uint32_t bits) {
  float low = x[0], high = x[0], largest = 0;
  for (const float one : x) {
    if (!quantize::is_finite(one)) return quantize::not_finite();
    low = std::min(low, one), high = std::max(high, one), largest = std::max(largest, std::fabs(one));
  }
  return format == Format::uniform ? quantize::uniform_scale(low, high, bits) : quantize::fp8_scale(largest);
}

struct Coded {
  std::vector<unsigned char> record;
  std::vector<float> values;
};

// Encodes one element after the other.
Coded reference(const std::vector<float>& x, uint32_t bits, const Rule& rule, uint32_t number) {
  const Scale scale = scale_of(x, rule.format, bits);
  Coded coded{std::vector<unsigned char>(quantize::record_bytes(x.size(), bits, 4)), std::vector<float>(x.size())};
  std::memcpy(coded.record.data(), &scale.base, 4);
  std::memcpy(coded.record.data() + 4, &scale.step, 4);
  for (uint32_t i = 0; i < x.size(); ++i) {
    const uint32_t chance = quantize::chance_of(quantize::random_of(rule, number, i / 8), i % 8);
    const bool uniform = rule.format == Format::uniform;
    const uint32_t code = uniform ? quantize::uniform_code(x[i], scale, bits, rule.rounding, chance)
                                  : quantize::fp8_code(x[i], scale, rule.rounding, chance);
    coded.values[i] =
        uniform ? quantize::uniform_value(code, scale.base, scale.step) : quantize::fp8_value(code, scale.base);
    for (uint32_t b = 0; b < bits; ++b) {
      const uint32_t at = i * bits + b;
      coded.record[quantize::kHeadBytes + at / 8] |= static_cast<unsigned char>((code >> b & 1) << at % 8);
    }
  }
  return coded;
}

std::vector<unsigned char> encoded(DType dtype, const void* x, uint32_t numel, uint32_t bits, const Rule& rule,
                                   uint32_t number, Feedback feedback = Feedback::none, float* residual = nullptr,
                                   float weight = 1.0f) {
  const size_t bytes = quantize::record_bytes(numel, bits, static_cast<uint32_t>(size_of(dtype)));
  std::vector<unsigned char> record(bytes + 64, kPoison);
  find_quantizer(dtype)->encode({x, residual, record.data(), numel, bits, number, weight}, rule, feedback);
  for (size_t i = bytes; i < record.size(); ++i) EXPECT_EQ(record[i], kPoison) << "wrote behind the record";
  record.resize(bytes);
  return record;
}

std::vector<float> decoded(const std::vector<unsigned char>& record, uint32_t numel, uint32_t bits, Format format) {
  std::vector<float> x(numel + 16, -7.0f);
  find_quantizer(DType::f32)->decode({record.data(), x.data(), numel, bits, format});
  for (size_t i = numel; i < x.size(); ++i) EXPECT_EQ(x[i], -7.0f) << "wrote behind the bucket";
  x.resize(numel);
  return x;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), 4 * a.size()) == 0;
}

template <class Body>
void for_every_rule(Body&& body) {
  for (const Format format : {Format::uniform, Format::fp8})
    for (const Rounding rounding : {Rounding::nearest, Rounding::stochastic})
      for (uint32_t bits = format == Format::fp8 ? 8 : 1; bits <= 8; ++bits)
        body(Rule{format, rounding, Stage::owner, 3, 0x123456789abcdefu}, bits);
}

TEST(Philox, KnownAnswers) {  // from Random123's kat_vectors
  const auto same = [](const quantize::Random& random, std::vector<uint32_t> words) {
    return std::equal(words.begin(), words.end(), random.word);
  };
  EXPECT_TRUE(same(quantize::philox(0, 0, 0, 0, 0), {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_TRUE(
      same(quantize::philox(~uint64_t{0}, ~0u, ~0u, ~0u, ~0u), {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_TRUE(same(quantize::philox(0x299f31d0a4093822, 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344),
                   {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Quantizer, EveryInstructionSetGivesTheBytesOfTheDefinition) {
  for (const char* isa : sets()) {
    const Isa forced(isa);
    for (const uint32_t numel : kSizes) {
      const std::vector<float> x = drawn(numel, numel);
      for_every_rule([&](const Rule& rule, uint32_t bits) {
        const Coded expected = reference(x, bits, rule, 5);
        const auto record = encoded(DType::f32, x.data(), numel, bits, rule, 5);
        ASSERT_EQ(record, expected.record) << isa << ", " << numel << " elements of " << bits << " bits";
        ASSERT_TRUE(same_bits(decoded(record, numel, bits, rule.format), expected.values)) << isa << ", " << numel;
      });
    }
  }
}

TEST(Quantizer, NarrowTypesAreQuantisedAsTheFloatsThatTheyAre) {
  for (const char* isa : sets()) {
    const Isa forced(isa);
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const uint32_t numel : {1u, 9u, 500u, 512u}) {
        const std::vector<float> wide = drawn(numel, numel + 1);
        std::vector<uint16_t> x(numel + 8);
        std::vector<float> exact(numel);
        find_quantizer(dtype)->store(wide.data(), x.data(), numel);
        find_quantizer(dtype)->accumulate(
            {reinterpret_cast<const unsigned char*>(x.data()), exact.data(), numel, 0, Format::uniform}, true);
        for_every_rule([&](const Rule& rule, uint32_t bits) {
          const Coded expected = reference(exact, bits, rule, 5);
          ASSERT_EQ(encoded(dtype, x.data(), numel, bits, rule, 5), expected.record) << isa << ", " << name_of(dtype);
          std::vector<uint16_t> got(numel, 0), rounded(numel, 0);
          find_quantizer(dtype)->decode({expected.record.data(), got.data(), numel, bits, rule.format});
          find_quantizer(dtype)->store(expected.values.data(), rounded.data(), numel);
          ASSERT_EQ(got, rounded) << isa << ", " << name_of(dtype);
        });
      }
    }
  }
}

TEST(Quantizer, AResidualHoldsWhatWasLost) {
  for (const char* isa : sets()) {
    const Isa forced(isa);
    for (const uint32_t numel : {5u, 130u, 512u}) {
      const std::vector<float> x = drawn(numel, 1), owed = drawn(numel, 2, 0.1f);
      std::vector<float> fed(numel);
      for (uint32_t i = 0; i < numel; ++i) fed[i] = x[i] + owed[i];
      for_every_rule([&](const Rule& rule, uint32_t bits) {
        const Coded first = reference(fed, bits, rule, 2);
        std::vector<float> residual = owed, expected(numel);
        EXPECT_EQ(encoded(DType::f32, x.data(), numel, bits, rule, 2, Feedback::replaced, residual.data()),
                  first.record);
        for (uint32_t i = 0; i < numel; ++i) expected[i] = fed[i] - first.values[i];
        EXPECT_TRUE(same_bits(residual, expected)) << isa;
        const Coded sum = reference(x, bits, rule, 2);
        residual = owed;
        EXPECT_EQ(encoded(DType::f32, x.data(), numel, bits, rule, 2, Feedback::added_to, residual.data(), 3.0f),
                  sum.record);
        for (uint32_t i = 0; i < numel; ++i) expected[i] = owed[i] + (x[i] - sum.values[i]) * 3.0f;
        EXPECT_TRUE(same_bits(residual, expected)) << isa;
      });
    }
  }
}

TEST(Quantizer, TheErrorIsWithinHalfAStep) {
  for (uint32_t bits = 1; bits <= 8; ++bits) {
    const Rule rule{Format::uniform, Rounding::nearest, Stage::first, 0, 0};
    for (const float scale : {1e-30f, 1.0f, 1e30f}) {
      const std::vector<float> x = drawn(4096, bits, scale);
      const auto record = encoded(DType::f32, x.data(), 4096, bits, rule, 0);
      const std::vector<float> back = decoded(record, 4096, bits, Format::uniform);
      float step;
      std::memcpy(&step, record.data() + 4, 4);
      for (size_t i = 0; i < x.size(); ++i) ASSERT_LE(std::fabs(back[i] - x[i]), step * 0.5001f) << bits << " bits";
    }
  }
}

TEST(Quantizer, RoundingByChanceIsUnbiasedAndWithinAStep) {
  constexpr int kDraws = 4000;
  const std::vector<float> x = drawn(128, 3);
  for (const auto& [format, bits] :
       {std::pair{Format::uniform, 2u}, std::pair{Format::uniform, 5u}, {Format::fp8, 8u}}) {
    std::vector<double> mean(x.size());
    double step = 0;
    for (int draw = 0; draw < kDraws; ++draw) {
      const Rule rule{format, Rounding::stochastic, Stage::first, 0, static_cast<uint64_t>(draw)};
      const auto record = encoded(DType::f32, x.data(), 128, bits, rule, 0);
      const std::vector<float> back = decoded(record, 128, bits, format);
      const Scale scale = scale_of(x, format, bits);
      step = format == Format::uniform ? scale.step : scale.base * 32;  // the largest step
      for (size_t i = 0; i < x.size(); ++i) {
        ASSERT_LE(std::fabs(back[i] - x[i]), step * 1.0001);
        mean[i] += back[i] / static_cast<double>(kDraws);
      }
    }
    // A draw deviates by at most half a step, and the mean by 1 / sqrt(4000) of that. The bound is six deviations.
    for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(mean[i], x[i], 6 * 0.5 * step / std::sqrt(kDraws)) << bits;
  }
}

TEST(Quantizer, ANanOrAnInfinityMakesTheBucketNanAndOwesNothing) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
  for (const char* isa : sets()) {
    const Isa forced(isa);
    for_every_rule([&](const Rule& rule, uint32_t bits) {
      for (const float bad : {nan, -nan, infinity, -infinity}) {
        for (const uint32_t at : {0u, 60u, 129u}) {
          std::vector<float> x = drawn(130, 4), residual(130, 0.5f);
          x[at] = bad;
          const auto record = encoded(DType::f32, x.data(), 130, bits, rule, 0, Feedback::replaced, residual.data());
          for (const float back : decoded(record, 130, bits, rule.format))
            ASSERT_EQ(std::bit_cast<uint32_t>(back), 0x7fc00000u) << isa;
          for (const float owed : residual) ASSERT_EQ(owed, 0.0f) << isa;
        }
      }
    });
    std::vector<float> far = {3e38f, -3e38f};  // the range overflows float32: reported, not clipped
    const Rule rule{Format::uniform, Rounding::nearest, Stage::first, 0, 0};
    for (const float back : decoded(encoded(DType::f32, far.data(), 2, 4, rule, 0), 2, 4, Format::uniform))
      ASSERT_TRUE(std::isnan(back));
  }
}

TEST(Quantizer, ConstantsZerosAndTheSmallestNumbersComeBack) {
  for (const char* isa : sets()) {
    const Isa forced(isa);
    const Rule rule{Format::uniform, Rounding::nearest, Stage::first, 0, 0};
    for (const float value : {0.0f, -0.0f, 1.0f, -3.25f, 1e-40f, 3e38f})
      for (uint32_t bits = 1; bits <= 8; ++bits) {
        const std::vector<float> x(100, value);
        for (const float back : decoded(encoded(DType::f32, x.data(), 100, bits, rule, 0), 100, bits, Format::uniform))
          ASSERT_EQ(back, value) << isa;
      }
    // Values below the smallest step are within half of that step.
    std::vector<float> tiny(64);
    for (size_t i = 0; i < tiny.size(); ++i) tiny[i] = static_cast<float>(i) * 1e-40f;
    const std::vector<float> back = decoded(encoded(DType::f32, tiny.data(), 64, 8, rule, 0), 64, 8, Format::uniform);
    for (size_t i = 0; i < tiny.size(); ++i) ASSERT_LE(std::fabs(back[i] - tiny[i]), std::ldexp(1.0f, -127)) << isa;
  }
}

TEST(Quantizer, ExactBucketsStayAsTheyAre) {
  for (const char* isa : sets()) {
    const Isa forced(isa);
    const Rule rule{Format::uniform, Rounding::stochastic, Stage::first, 0, 1};
    for (const uint32_t numel : {1u, 3u, 200u}) {
      const std::vector<float> wide = drawn(numel, 7);
      std::vector<uint16_t> x(numel), back(numel);
      find_quantizer(DType::bf16)->store(wide.data(), x.data(), numel);
      std::vector<float> residual(numel, 0.0f);
      for (const Feedback feedback : {Feedback::none, Feedback::replaced}) {
        const auto record = encoded(DType::bf16, x.data(), numel, 0, rule, 0, feedback, residual.data());
        find_quantizer(DType::bf16)->decode({record.data(), back.data(), numel, 0, Format::uniform});
        EXPECT_EQ(back, x) << isa;
        for (const float owed : residual) EXPECT_EQ(owed, 0.0f);
      }
      // What bfloat16 cannot represent goes to the error feedback.
      std::vector<float> owed(numel, 1e-3f);
      const auto record = encoded(DType::bf16, x.data(), numel, 0, rule, 0, Feedback::replaced, owed.data());
      std::vector<float> sent(numel), had(numel);
      find_quantizer(DType::bf16)->accumulate({record.data(), sent.data(), numel, 0, Format::uniform}, true);
      find_quantizer(DType::bf16)
          ->accumulate({reinterpret_cast<const unsigned char*>(x.data()), had.data(), numel, 0, Format::uniform}, true);
      for (uint32_t i = 0; i < numel; ++i) EXPECT_EQ(owed[i], had[i] + 1e-3f - sent[i]) << isa;
    }
  }
}

TEST(Quantizer, SumsAreInOrderAndDividedOnce) {
  for (const char* isa : sets()) {
    const Isa forced(isa);
    const auto& kernels = *find_quantizer(DType::f32);
    for (const uint32_t numel : {9u, 512u}) {
      std::vector<float> sums(numel), expected(numel);
      for (unsigned r = 0; r < 3; ++r) {
        const Rule rule{Format::uniform, Rounding::nearest, Stage::first, r, 0};
        const Coded coded = reference(drawn(numel, r), 3, rule, 0);
        kernels.accumulate({coded.record.data(), sums.data(), numel, 3, Format::uniform}, r == 0);
        for (uint32_t i = 0; i < numel; ++i) expected[i] = r == 0 ? coded.values[i] : expected[i] + coded.values[i];
      }
      kernels.divide(sums.data(), numel, 3.0f);
      for (float& one : expected) one /= 3.0f;
      EXPECT_TRUE(same_bits(sums, expected)) << isa;
    }
  }
}

TEST(Quantizer, OtherTypesHaveNoKernels) {
  for (const DType dtype : {DType::f64, DType::i32, DType::c64}) EXPECT_EQ(find_quantizer(dtype), nullptr);
}

}  // namespace
}  // namespace ark::compressed
