// Compiles the GPU's reduction rules for the host and compares them with the CPU's kernels, byte for byte, for every
// pair that find_reduce supports. Device code differs only in single PTX instructions behind the functions of
// formats.cuh.
#include "cuda/reduce.cuh"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "collectives/cpu/reduce/reduce.hpp"

namespace ark {
namespace {

template <class Theirs, class Ours>
constexpr bool same_value(Theirs theirs, Ours ours) {
  return static_cast<int>(theirs) == static_cast<int>(ours);
}
#define ARK_SAME(Enum, name) static_assert(same_value(device::Enum::name, Enum::name))
ARK_SAME(DType, boolean);
ARK_SAME(DType, u8);
ARK_SAME(DType, i8);
ARK_SAME(DType, u16);
ARK_SAME(DType, i16);
ARK_SAME(DType, u32);
ARK_SAME(DType, i32);
ARK_SAME(DType, u64);
ARK_SAME(DType, i64);
ARK_SAME(DType, f16);
ARK_SAME(DType, bf16);
ARK_SAME(DType, f32);
ARK_SAME(DType, f64);
ARK_SAME(DType, f8_e4m3fn);
ARK_SAME(DType, f8_e5m2);
ARK_SAME(DType, f8_e4m3fnuz);
ARK_SAME(DType, f8_e5m2fnuz);
ARK_SAME(DType, f8_e8m0fnu);
ARK_SAME(DType, c32);
ARK_SAME(DType, c64);
ARK_SAME(DType, c128);
ARK_SAME(DType, raw8);
static_assert(same_value(device::DType::raw8, kDTypes - 1));
ARK_SAME(ReduceOp, sum);
ARK_SAME(ReduceOp, avg);
ARK_SAME(ReduceOp, product);
ARK_SAME(ReduceOp, min);
ARK_SAME(ReduceOp, max);
ARK_SAME(ReduceOp, band);
ARK_SAME(ReduceOp, bor);
ARK_SAME(ReduceOp, bxor);
ARK_SAME(ReduceOp, premul_sum);
static_assert(same_value(device::ReduceOp::premul_sum, kReduceOps - 1));
#undef ARK_SAME

using device::Unit;
using Units = std::vector<Unit>;

template <class Rule>
Units reduce_units(const Rule& rule, const std::vector<Units>& inputs, const std::vector<double>& factors,
                   bool average) {
  Units out;
  for (size_t i = 0; i < inputs[0].size(); i++) {
    auto acc = rule.first(inputs[0][i], factors[0]);
    for (size_t r = 1; r < inputs.size(); r++) rule.add(acc, inputs[r][i], factors[r]);
    out.push_back(rule.finish(acc, static_cast<int>(inputs.size()), average));
  }
  return out;
}

// Describes the first byte that differs, with inputs and results.
std::string difference(const Units& ours, const Units& theirs, const std::vector<Units>& inputs, size_t element) {
  const auto* a = reinterpret_cast<const uint8_t*>(ours.data());
  const auto* b = reinterpret_cast<const uint8_t*>(theirs.data());
  const size_t bytes = theirs.size() * sizeof(Unit);
  if (ours.size() == theirs.size() && std::memcmp(a, b, bytes) == 0) return "";
  size_t at = 0;
  while (at < bytes && a[at] == b[at]) at++;
  at -= at % element;
  const auto hex = [element](const void* from, size_t offset) {
    std::string text;
    for (size_t i = element; i-- > 0;) {
      char digits[3];
      std::snprintf(digits, sizeof(digits), "%02x", static_cast<const uint8_t*>(from)[offset + i]);
      text += digits;
    }
    return text;
  };
  std::string text = "element " + std::to_string(at / element) + " of";
  for (const Units& input : inputs) text += " " + hex(input.data(), at);
  return text + ": " + hex(a, at) + " instead of " + hex(b, at);
}

// Reduces by every applicable rule. Returns an error message, or an empty string.
std::string compare(DType dtype, ReduceOp op, const std::vector<Units>& inputs, const std::vector<double>& factors) {
  const ReduceFn reduce = find_reduce(dtype, op);
  const int ranks = static_cast<int>(inputs.size());
  const size_t count = inputs[0].size() * sizeof(Unit) / size_of(dtype);
  std::vector<const void*> sources;
  for (const Units& input : inputs) sources.push_back(input.data());
  Units expected(inputs[0].size());
  reduce(expected.data(), nullptr, sources.data(), ranks, count, op == ReduceOp::premul_sum ? factors.data() : nullptr);

  const auto d = static_cast<device::DType>(dtype);
  const auto o = static_cast<device::ReduceOp>(op);
  const bool average = op == ReduceOp::avg;
  const auto check = [&](const char* name, const Units& units) {
    const std::string text = difference(units, expected, inputs, size_of(dtype));
    return text.empty() ? text
                        : std::string(name) + " " + name_of(dtype) + " " + name_of(op) + " on " +
                              std::to_string(ranks) + " ranks: " + text + "\n";
  };
  std::string errors = check("GenericRule", reduce_units(device::GenericRule{d, o}, inputs, factors, average));
  if (!device::hot(device::scalar_of(d), o)) return errors;
  switch (device::scalar_of(d)) {
    case device::DType::bf16:
      return errors + check("SumRule", reduce_units(device::SumRule<device::BFloat16>{}, inputs, factors, average));
    case device::DType::f16:
      return errors + check("SumRule", reduce_units(device::SumRule<device::Float16>{}, inputs, factors, average));
    default:
      return errors + check("SumRule", reduce_units(device::SumRule<device::Float32>{}, inputs, factors, average));
  }
}

// A third are random bits. A third are special values, so that NaNs, infinities, zeros and extremes meet. A third are
// numbers of similar size, whose sums round and tie.
class Inputs {
 public:
  explicit Inputs(uint32_t seed) : random_(seed) {}

