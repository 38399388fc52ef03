// Tests the rules around the arithmetic: which pairs are supported and why not, rank order, single rounding, the
// thread's floating-point mode, counts beyond 32 bits, and the choice of the instruction set.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cfenv>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "collectives/cpu/reduce/reduce.hpp"
#include "util/error.hpp"
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace ark {
namespace {

template <class T>
std::vector<T> run(DType dtype, ReduceOp op, const std::vector<std::vector<T>>& inputs) {
  std::vector<const void*> sources;
  for (const auto& input : inputs) sources.push_back(input.data());
  std::vector<T> out(inputs[0].size());
  find_reduce(dtype, op)(out.data(), nullptr, sources.data(), static_cast<int>(sources.size()), out.size(), nullptr);
  return out;
}

// Rows are operations, columns are dtypes in enum order. This repeats the support table on purpose.
TEST(ReduceSupport, IsThisTable) {
  const char* const table[kReduceOps] = {
      // bool u8..i64 f16 bf16 f32 f64 | five float8 | complex | raw8
      "1111111111111"
      "11110"
      "111"
      "0",  // SUM
      "0000000001111"
      "11110"
      "111"
      "0",  // AVG
      "1111111111111"
      "11111"
      "111"
      "0",  // PRODUCT
      "1111111111111"
      "11111"
      "000"
      "0",  // MIN
      "1111111111111"
      "11111"
      "000"
      "0",  // MAX
      "1111111110000"
      "00000"
      "000"
      "0",  // BAND
      "1111111110000"
      "00000"
      "000"
      "0",  // BOR
      "1111111110000"
      "00000"
      "000"
      "0",  // BXOR
      "0000000001111"
      "11110"
      "111"
      "0",  // PREMUL_SUM
  };
  for (const char* isa : {"baseline", "avx2", "avx512"}) {
    try {
      force_reduce_isa(isa);
    } catch (const Error&) {
      continue;
    }
    for (int o = 0; o < kReduceOps; o++) {
      ASSERT_EQ(std::strlen(table[o]), static_cast<size_t>(kDTypes));
      for (int d = 0; d < kDTypes; d++) {
        const auto dtype = static_cast<DType>(d);
        const auto op = static_cast<ReduceOp>(o);
        const bool expected = table[o][d] == '1';
        EXPECT_EQ(find_reduce(dtype, op) != nullptr, expected) << isa << " " << name_of(dtype) << " " << name_of(op);
        EXPECT_EQ(why_unsupported(dtype, op) == nullptr, expected) << name_of(dtype) << " " << name_of(op);
      }
    }
  }
  force_reduce_isa(nullptr);
}

TEST(ReduceSupport, SaysWhyNot) {
  EXPECT_NE(std::string(why_unsupported(DType::i32, ReduceOp::avg)).find("use SUM and divide"), std::string::npos);
  EXPECT_NE(std::string(why_unsupported(DType::c64, ReduceOp::min)).find("no order"), std::string::npos);
  EXPECT_NE(std::string(why_unsupported(DType::f32, ReduceOp::bxor)).find("integers and bool"), std::string::npos);
  // Values from another process can be anything.
  for (int bad : {kDTypes, 99, 255}) {
    EXPECT_EQ(find_reduce(static_cast<DType>(bad), ReduceOp::sum), nullptr);
    EXPECT_NE(why_unsupported(static_cast<DType>(bad), ReduceOp::sum), nullptr);
  }
  for (int bad : {kReduceOps, 99, 255}) {
    EXPECT_EQ(find_reduce(DType::f32, static_cast<ReduceOp>(bad)), nullptr);
    EXPECT_NE(why_unsupported(DType::f32, static_cast<ReduceOp>(bad)), nullptr);
  }
}

TEST(ReduceOrder, IsRankOrder) {
  // In rank order the small numbers are lost one by one; a tree sum would keep them.
  const float big = 1 << 24;
  EXPECT_EQ(run<float>(DType::f32, ReduceOp::sum, {{big}, {1}, {1}, {1}, {1}, {1}}), std::vector<float>{big});
  EXPECT_EQ(run<float>(DType::f32, ReduceOp::sum, {{1}, {1}, {1}, {1}, {1}, {big}}), std::vector<float>{big + 4});
}

TEST(ReduceOrder, RoundsSmallFloatsOnce) {
  // In bfloat16, 256 + 1 + 1 is 258. Rounding after each addition would give 256.
  const uint16_t b256 = 0x4380, b1 = 0x3f80, b258 = 0x4381;
  EXPECT_EQ(run<uint16_t>(DType::bf16, ReduceOp::sum, {{b256}, {b1}, {b1}}), std::vector<uint16_t>{b258});
}

TEST(ReduceOrder, ZerosAndNans) {
  for (bool swapped : {false, true}) {
    const float a = swapped ? -0.0f : 0.0f, b = swapped ? 0.0f : -0.0f;
    EXPECT_TRUE(std::signbit(run<float>(DType::f32, ReduceOp::min, {{a}, {b}})[0]));
    EXPECT_FALSE(std::signbit(run<float>(DType::f32, ReduceOp::max, {{a}, {b}})[0]));
  }
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  for (ReduceOp op : {ReduceOp::min, ReduceOp::max}) {
    EXPECT_TRUE(std::isnan(run<float>(DType::f32, op, {{nan}, {1}, {2}})[0]));
    EXPECT_TRUE(std::isnan(run<float>(DType::f32, op, {{1}, {nan}, {2}})[0]));
    EXPECT_TRUE(std::isnan(run<float>(DType::f32, op, {{1}, {2}, {-nan}})[0]));
  }
  EXPECT_TRUE(std::isnan(run<float>(DType::f32, ReduceOp::sum, {{inf}, {-inf}})[0]));
}

TEST(ReduceOrder, IgnoresTheThreadsFloatingPointMode) {
  const std::vector<float> tiny{1e-40f, 3e-45f}, one{1.0f, 1.0f}, sliver{1e-9f, 1e-9f};
  const std::vector<float> expected_tiny{tiny[0] + tiny[0], tiny[1] + tiny[1]};
  std::fesetround(FE_UPWARD);
#if defined(__SSE2__)
  _mm_setcsr(_mm_getcsr() | 0x8040);  // flush-to-zero and denormals-are-zero, as torch.set_flush_denormal(True) sets
  const unsigned mode = _mm_getcsr() & 0xffc0;
#endif
  const auto sums = run<float>(DType::f32, ReduceOp::sum, {tiny, tiny});
  const auto rounded = run<float>(DType::f32, ReduceOp::sum, {one, sliver});
  const int rounding_after = std::fegetround();
#if defined(__SSE2__)
  const unsigned mode_after = _mm_getcsr() & 0xffc0;
  _mm_setcsr(0x1f80);
  EXPECT_EQ(mode_after, mode);
#endif
  std::fesetround(FE_TONEAREST);
  EXPECT_EQ(rounding_after, FE_UPWARD);
  EXPECT_EQ(sums, expected_tiny);
  EXPECT_EQ(rounded, one);
}

// Over 2^32 elements in 2 MB of memory: one file mapped 2,048 times in a row, followed by separate memory.
TEST(ReduceSize, CountsBeyond32Bits) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer keeps four bytes of shadow for each of these, 16 GB of memory in all";
#endif
  const size_t piece = 2 << 20, pieces = (1ull << 32) / piece, count = (1ull << 32) + 4097;
  const int fd = memfd_create("reduce_test", MFD_CLOEXEC);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(ftruncate(fd, piece), 0);
  const size_t length = (pieces + 1) * piece;
  void* room = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(room, MAP_FAILED);
  auto* base = static_cast<uint8_t*>(room);
  for (size_t p = 0; p < pieces; p++) {
    ASSERT_NE(mmap(base + p * piece, piece, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0), MAP_FAILED);
  }
  close(fd);
  uint8_t* end = base + pieces * piece;  // element 2^32
  std::memset(end, 1, piece);
  const void* sources[] = {base, base};
  find_reduce(DType::u8, ReduceOp::sum)(base, nullptr, sources, 2, count, nullptr);
  EXPECT_EQ(end[0], 2);  // doubled exactly once, up to the last element and not further
  EXPECT_EQ(end[4096], 2);
  EXPECT_EQ(end[4097], 1);
  munmap(room, length);
}

TEST(ReduceIsa, IsChosenAndForced) {
  const std::string best = reduce_isa();
  force_reduce_isa("baseline");
  EXPECT_STREQ(reduce_isa(), "baseline");
  EXPECT_THROW(force_reduce_isa("mmx"), Error);
  EXPECT_STREQ(reduce_isa(), "baseline");
  force_reduce_isa(nullptr);
  EXPECT_EQ(reduce_isa(), best);
#if defined(__x86_64__)
  const bool wide =
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  EXPECT_EQ(best == "avx512", wide);
#endif
}

}  // namespace
}  // namespace ark
