// Compares every dtype, operation, number of ranks and instruction set with the reference, bit for bit, with odd sizes,
// misaligned pointers, results in place of an input, and special values.
#include "collectives/cpu/reduce/reduce.hpp"

#include <gtest/gtest.h>

#include <random>
#include <string>

#include "reduce_reference.hpp"
#include "util/error.hpp"

namespace ark {
namespace {

std::vector<DType> all_dtypes() {
  std::vector<DType> all;
  for (int d = 0; d < kDTypes; d++) all.push_back(static_cast<DType>(d));
  return all;
}

std::vector<ReduceOp> all_ops() {
  std::vector<ReduceOp> all;
  for (int o = 0; o < kReduceOps; o++) all.push_back(static_cast<ReduceOp>(o));
  return all;
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const char* name : {"baseline", "avx2", "avx512"}) {
    try {
      force_reduce_isa(name);
      names.push_back(name);
    } catch (const Error&) {
    }
  }
  force_reduce_isa(nullptr);
  return names;
}

// Exactly `bytes` bytes at `shift` past an aligned address, so that AddressSanitizer detects any overrun.
class Buffer {
 public:
  Buffer(size_t bytes, size_t shift) : storage_(bytes + shift), shift_(shift) {}
  uint8_t* data() { return storage_.data() + shift_; }

 private:
  std::vector<uint8_t> storage_;
  size_t shift_;
};

bool same(const void* a, const void* b, size_t bytes) {
  return bytes == 0 || std::memcmp(a, b, bytes) == 0;
}

// Half of the values are ordinary numbers whose sums round and cancel, a quarter are special, a quarter random bits.
class Inputs {
 public:
  explicit Inputs(uint32_t seed) : random_(seed) {}

  void fill(DType dtype, uint8_t* to, size_t count) {
    const DType part = reference::scalar_of(dtype);
    const size_t bytes = size_of(part), scalars = count * size_of(dtype) / bytes;
    for (size_t i = 0; i < scalars; i++, to += bytes) {
      uint64_t bits = random_();
      const uint64_t choice = random_() % 4;
      if (part == DType::f32 && choice < 2) bits = std::bit_cast<uint32_t>(static_cast<float>(ordinary()));
      if (part == DType::f64 && choice < 2) bits = std::bit_cast<uint64_t>(ordinary());
      if (part == DType::f32 && choice == 2) bits = kSpecial32[random_() % std::size(kSpecial32)];
      if (part == DType::f64 && choice == 2) bits = kSpecial64[random_() % std::size(kSpecial64)];
      if (part == DType::f16 && choice < 2) bits = reference::encode_small(part, ordinary());
      if (part == DType::bf16 && choice < 2) bits = reference::encode_small(part, ordinary());
      if (part == DType::boolean && choice < 3) bits &= 1;
      std::memcpy(to, &bits, bytes);
    }
  }

 private:
  static constexpr uint32_t kSpecial32[] = {0,          0x80000000, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc00001,
                                            0x7f800001, 0x7fffffff, 1,          0x80000001, 0x007fffff, 0x00800000,
                                            0x7f7fffff, 0xff7fffff, 0x3f800000, 0xbf800000, 0x34000000, 0x33800000};
  static constexpr uint64_t kSpecial64[] = {0,
                                            1ull << 63,
                                            0x7ffull << 52,
                                            0xfffull << 52,
                                            0x7ff8ull << 48,
                                            0xfff8000000000001,
                                            0x7ff0000000000001,
                                            1,
                                            0x000fffffffffffff,
                                            0x7fefffffffffffff,
                                            0xffefffffffffffff,
                                            0x3ffull << 52,
                                            0xbffull << 52};

  double ordinary() { return std::uniform_real_distribution<double>(-8, 8)(random_); }
  std::mt19937_64 random_;
};

class ReduceEveryType : public testing::TestWithParam<DType> {
 protected:
  ~ReduceEveryType() override { force_reduce_isa(nullptr); }