  Units units(DType dtype, size_t count) {
    const auto part = device::scalar_of(static_cast<device::DType>(dtype));
    const size_t bytes = device::scalar_bytes(part);
    Units units(count);
    auto* to = reinterpret_cast<uint8_t*>(units.data());
    for (size_t at = 0; at < count * sizeof(Unit); at += bytes) {
      const uint64_t bits = scalar(part, bytes, random_(), random_());
      std::memcpy(to + at, &bits, bytes);
    }
    return units;
  }

  std::vector<double> factors(int ranks) {
    constexpr double kFactors[] = {0.5, -1.0 / 3, 1e-3, 1e30, 1e-42, 0, -0.0, 1e300, 3, HUGE_VAL};
    std::vector<double> factors;
    for (int r = 0; r < ranks; r++) factors.push_back(kFactors[random_() % std::size(kFactors)]);
    return factors;
  }

 private:
  static uint64_t scalar(device::DType part, size_t bytes, uint64_t bits, uint64_t choice) {
    const uint64_t sign = choice & 8 ? 1ull << (8 * bytes - 1) : 0;
    if (choice % 3 == 0) return bits;
    if (choice % 3 == 1) {
      const uint64_t top = ~0ull >> (64 - 8 * bytes + 1);
      const uint64_t infinity = part == device::DType::f64    ? 0x7ff0000000000000
                                : part == device::DType::f32  ? 0x7f800000
                                : part == device::DType::bf16 ? 0x7f80
                                : part == device::DType::f16  ? 0x7c00
                                                              : 0x7c;
      const uint64_t smallest = infinity & -infinity;  // normal float
      const uint64_t specials[] = {0, 1, 2, top, top - 1, infinity, infinity - 1, infinity + 1, smallest, smallest - 1};
      return specials[bits % std::size(specials)] ^ sign;
    }
    switch (part) {
      case device::DType::f64: return (bits >> 10) | 0x3fc0000000000000 | sign;  // from 2^-3 on
      case device::DType::f32: return ((bits >> 38) & 0x03ffffff) | 0x3c000000 | sign;
      case device::DType::bf16: return (bits & 0x03ff) | 0x3c00 | sign;
      case device::DType::f16: return (bits & 0x0fff) | 0x3000 | sign;
      default: return bits & 1 ? bits >> 57 : bits >> 40;
    }
  }

