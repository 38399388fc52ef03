// Compares the device library's functions with double over the whole range and at its edges, and checks its conversions
// bit by bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "cpu/ops.hpp"
#include "cpu/reduce.hpp"

namespace ark::cpu {
namespace {

// Returns the error in units in the last place (ULP) of the float nearest to `want`.
double ulps(float got, double want) {
  if (std::isnan(want)) return std::isnan(got) ? 0 : 1e9;
  if (std::isinf(static_cast<float>(want)) || want == 0) return got == static_cast<float>(want) ? 0 : 1e9;
  if (!std::isfinite(got)) return 1e9;
  int exponent = 0;
  std::frexp(want, &exponent);
  return std::abs(got - want) / std::ldexp(1.0, std::max(exponent - 24, -149));
}

// Tests every 8,191st float of both signs, including infinities and NaN.
template <class Function, class Reference>
void expect_close(const char* name, double most, Function&& function, Reference&& reference) {
  double worst = 0;
  float where = 0;
  auto look = [&](const Floats& x) {
    const Floats y = function(x);
    for (int i = 0; i < kLanes; ++i)
      if (const double error = ulps(y[i], reference(static_cast<double>(x[i]))); error > worst)
        worst = error, where = x[i];
  };
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += kLanes * 8191) {
    Words words{};
    for (int i = 0; i < kLanes; ++i) words[i] = static_cast<uint32_t>(bits + static_cast<uint64_t>(i) * 8191);
    look(same_bits<Floats>(words));
  }
  for (const float special : {0.0f, -0.0f, kInfinity, -kInfinity, kNan, 1.0f, -1.0f, 0x1p-126f, 0x1p-149f, -0x1p-149f,
                              0x1.fffffep127f, 88.7f, 88.8f, -87.4f, -103.9f, -104.1f})
    look(splat(special));
  EXPECT_LE(worst, most) << name << " at " << where;
}
#define EXPECT_ULPS(name, most) \
  expect_close(                 \
      #name, most, [](Floats x) { return name(x); }, [](double x) { return std::name(x); })

TEST(CpuMathTest, AgainstDouble) {
  EXPECT_ULPS(exp, 1.1);
  EXPECT_ULPS(log, 1);
  EXPECT_ULPS(tanh, 1.5);
  EXPECT_ULPS(erf, 1.1);
  EXPECT_ULPS(sin, 1.6);
  EXPECT_ULPS(cos, 1.6);
  EXPECT_ULPS(sqrt, 0.51);
  EXPECT_ULPS(floor, 0);
  EXPECT_ULPS(ceil, 0);
  EXPECT_ULPS(trunc, 0);
  EXPECT_ULPS(log1p, 1);
  EXPECT_ULPS(expm1, 1);
  expect_close(
      "sigmoid", 2.5, [](Floats x) { return sigmoid(x); }, [](double x) { return 1 / (1 + std::exp(-x)); });
  expect_close(
      "rsqrt", 1.5, [](Floats x) { return rsqrt(x); }, [](double x) { return 1 / std::sqrt(x); });
  expect_close(
      "round", 0, [](Floats x) { return round(x); }, [](double x) { return std::nearbyint(x); });
}

// Every number of float8_e4m3fn is kept; between two neighbors the nearer one is taken, and the even one of a tie.
TEST(CpuMathTest, RoundsToFloat8) {
  const auto number = [](int code) {
    const int exponent = code >> 3, mantissa = code & 7;
    return static_cast<float>(exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10));
  };
  const auto rounded = [](float x) { return round_e4m3(splat(x))[0]; };
  for (int code = 0; code < 0x7e; ++code) {
    const float below = number(code), above = number(code + 1), middle = (below + above) / 2;
    for (const float sign : {1.0f, -1.0f}) {
      EXPECT_EQ(rounded(sign * below), sign * below) << code;
      EXPECT_EQ(rounded(sign * middle), sign * (code % 2 == 0 ? below : above)) << code;
      EXPECT_EQ(rounded(sign * std::nextafter(middle, 0.0f)), sign * below) << code;
      EXPECT_EQ(rounded(sign * std::nextafter(middle, 500.0f)), sign * above) << code;
    }
  }
  EXPECT_TRUE(std::signbit(rounded(-0.0f)) && std::signbit(rounded(-0x1p-30f)));
  EXPECT_EQ(rounded(464.0f), 448.0f);
  for (const float beyond : {std::nextafter(464.0f, 500.0f), 480.0f, kInfinity, -kInfinity, kNan})
    EXPECT_TRUE(std::isnan(rounded(beyond))) << beyond;
}

TEST(CpuMathTest, SameBitsInWhateverLane) {
  for (float one : {0.1f, -3.7f, 80.0f, 1e-30f, 12345.6f}) {
    Floats x{};
    for (int i = 0; i < kLanes; ++i) x[i] = i % 3 == 0 ? one : static_cast<float>(i);
    for (auto* function : {+[](Floats y) { return exp(y); }, +[](Floats y) { return tanh(y); },
                           +[](Floats y) { return sin(y); }, +[](Floats y) { return erf(y); }}) {
      const Floats y = function(x), all = function(splat(one));
      for (int i = 0; i < kLanes; i += 3) EXPECT_EQ(same_bits<Words>(y)[i], same_bits<Words>(all)[0]);
    }
  }
}

TEST(CpuMathTest, EdgesAsPyTorch) {
  const Floats nan = splat(kNan), one = splat(1.0f);
  EXPECT_TRUE(std::isnan(maximum(nan, one)[0]) && std::isnan(maximum(one, nan)[0]));
  EXPECT_TRUE(std::isnan(minimum(nan, one)[0]) && std::isnan(minimum(one, nan)[0]));
  EXPECT_TRUE(std::isnan(relu(nan)[0]));
  EXPECT_EQ(remainder(splat(-7.0f), splat(3.0f))[0], 2.0f);
  EXPECT_EQ(remainder(splat(7.0f), splat(-3.0f))[0], -2.0f);
  EXPECT_EQ(floor_divide(splat(-7.0f), splat(2.0f))[0], -4.0f);
  EXPECT_EQ(remainder(splat(int64_t{-7}), splat(int64_t{3}))[0], 2);
  EXPECT_EQ(floor_divide(splat(int64_t{-7}), splat(int64_t{3}))[0], -3);
  EXPECT_EQ(floor_divide(splat(int64_t{7}), splat(int64_t{-7}))[0], -1);
  EXPECT_EQ(to_ints(splat(-2.9f))[0], -2);
  EXPECT_EQ(round(splat(2.5f))[0], 2.0f);
  EXPECT_EQ(round(splat(3.5f))[0], 4.0f);
  EXPECT_EQ(sign(splat(int64_t{-5}))[0], -1);
  EXPECT_EQ(round_to(splat(int64_t{1} << 32 | 5), int32_t{})[0], 5);
}

// Converts every bfloat16 and half forth and back, and rounds every 1,021st float to nearest, ties to even.
template <class T>
void expect_conversions(int significand_bits, int least_exponent, double overflow) {
  for (uint32_t bits = 0; bits < 65536; bits += kLanes) {
    Halves raw{};
    for (int i = 0; i < kLanes; ++i) raw[i] = static_cast<uint16_t>(bits + static_cast<uint32_t>(i));
    const Floats wide = widen(raw, T{});
    const Halves back = narrow(wide, T{});
    for (int i = 0; i < kLanes; ++i) {
      if (std::isnan(wide[i])) {
        EXPECT_TRUE(std::isnan(widen(back, T{})[i])) << raw[i];
      } else {
        EXPECT_EQ(back[i], raw[i]);
      }
    }
  }
  int wrong = 0;
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += 1021) {
    const float x = same_bits<float>(static_cast<uint32_t>(bits));
    const float y = widen(narrow(splat(x), T{}), T{})[0];
    if (std::isnan(x)) {
      wrong += std::isnan(y) ? 0 : 1;
      continue;
    }
    int exponent = 0;
    std::frexp(x, &exponent);
    const double step = std::ldexp(1.0, std::max(exponent, least_exponent) - significand_bits);
    double nearest = std::nearbyint(static_cast<double>(x) / step) * step;
    if (std::abs(nearest) >= overflow) nearest = std::copysign(HUGE_VAL, x);
    wrong += static_cast<double>(y) == nearest && std::signbit(y) == std::signbit(x) ? 0 : 1;
  }
  EXPECT_EQ(wrong, 0);
}
TEST(CpuMathTest, ConversionsOfBfloat16) {
  expect_conversions<bf16>(8, -125, 0x1p128);
}
TEST(CpuMathTest, ConversionsOfHalf) {
  expect_conversions<f16>(11, -13, 65520);
}