  // Checks all instruction sets and all result layouts for one operation and size.
  void check(ReduceOp op, int ranks, size_t count) {
    const DType dtype = GetParam();
    const size_t bytes = count * size_of(dtype);
    std::vector<Buffer> inputs;
    std::vector<const uint8_t*> sources;
    Inputs random(static_cast<uint32_t>(count * 100 + static_cast<size_t>(ranks)));
    for (int r = 0; r < ranks; r++) inputs.emplace_back(bytes, (static_cast<size_t>(r) * 5 + count) % 9);
    for (Buffer& input : inputs) random.fill(dtype, input.data(), count);
    for (Buffer& input : inputs) sources.push_back(input.data());
    std::vector<double> factors;
    for (int r = 0; r < ranks; r++) factors.push_back(1.0 / (r + 3) - (r % 2));  // not exact in float32
    const std::vector<uint8_t> expected = reference::reduce(dtype, op, sources, count, factors.data());

    for (const std::string& isa : isas_) {
      force_reduce_isa(isa.c_str());
      const ReduceFn fn = find_reduce(dtype, op);
      ASSERT_NE(fn, nullptr);
      for (int placing = 0; placing < 4; placing++) {
        std::vector<Buffer> copies = inputs;
        std::vector<const void*> from;
        for (Buffer& copy : copies) from.push_back(copy.data());
        Buffer other(bytes, 3), second(bytes, 1);
        void* out = placing == 1 ? copies.front().data() : placing == 2 ? copies.back().data() : other.data();
        void* out2 = placing == 2 ? second.data() : placing == 3 ? copies[copies.size() / 2].data() : nullptr;
        fn(out, out2, from.data(), ranks, count, op == ReduceOp::premul_sum ? factors.data() : nullptr);
        for (const void* result : {static_cast<const void*>(out), static_cast<const void*>(out2)}) {
          if (!result || same(result, expected.data(), bytes)) continue;
          size_t at = 0;
          while (static_cast<const uint8_t*>(result)[at] == expected[at]) at++;
          FAIL() << name_of(dtype) << " " << name_of(op) << ", " << ranks << " ranks, " << count << " elements, " << isa
                 << ", placing " << placing << (result == out2 ? " (out2)" : "") << ": wrong from element "
                 << at / size_of(dtype);
        }
        for (size_t r = 0; r < copies.size(); r++) {  // inputs that are not results must stay unchanged
          if (from[r] == out || from[r] == out2) continue;
          ASSERT_TRUE(same(from[r], sources[r], bytes)) << name_of(dtype) << " " << name_of(op) << " " << isa;
        }
      }
    }
  }

  const std::vector<std::string> isas_ = available_isas();
};

TEST_P(ReduceEveryType, GivesTheReferencesBits) {
  for (ReduceOp op : all_ops()) {
    if (why_unsupported(GetParam(), op)) continue;
    for (int ranks : {1, 2, 3, 4, 5, 8, 9, 13}) {
      for (size_t count : {0, 1, 2, 3, 7, 15, 17, 31, 65, 129, 511, 1027, 2049}) {
        if (ranks > 5 && count > 65 && count != 1027) continue;
        check(op, ranks, count);
        if (HasFatalFailure()) return;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, ReduceEveryType, testing::ValuesIn(all_dtypes()),
                         [](const auto& info) { return info.param == DType::raw8 ? "raw8" : name_of(info.param); });

// 65,536 pairs cover all pairs of inputs of an 8-bit format. In 16 bits, every value is paired with 1 and with itself.
TEST(Reduce, EveryValueOfTheSmallFormats) {
  const size_t count = 1 << 16;
  for (DType dtype : {DType::f16, DType::bf16, DType::f8_e4m3fn, DType::f8_e5m2, DType::f8_e4m3fnuz, DType::f8_e5m2fnuz,
                      DType::f8_e8m0fnu}) {
    const size_t bytes = size_of(dtype);
    std::vector<uint8_t> a(count * bytes), b(count * bytes), out(count * bytes);
    for (size_t i = 0; i < count; i++) {
      const size_t first = bytes == 1 ? i & 0xff : i;
      const size_t second = bytes == 1 ? i >> 8 : i % 3 ? reference::encode_small(dtype, 1.0) : i;
      std::memcpy(&a[i * bytes], &first, bytes);
      std::memcpy(&b[i * bytes], &second, bytes);
    }
    for (ReduceOp op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::product, ReduceOp::min, ReduceOp::max}) {
      if (why_unsupported(dtype, op)) continue;
      const auto expected = reference::reduce(dtype, op, {a.data(), b.data()}, count, nullptr);
      for (const std::string& isa : available_isas()) {
        force_reduce_isa(isa.c_str());
        const void* sources[] = {a.data(), b.data()};
        find_reduce(dtype, op)(out.data(), nullptr, sources, 2, count, nullptr);
        EXPECT_EQ(out, expected) << name_of(dtype) << " " << name_of(op) << " " << isa;
      }
      force_reduce_isa(nullptr);
    }
  }
}

}  // namespace
}  // namespace ark
