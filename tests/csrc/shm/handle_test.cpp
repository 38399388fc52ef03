// Tests every message of the bootstrap: decoding reverses encoding, and all other byte strings are rejected by name.
#include "shm/handle.hpp"

#include <gtest/gtest.h>

#include "shm/hello_message.hpp"
#include "util/error.hpp"

namespace ark {
namespace {

HandleRecord sample_record() {
  HandleRecord record;
  record.rank = 3;
  record.size = 8;
  record.sharing = Sharing::willing;
  for (size_t i = 0; i < 16; ++i) {
    record.nonce[i] = static_cast<uint8_t>(0xa0 + i);
    record.host_id[i] = static_cast<uint8_t>(i * 17);
  }
  record.network_space = 4026531833;
  record.uid = 1000;
  record.pid = 4711;
  record.release = 0x01020a;
  record.segment_bytes = uint64_t{5} << 33;
  record.socket_name = "ark-0123456789abcdef";
  return record;
}

HelloMessage sample_hello() {
  HelloMessage hello;
  hello.kind = HelloMessage::Kind::call;
  hello.nonce = sample_record().nonce;
  hello.from = 5;
  hello.to = 2;
  hello.size = 8;
  hello.segment_bytes = 4097;
  return hello;
}

OutcomeMessage sample_outcome() {
  OutcomeMessage outcome;
  outcome.kind = OutcomeMessage::Kind::apart;
  outcome.nonce = sample_record().nonce;
  outcome.rank = 1;
  outcome.peer = 0;
  outcome.text = "rank 1 cannot share memory with rank 0: no";
  return outcome;
}

template <typename Work>
std::string rejection(Work work) {
  try {
    work();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
    return error.what();
  }
  return "accepted";
}

void expect_rejected(const HandleRecord& record, const std::string& why) {
  const auto bytes = record.encode();
  const std::string said = rejection([&] { HandleRecord::decode(bytes); });
  EXPECT_NE(said.find("handle record rejected: "), said.npos) << said;
  EXPECT_NE(said.find(why), said.npos) << said;
}

TEST(HandleRecord, RoundTrip) {
  const HandleRecord record = sample_record();
  const auto bytes = record.encode();
  ASSERT_EQ(bytes.size(), HandleRecord::kEncodedBytes);
  EXPECT_EQ(HandleRecord::decode(bytes), record);

  HandleRecord declined;
  declined.size = 1;
  EXPECT_EQ(HandleRecord::decode(declined.encode()), declined);
}

// Two builds must agree on the layout: little-endian on any machine.
TEST(HandleRecord, Layout) {
  const auto bytes = sample_record().encode();
  EXPECT_EQ(std::string(bytes.begin(), bytes.begin() + 4), "ARKH");
  EXPECT_EQ(bytes[4], 1);        // version
  EXPECT_EQ(bytes[8], 3);        // rank
  EXPECT_EQ(bytes[12], 8);       // size
  EXPECT_EQ(bytes[28], 0x0a);    // release
  EXPECT_EQ(bytes[32], 0xa0);    // nonce
  EXPECT_EQ(bytes[72 + 4], 10);  // 5 << 33 is 10 << 32: byte 4 of segment_bytes
}

TEST(HandleRecord, EveryFieldIsChecked) {
  const auto change = [](auto field, auto value) {
    HandleRecord record = sample_record();
    record.*field = value;
    return record;
  };
  expect_rejected(change(&HandleRecord::rank, 8u), "rank 8 of 8");
  expect_rejected(change(&HandleRecord::size, 0u), "group size 0 is not in 1..65536");
  expect_rejected(change(&HandleRecord::size, 65537u), "group size 65537");
  expect_rejected(change(&HandleRecord::sharing, static_cast<Sharing>(0)), "sharing is 0");
  expect_rejected(change(&HandleRecord::sharing, static_cast<Sharing>(99)), "sharing is 99");
  expect_rejected(change(&HandleRecord::sharing, Sharing::declined), "names a segment it does not share");
  expect_rejected(change(&HandleRecord::pid, 0x80000000u), "process id 2147483648");
  expect_rejected(change(&HandleRecord::release, 0x01000000u), "release of ark_torch is 16777216");
  expect_rejected(change(&HandleRecord::segment_bytes, kMaxSegmentBytes + 1), "segment of 70368744177665 bytes");
  expect_rejected(change(&HandleRecord::segment_bytes, uint64_t{0}), "names no segment");
  expect_rejected(change(&HandleRecord::socket_name, std::string()), "names no segment or socket");
  expect_rejected(change(&HandleRecord::socket_name, std::string("../x")), "holds more than a-z, 0-9 and -");
  expect_rejected(change(&HandleRecord::socket_name, std::string("ark\n")), "unprintable");
}

TEST(HandleRecord, WrongLengths) {
  auto bytes = sample_record().encode();
  EXPECT_NE(rejection([&] { HandleRecord::decode({}); }).find("0 bytes where 256 belong"), std::string::npos);
  for (size_t length = 0; length < bytes.size(); ++length)
    EXPECT_NE(rejection([&] { HandleRecord::decode(std::span(bytes).first(length)); }), "accepted");
  bytes.push_back(0);
  EXPECT_NE(rejection([&] { HandleRecord::decode(bytes); }).find("257 bytes"), std::string::npos);
}

TEST(HandleRecord, NoByteIsUnchecked) {
  // A flipped bit is either rejected or changes a field that accepts any value. It never goes unnoticed.
  const HandleRecord record = sample_record();
  for (size_t at = 0; at < HandleRecord::kEncodedBytes; ++at)
    for (int bit : {0, 7}) {
      auto bytes = record.encode();
      bytes[at] = static_cast<uint8_t>(bytes[at] ^ (1 << bit));
      const std::string said = rejection([&] { EXPECT_NE(HandleRecord::decode(bytes), record) << "byte " << at; });
      const bool has_one_value = at < 8 || at == 31 || at >= 80 + 4 + record.socket_name.size();
      EXPECT_FALSE(has_one_value && said == "accepted") << "byte " << at;
    }
}

TEST(HandleRecord, NameLengthBeyondItsRoom) {
  auto bytes = sample_record().encode();
  bytes[80] = 200;
  EXPECT_NE(rejection([&] { HandleRecord::decode(bytes); }).find("claims 200 bytes of 107"), std::string::npos);
  bytes[83] = 0xff;
  EXPECT_NE(rejection([&] { HandleRecord::decode(bytes); }).find("claims"), std::string::npos);
}

TEST(HelloMessage, RoundTripAndChecks) {
  HelloMessage hello = sample_hello();
  EXPECT_EQ(HelloMessage::decode(hello.encode()), hello);
  auto expect = [](auto field, auto value, const std::string& why) {
    HelloMessage wrong = sample_hello();
    wrong.*field = value;
    const auto bytes = wrong.encode();
    const std::string said = rejection([&] { HelloMessage::decode(bytes); });
    EXPECT_NE(said.find(why), said.npos) << said;
  };
  expect(&HelloMessage::kind, static_cast<HelloMessage::Kind>(4), "kind is 4");
  expect(&HelloMessage::kind, HelloMessage::Kind::answer, "the higher rank calls");
  expect(&HelloMessage::from, 2u, "from rank 2 to rank 2");
  expect(&HelloMessage::from, 8u, "from rank 8 to rank 2 of 8");
  expect(&HelloMessage::to, 7u, "the higher rank calls");
  expect(&HelloMessage::size, 1u, "group size 1");
  expect(&HelloMessage::segment_bytes, uint64_t{0}, "segment of 0 bytes");
  expect(&HelloMessage::segment_bytes, kMaxSegmentBytes + 1, "segment of");
  auto bytes = hello.encode();
  bytes.back() = 1;
  EXPECT_NE(rejection([&] { HelloMessage::decode(bytes); }).find("padding is not zero"), std::string::npos);
}

TEST(HelloMessage, RefusalCarriesNoSegment) {
  HelloMessage refusal;
  refusal.kind = HelloMessage::Kind::refuse;
  refusal.from = 0;
  refusal.to = 1;
  refusal.size = 2;
  EXPECT_EQ(HelloMessage::decode(refusal.encode()), refusal);
  refusal.segment_bytes = 1;
  const auto bytes = refusal.encode();
  EXPECT_NE(rejection([&] { HelloMessage::decode(bytes); }), "accepted");
}

TEST(OfferMessage, OtherSizesAreRejected) {
  OfferMessage offer;
  offer.nonce = sample_record().nonce;
  offer.tokens = {Bytes16{1}, Bytes16{2}, Bytes16{3}};
  EXPECT_EQ(OfferMessage::decode(offer.encode(), 3), offer);
  EXPECT_NE(rejection([&] { OfferMessage::decode(offer.encode(), 2); }), "accepted");
  EXPECT_NE(rejection([&] { OfferMessage::decode(offer.encode(), 4); }), "accepted");
}

TEST(OutcomeMessage, RoundTripAndChecks) {
  OutcomeMessage outcome = sample_outcome();
  EXPECT_EQ(OutcomeMessage::decode(outcome.encode()), outcome);
  outcome.kind = OutcomeMessage::Kind::peer_lost;
  outcome.peer = OutcomeMessage::kNobody;
  EXPECT_NE(rejection([&] { OutcomeMessage::decode(outcome.encode()); }).find("without a rank"), std::string::npos);
  outcome = sample_outcome();
  outcome.peer = outcome.rank;
  EXPECT_NE(rejection([&] { OutcomeMessage::decode(outcome.encode()); }), "accepted");
}

TEST(OutcomeMessage, AnyTextTravels) {
  OutcomeMessage outcome = sample_outcome();
  outcome.text = std::string(1000, 'x') + "\n";
  EXPECT_EQ(OutcomeMessage::decode(outcome.encode()).text, std::string(OutcomeMessage::kMaxTextBytes, 'x'));
  outcome.text = "a\nb\xff";
  EXPECT_EQ(OutcomeMessage::decode(outcome.encode()).text, "a?b?");
}

TEST(EqualConstantTime, Compares) {
  const Bytes16 a{1, 2, 3};
  for (size_t at = 0; at < 16; ++at) {
    Bytes16 b = a;
    EXPECT_TRUE(equal_constant_time(a, b));
    b[at] = static_cast<uint8_t>(b[at] + 1);
    EXPECT_FALSE(equal_constant_time(a, b));
  }
  EXPECT_FALSE(equal_constant_time(a, std::span(a).first(15)));
}

}  // namespace
}  // namespace ark
