// Splits elements into parts for ranks: every bucket appears once, whole and in order, and parts have similar sizes.
#include "collectives/compressed/layout.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace ark::compressed {
namespace {

uint64_t elements_of(const std::vector<Segment>& segments) {
  uint64_t sum = 0;
  for (const Segment& segment : segments) sum += segment.numel;
  return sum;
}

// Checks the buckets of all parts one by one. Returns the largest record.
uint64_t check(const std::vector<Part>& parts, uint64_t elements, uint32_t element_bytes) {
  uint64_t element = 0, number = 0, most = 0;
  for (const Part& part : parts) {
    uint64_t at = 0, seen = 0;
    for_buckets(part, element_bytes, 0, part.buckets, [&](const Bucket& bucket) {
      EXPECT_EQ(bucket.element, element);
      EXPECT_EQ(bucket.number, number);
      EXPECT_EQ(bucket.at, at);
      EXPECT_GE(bucket.numel, 1u);
      EXPECT_LE(bucket.numel, bucket.piece->bucket);
      const uint64_t bytes = quantize::record_bytes(bucket.numel, bucket.piece->bits, element_bytes);
      EXPECT_EQ(bytes % 8, 0u);
      element += bucket.numel, at += bytes, ++number, ++seen;
      most = std::max(most, bytes);
    });
    EXPECT_EQ(part.bytes, at);
    EXPECT_EQ(part.buckets, seen);
    // Any range of a part's buckets equals that range of the whole.
    for (uint64_t from = 0; from < std::min<uint64_t>(part.buckets, 5); ++from) {
      uint64_t count = 0;
      for_buckets(part, element_bytes, from, std::min(part.buckets, from + 3), [&](const Bucket&) { ++count; });
      EXPECT_EQ(count, std::min<uint64_t>(3, part.buckets - from));
    }
  }
  EXPECT_EQ(element, elements);
  return most;
}

TEST(CompressedLayout, RecordsHaveRoomForTheirCodes) {
  for (uint64_t numel = 1; numel <= 4096; numel += numel < 300 ? 1 : 97)
    for (uint32_t bits = 1; bits <= 8; ++bits) {
      EXPECT_GE(quantize::code_bytes(numel, bits) * 8, numel * bits);
      EXPECT_GE(quantize::code_bytes(numel, bits), (numel + 7) / 8 * bits);
      EXPECT_LT(quantize::code_bytes(numel, bits), (numel + 7) / 8 * bits + 8);
    }
  EXPECT_EQ(quantize::record_bytes(512, 4, 2), 264u);
  EXPECT_EQ(quantize::record_bytes(3, 0, 2), 8u);
}

TEST(CompressedLayout, PartsAreWholeBucketsOfAboutAsManyBytes) {
  std::mt19937 random(1);
  const auto below = [&](uint32_t limit) { return static_cast<uint32_t>(random() % limit); };
  for (int round = 0; round < 400; ++round) {
    std::vector<Segment> segments(below(12));
    for (Segment& segment : segments) {
      const uint32_t numel = below(4) == 0 ? below(3) : below(20000);
      segment = {numel, below(9), 128 + 32 * below(125)};
    }
    const uint32_t element_bytes = below(2) == 0 ? 2 : 4;
    const int ranks = 1 + static_cast<int>(below(9));
    const std::vector<Part> parts = cut(segments, element_bytes, ranks);
    ASSERT_EQ(parts.size(), static_cast<size_t>(ranks));
    const uint64_t largest = check(parts, elements_of(segments), element_bytes);
    uint64_t all = 0;
    for (const Part& part : parts) all += part.bytes;
    for (const Part& part : parts) EXPECT_LE(part.bytes, all / static_cast<uint64_t>(ranks) + 1 + largest);
  }
}

TEST(CompressedLayout, SlicesOfAPartAreItsBucketsInOrder) {
  for (const Part& part : cut({{10'001, 4, 512}, {300, 0, 128}, {0, 2, 128}, {5000, 7, 4096}, {3, 1, 128}}, 2, 3)) {
    for (const uint64_t count : {1, 2, 3, 7, 40}) {
      std::vector<Bucket> whole, sliced;
      uint64_t bytes = 0;
      for_buckets(part, 2, 0, part.buckets, [&](const Bucket& bucket) { whole.push_back(bucket); });
      for (uint64_t i = 0; i < count; ++i) {
        const uint64_t from = part.buckets * i / count, to = part.buckets * (i + 1) / count;
        const Part made = slice(part, 2, from, to);
        EXPECT_EQ(made.buckets, to - from);
        uint64_t at = 0;
        for_buckets(made, 2, 0, made.buckets, [&](const Bucket& bucket) {
          EXPECT_EQ(bucket.at, at);
          at += quantize::record_bytes(bucket.numel, bucket.piece->bits, 2);
          sliced.push_back({nullptr, bucket.element, bytes + bucket.at, bucket.numel, bucket.number});
        });
        EXPECT_EQ(made.bytes, at);
        bytes += at;
      }
      ASSERT_EQ(sliced.size(), whole.size());
      for (size_t i = 0; i < whole.size(); ++i) {
        EXPECT_EQ(sliced[i].element, whole[i].element);
        EXPECT_EQ(sliced[i].at, whole[i].at);
        EXPECT_EQ(sliced[i].numel, whole[i].numel);
        EXPECT_EQ(sliced[i].number, whole[i].number);
      }
    }
  }
}

TEST(CompressedLayout, MoreRanksThanBucketsLeavesSomeWithNothing) {
  const std::vector<Part> parts = cut({{600, 4, 512}}, 4, 5);
  uint64_t buckets = 0, empty = 0;
  for (const Part& part : parts) buckets += part.buckets, empty += part.bytes == 0;
  EXPECT_EQ(buckets, 2u);
  EXPECT_EQ(empty, 3u);
  for (const Part& part : cut({}, 2, 3)) EXPECT_EQ(part.bytes, 0u);
  for (const Part& part : cut({{0, 4, 128}, {0, 0, 128}}, 2, 3)) EXPECT_TRUE(part.pieces.empty());
}

TEST(CompressedLayout, SharesRepeatTheSegments) {
  const std::vector<Segment> segments = {{130, 3, 128}, {0, 4, 512}, {7, 0, 128}};
  const std::vector<Part> parts = shares_of(segments, 2, 3);
  ASSERT_EQ(parts.size(), 3u);
  check(parts, 3 * elements_of(segments), 2);
  for (const Part& part : parts) {
    EXPECT_EQ(part.bytes, parts[0].bytes);
    EXPECT_EQ(part.buckets, 3u);
  }
  EXPECT_EQ(parts[2].pieces[0].element, 274u);
}

}  // namespace
}  // namespace ark::compressed
