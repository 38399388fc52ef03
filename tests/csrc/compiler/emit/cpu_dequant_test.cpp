// Compares the CPU target's products of quantised weights with double: every form, odd sizes and types, one to many
// rows. The number of workers must not change any bit.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "compiler/emit/cpu_case.hpp"
#include "compiler/fuse/fuse_single.hpp"

namespace ark::compiler::test {
namespace cpu_dequant_test {

constexpr ScalarType kFloats[] = {ScalarType::f32, ScalarType::bf16, ScalarType::f16};

// `block` is the number of interleaved columns, 0 for columns of bytes.
MatmulStage add_product(CpuCase& made, int64_t m, int64_t n, int64_t k, int bits, int64_t groups, int64_t block = 0) {
  const auto type = [&] { return kFloats[made.pick(0, 2)]; };
  const auto yes = [&] { return made.pick(0, 1) == 1; };
  MatmulStage body{.m = m, .n = n, .k = k};
  Codes& codes = body.codes;
  codes.bits = bits;
  codes.group = k / groups;
  codes.block = block;
  codes.is_signed = bits == 4 && yes();
  codes.high_first = bits == 4 && block == 0 && yes();
  const ScalarType code = bits == 4 ? ScalarType::u8 : yes() ? ScalarType::i8 : ScalarType::e4m3;
  codes.offset = code != ScalarType::e4m3 && yes() ? made.pick(0, 8) : 0;
  // All e4m3 codes except NaN.
  const CpuCase::Fill some = code == ScalarType::i8 ? CpuCase::integers(-128, 127)
                             : bits == 4            ? CpuCase::integers(0, 255)
                                                    : CpuCase::integers(0, 126);
  body.a = made.input(type(), {m, k}, CpuCase::normal(), yes() ? Shape{k + 3, 1} : Shape{});
  body.b = block != 0 ? made.input(code, {n / block, k, block / 2}, some, {}, 0, false, true)
                      : made.input(code, {k * bits / 8, n}, some, {1, k * bits / 8}, 0, false, true);
  const Shape by_column{1, groups};
  if (yes()) codes.scale = made.input(type(), {groups, n}, CpuCase::normal(), yes() ? by_column : Shape{});
  if (yes()) codes.zero = made.input(type(), {groups, n}, CpuCase::normal(4), yes() ? by_column : Shape{});
  codes.zero_after = codes.zero >= 0 && yes();
  if (groups > 1 && codes.scale < 0) codes.scale = made.input(type(), {groups, n}, CpuCase::normal());
  if (yes()) body.bias = made.input(type(), {1, n}, CpuCase::normal());
  body.out = made.output(type(), {m, n});
  body.axis = m > 8 && yes() ? MatmulStage::Axis::rows : MatmulStage::Axis::columns;
  const bool rows = body.axis == MatmulStage::Axis::rows;
  made.stage(body, product_accesses(made.graph, body), rows ? m : n, rows || block == 0 ? 1 : block);
  return body;
}

double decoded(CpuCase& made, const MatmulStage& body, int64_t d, int64_t c) {
  const Codes& codes = body.codes;
  const int64_t block = codes.block, place = block != 0 ? c % block : 0;
  double code = block != 0 ? made.get(body.b, {c / block, d, place % (block / 2)})
                           : made.get(body.b, {codes.bits == 4 ? d / 2 : d, c});
  if (codes.bits == 4) {
    const bool high = block != 0 ? place >= block / 2 : ((d & 1) != 0) != codes.high_first;
    const int both = static_cast<int>(code), half = high ? both / 16 : both % 16;
    code = codes.is_signed && half > 7 ? half - 16 : half;
  }
  code -= static_cast<double>(codes.offset);
  const std::vector<int64_t> at{d / codes.group, c};
  const double scale = codes.scale >= 0 ? made.get(codes.scale, at) : 1;
  const double zero = codes.zero >= 0 ? made.get(codes.zero, at) : 0;
  return codes.zero_after ? code * scale + zero : (code - zero) * scale;
}

void expect_product(CpuCase& made, const MatmulStage& body) {
  const ScalarType type = made.graph.values()[static_cast<size_t>(body.out)].type;
  int64_t wrong = 0;
  for_each_index({body.m, body.n}, [&](const std::vector<int64_t>& at) {
    double sum = 0, magnitude = 0;
    for (int64_t d = 0; d < body.k; ++d) {
      const double term = made.get(body.a, {at[0], d}) * decoded(made, body, d, at[1]);
      sum += term;
      magnitude += std::abs(term);
    }
    if (body.bias >= 0) sum += made.get(body.bias, {0, at[1]});
    const double got = made.get(body.out, at);
    const double allowed = 0x1p-21 * (magnitude + 1) + epsilon_of(type) * std::abs(sum) * 1.01 + 1e-7;
    if (std::isinf(got) && type == ScalarType::f16 && std::abs(sum) > 65519) return;
    if (!(std::abs(got - sum) <= allowed) && ++wrong < 4)
      ADD_FAILURE() << body.codes.bits << " bits, " << name_of(type) << " [" << body.m << ", " << body.n << ", "
                    << body.k << "] at " << at[0] << ", " << at[1] << ": " << got << ", not " << sum;
  });
  EXPECT_EQ(wrong, 0);
}

TEST(CpuDequantTest, RandomAgainstDouble) {
  CpuCase made(5);
  std::vector<MatmulStage> all;
  for (int i = 0; i < ark::test::cases(20 / kSanitizersShare); ++i) {
    const int bits = i % 2 == 0 ? 4 : 8;
    const int64_t groups = made.pick(1, 3);
    const int64_t k = groups == 1 ? made.pick(1, 120) * 2 : groups * 32 * made.pick(1, 3);
    all.push_back(add_product(made, i % 3 == 0 ? 1 : made.pick(1, 60), made.pick(1, 50), k, bits, groups));
  }
  for (const int64_t block : {32, 64})
    for (const int64_t rows : {1, 2, 7, 50})
      all.push_back(add_product(made, rows, block * made.pick(1, 3), 96, 4, made.pick(0, 1) * 2 + 1, block));
  made.run(2, 2);
  for (const MatmulStage& one : all) expect_product(made, one);
}

TEST(CpuDequantTest, EveryCodeOfFloat8) {
  CpuCase made(1);
  MatmulStage body{.m = 1, .n = 256, .k = 2};
  body.codes = {.bits = 8, .group = 2};
  body.a = made.input(ScalarType::f32, {1, 2}, [](auto&) { return 1.0; });
  body.b = made.input(ScalarType::e4m3, {2, 256}, [](auto&) { return 0.0; }, {1, 2});
  body.out = made.output(ScalarType::f32, {1, 256});
  for (int64_t code = 0; code < 256; ++code) made.set(body.b, {1, code}, static_cast<double>(code));
  made.stage(body, product_accesses(made.graph, body), 256);
  made.run(1);
  for (int64_t code = 0; code < 256; ++code) {
    const double got = made.get(body.out, {0, code}), want = number_of_e4m3(static_cast<uint8_t>(code));
    EXPECT_TRUE(got == want || (std::isnan(got) && std::isnan(want))) << code << ": " << got << ", not " << want;
  }
}

TEST(CpuDequantTest, WorkersDoNotChangeBits) {
  std::vector<std::vector<std::vector<char>>> results;
  for (const int workers : worker_counts()) {
    CpuCase made(9);
    add_product(made, 1, 203, 334, 4, 1);
    add_product(made, 37, 70, 128, 8, 2);
    add_product(made, 13, 131, 192, 4, 3);
    made.run(workers, 2);
    results.push_back(made.outputs());
  }
  for (size_t i = 1; i < results.size(); ++i) EXPECT_EQ(results[i], results[0]) << worker_counts()[i] << " workers";
}

}  // namespace cpu_dequant_test
}  // namespace ark::compiler::test