TEST(CpuMathTest, TailsTouchNothingElse) {
  for (int count = 0; count <= kLanes; ++count) {
    std::vector<float> from(static_cast<size_t>(count));  // exact size, so that a sanitizer detects reads past the end
    if (count == 0) from.reserve(1);                      // data() is never null
    for (int i = 0; i < count; ++i) from[static_cast<size_t>(i)] = static_cast<float>(i + 1);
    const Floats x = load(from.data(), First{count});
    for (int i = 0; i < kLanes; ++i) EXPECT_EQ(x[i], i < count ? static_cast<float>(i + 1) : 0.0f);
    std::vector<bf16> to(static_cast<size_t>(count) + 1, bf16{0x7777});
    store(to.data(), x, First{count});
    for (int i = 0; i < count; ++i) EXPECT_EQ(load_one(&to[static_cast<size_t>(i)]), static_cast<float>(i + 1));
    EXPECT_EQ(to.back().bits, 0x7777);
  }
}

TEST(CpuMathTest, ReductionsIgnoreLanesThatDoNotCount) {
  for (int64_t columns : {1, 5, 16, 17, 100}) {
    std::vector<float> row(static_cast<size_t>(columns));
    for (size_t i = 0; i < row.size(); ++i) row[i] = -1.0f - static_cast<float>((i * 7) % 11);
    Sum<Floats> sum;
    Greatest<Floats> most;
    Least<Floats> least;
    WhereGreatest<Floats> where;
    Least<Ints> least_int;
    for_columns(0, columns, [&](int64_t c, auto lanes) {
      const Floats x = load(row.data() + c, lanes);
      sum.add(x, lanes);
      most.add(x, lanes);
      least.add(x, lanes);
      where.add(x, c + kIota, lanes);
      least_int.add(-to_ints(x), lanes);
    });
    double expected = 0;
    for (const float x : row) expected += x;
    EXPECT_EQ(sum.result()[3], static_cast<float>(expected));
    EXPECT_EQ(most.result()[0], *std::max_element(row.begin(), row.end()));
    EXPECT_EQ(least.result()[0], *std::min_element(row.begin(), row.end()));
    EXPECT_EQ(where.result()[0], std::max_element(row.begin(), row.end()) - row.begin());
    EXPECT_EQ(least_int.result()[0], 1);
  }
}