  std::mt19937_64 random_;
};

class KernelReduce : public testing::TestWithParam<int> {};

TEST_P(KernelReduce, GivesTheBitsOfTheCpu) {
  const auto dtype = static_cast<DType>(GetParam());
  int supported = 0;
  for (int o = 0; o < kReduceOps; o++) {
    const auto op = static_cast<ReduceOp>(o);
    if (why_unsupported(dtype, op)) continue;
    supported++;
    for (int ranks : {1, 2, 3, 4, 5, 8}) {
      Inputs random(static_cast<uint32_t>(1000 * GetParam() + 10 * o + ranks));
      for (int round = 0; round < 4; round++) {  // each with its own factors
        std::vector<Units> inputs;
        for (int r = 0; r < ranks; r++) inputs.push_back(random.units(dtype, 500));
        ASSERT_EQ(compare(dtype, op, inputs, random.factors(ranks)), "");
      }
    }
  }
  EXPECT_GT(supported, 2);
}

INSTANTIATE_TEST_SUITE_P(All, KernelReduce, testing::Range(0, kDTypes - 1),
                         [](const auto& info) { return name_of(static_cast<DType>(info.param)); });

TEST(KernelFormats, EveryPairOfBytes) {
  for (int d = 0; d < kDTypes; d++) {
    const auto dtype = static_cast<DType>(d);
    if (size_of(dtype) != 1 || dtype == DType::raw8) continue;
    std::vector<Units> inputs(2, Units(65536 / sizeof(Unit)));
    for (int i = 0; i < 65536; i++) {
      reinterpret_cast<uint8_t*>(inputs[0].data())[i] = static_cast<uint8_t>(i);
      reinterpret_cast<uint8_t*>(inputs[1].data())[i] = static_cast<uint8_t>(i >> 8);
    }
    for (int o = 0; o < kReduceOps; o++) {
      const auto op = static_cast<ReduceOp>(o);
      if (why_unsupported(dtype, op)) continue;
      EXPECT_EQ(compare(dtype, op, inputs, {1.0 / 3, -3}), "");
    }
  }
}

// Rounds float32 values near the ends and the middle of each interval between two 16-bit (and 8-bit) values. Our
// formats are called directly. The CPU rounds by PREMUL_SUM, whose product with an exact factor can be any float32.
TEST(KernelFormats, RoundsEveryIntervalAsTheCpuDoes) {
  for (DType dtype :
       {DType::f16, DType::bf16, DType::f8_e4m3fn, DType::f8_e5m2, DType::f8_e4m3fnuz, DType::f8_e5m2fnuz}) {
    const auto d = static_cast<device::DType>(dtype);
    const size_t bytes = size_of(dtype);
    const uint32_t one = dtype == DType::bf16 ? 0x3f80 : device::encode_small(device::layout_of(d), 1.0f);
    for (uint32_t high = 0; high < 1 << 16; high += bytes == 2 ? 1 : 7) {
      for (uint32_t low :
           {0x0000, 0x0001, 0x0fff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x3001, 0x7fff, 0x8000, 0x8001, 0xffff}) {
        const float x = std::bit_cast<float>(high << 16 | low);
        if (x != x) continue;  // NaN as a factor has its own tests
        const double factor = x;
        const void* source = &one;
        uint32_t expected = 0;
        find_reduce(dtype, ReduceOp::premul_sum)(&expected, nullptr, &source, 1, 1, &factor);
        uint32_t ours, pair;
        if (dtype == DType::bf16) {
          ours = device::encode_bf16(x);
          pair = device::encode_bf16_pair(x, 1.0f);
        } else {
          ours = device::encode_small(device::layout_of(d), x);
          pair = dtype == DType::f16 ? device::encode_f16_pair(x, 1.0f) : ours;
        }
        ASSERT_EQ(ours, expected) << name_of(dtype) << " of " << std::hex << (high << 16 | low);
        ASSERT_EQ(pair & 0xffff, expected) << name_of(dtype);
      }
    }
  }
}

// The hardware's packed conversion gives 0x7fff for a NaN, and no other NaN code.
TEST(KernelFormats, ReplacesTheHardwaresNans) {
  for (uint32_t infinity : {0x7f80u, 0x7c00u}) {
    const uint32_t nan = infinity == 0x7f80 ? 0x7fc0 : 0x7e00;
    std::vector<uint32_t> codes{0x7fff};
    for (uint32_t code = 0; code < 1 << 16; code++) {
      if ((code & 0x7fff) <= infinity) codes.push_back(code);
    }
    const auto ours = [nan](uint32_t code) { return code == 0x7fff ? nan : code; };
    for (uint32_t code : codes) {
      for (uint32_t other : {0u, 0x7fffu, 0x8000u, 0xff80u & ~(0x7f80u ^ infinity), 0x3f80u, code}) {
        const uint32_t excess = 0x7fff - nan;
        EXPECT_EQ(device::replace_nans(code | other << 16, excess), ours(code) | ours(other) << 16);
        EXPECT_EQ(device::replace_nans(other | code << 16, excess), ours(other) | ours(code) << 16);
      }
    }
  }
}

TEST(KernelHot, AreSumAndAverageOfThreeTypes) {
  int pairs = 0;
  for (int d = 0; d < kDTypes; d++) {
    for (int o = 0; o < kReduceOps; o++) {
      if (!device::hot(static_cast<device::DType>(d), static_cast<device::ReduceOp>(o))) continue;
      pairs++;
      EXPECT_EQ(why_unsupported(static_cast<DType>(d), static_cast<ReduceOp>(o)), nullptr);
    }
  }
  EXPECT_EQ(pairs, 6);
}

}  // namespace
}  // namespace ark
