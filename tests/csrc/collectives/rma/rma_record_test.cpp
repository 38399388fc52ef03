// Records of windows: all that is written is read, and what is damaged is refused by name.
#include "collectives/rma/rma_record.hpp"

#include <gtest/gtest.h>

#include "util/error.hpp"

namespace ark {
namespace {

RmaRecord record() {
  RmaRecord one;
  one.rank = 3;
  one.size = 5;
  one.window = 9;
  one.elements = 1'000'000;
  one.item = 4;
  one.type = 6;
  one.address = 0x7f00'1234'5000;
  one.keys = {0x1234, 0, 7};
  return one;
}

std::string refusal(const std::vector<uint8_t>& bytes) {
  try {
    RmaRecord::decode(bytes);
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

TEST(RmaRecordTest, IsReadAsWritten) {
  EXPECT_EQ(RmaRecord::decode(record().encode()), record());
  RmaRecord none;
  none.size = 1;
  none.reason = "tensor is on cuda:0";
  EXPECT_EQ(RmaRecord::decode(none.encode()), none);
  none.reason = std::string(1000, 'x') + "\n";
  EXPECT_EQ(RmaRecord::decode(none.encode()).reason, std::string(RmaRecord::kMaxReasonBytes, 'x'));
}

TEST(RmaRecordTest, WhatIsDamagedIsRefused) {
  const auto rejects = [](auto&& damage, const char* words) {
    RmaRecord one = record();
    damage(one);
    EXPECT_NE(refusal(one.encode()).find(words), std::string::npos) << refusal(one.encode());
  };
  rejects([](RmaRecord& one) { one.rank = 5; }, "rank 5 of 5");
  rejects([](RmaRecord& one) { one.size = 0; }, "group size 0");
  rejects([](RmaRecord& one) { one.item = 0; }, "elements of 0 bytes");
  rejects([](RmaRecord& one) { one.item = 17; }, "elements of 17 bytes");
  rejects([](RmaRecord& one) { one.elements = UINT64_MAX; }, "elements");
  rejects([](RmaRecord& one) { one.address = UINT64_MAX - 100; }, "memory at");
  auto bytes = record().encode();
  bytes.back() = 1;
  EXPECT_NE(refusal(bytes).find("padding is not zero"), std::string::npos);
  bytes.pop_back();
  EXPECT_NE(refusal(bytes).find("511 bytes where 512 belong"), std::string::npos);
  bytes = record().encode();
  bytes[0] ^= 1;
  EXPECT_NE(refusal(bytes).find("magic"), std::string::npos);
}

}  // namespace
}  // namespace ark