// If lanes are rows, they must not affect each other: a NaN, infinities, and sums of only their own terms.
TEST(CpuMathTest, LanesThatAreRowsKeepToThemselves) {
  Sum<Floats> sum;
  Sum<Ints> count;
  Greatest<Floats> most;
  Least<Floats> least;
  Greatest<Mask> any;
  constexpr int kColumns = 1000;
  for (int c = 0; c < kColumns; ++c) {
    Floats x;
    for (int i = 0; i < kLanes; ++i) x[i] = static_cast<float>((c * 7 + i * 3) % 101 - 50);
    if (c == 13) x[1] = kNan;
    if (c == 70) x[2] = kInfinity;
    sum.add(x, All{});
    count.add(kIota, All{});
    most.add(x, All{});
    least.add(x, All{});
    any.add(x > 49.5f, First{kLanes - 1});
  }
  for (int i = 0; i < kLanes; ++i) {
    double expected = 0;
    float greatest = -kInfinity, smallest = kInfinity;
    bool large = false;
    for (int c = 0; c < kColumns; ++c) {
      const auto x = static_cast<float>((c * 7 + i * 3) % 101 - 50);
      expected += x;
      greatest = std::max(greatest, x);
      smallest = std::min(smallest, x);
      large = large || x > 49.5f;
    }
    EXPECT_EQ(count.each()[i], i * kColumns);
    EXPECT_EQ(any.each()[i] != 0, (large || i == 2) && i != kLanes - 1) << i;
    if (i == 1) {
      EXPECT_TRUE(std::isnan(sum.each()[i]) && std::isnan(most.each()[i]) && std::isnan(least.each()[i]));
    } else if (i == 2) {
      EXPECT_EQ(sum.each()[i], kInfinity);
      EXPECT_EQ(most.each()[i], kInfinity);
    } else {
      EXPECT_EQ(sum.each()[i], static_cast<float>(expected));
      EXPECT_EQ(most.each()[i], greatest);
      EXPECT_EQ(least.each()[i], smallest);
    }
  }
}

TEST(CpuMathTest, SmallNumbersBehindLargeOnesCount) {
  constexpr int64_t kLarge = 4096, kAll = 1 << 20;
  std::vector<float> row(kAll, 0.5f);
  std::fill_n(row.begin(), kLarge, 16777216.0f);
  Sum<Floats> sum;
  for_columns(0, kAll, [&](int64_t c, auto lanes) { sum.add(load(row.data() + c, lanes), lanes); });
  const double exact = kLarge * 16777216.0 + (kAll - kLarge) * 0.5;
  EXPECT_NEAR(sum.result()[0], exact, 8192.0);  // one ULP of a float of that size; the small terms add up to 64 of them
}

TEST(CpuMathTest, NanIsGreatestLeastAndFirst) {
  std::vector<float> row(40, 1.0f);
  row[33] = row[21] = kNan;
  row[3] = kInfinity;
  Greatest<Floats> most;
  Least<Floats> least;
  WhereGreatest<Floats> where;
  for_columns(0, 40, [&](int64_t c, auto lanes) {
    const Floats x = load(row.data() + c, lanes);
    most.add(x, lanes);
    least.add(x, lanes);
    where.add(x, c + kIota, lanes);
  });
  EXPECT_TRUE(std::isnan(most.result()[0]));
  EXPECT_TRUE(std::isnan(least.result()[0]));
  EXPECT_EQ(where.result()[0], 21);
}

}  // namespace
}  // namespace ark::cpu
