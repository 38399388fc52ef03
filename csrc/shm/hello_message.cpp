// Encodes and checks hello, offer and outcome. The calls below define the layouts.
#include "shm/hello_message.hpp"

#include "shm/wire.hpp"

namespace ark {

namespace {

constexpr uint32_t kHelloMagic = 0x4f'4c'4b'41;    // "AKLO" in memory
constexpr uint32_t kOfferMagic = 0x46'4f'4b'41;    // "AKOF"
constexpr uint32_t kOutcomeMagic = 0x43'4f'4b'41;  // "AKOC"
constexpr uint32_t kHelloVersion = 1;
constexpr size_t kOfferHead = 32;

template <typename Kind>
Kind checked_kind(const char* message, uint32_t value, Kind last) {
  if (value < 1 || value > static_cast<uint32_t>(last)) wire::reject(message, "kind is " + std::to_string(value));
  return static_cast<Kind>(value);
}

// Error texts of other layers may contain anything; unprintable bytes become '?'.
std::string printable(std::string text) {
  for (char& c : text)
    if (c < ' ' || c > '~') c = '?';
  return text;
}

}  // namespace

std::vector<uint8_t> HelloMessage::encode() const {
  wire::Writer out(kEncodedBytes);
  out.number(kHelloMagic);
  out.number(kHelloVersion);
  out.number(static_cast<uint32_t>(kind));
  out.number(from);
  out.number(to);
  out.number(size);
  out.number(segment_bytes);
  out.raw(nonce);
  return out.take();
}

HelloMessage HelloMessage::decode(std::span<const uint8_t> bytes) {
  constexpr char kName[] = "hello";
  wire::Reader in(kName, bytes, kEncodedBytes);
  HelloMessage hello;
  in.constant("magic", kHelloMagic);
  in.constant("version", kHelloVersion);
  hello.kind = checked_kind(kName, in.number<uint32_t>(), Kind::refuse);
  hello.from = in.number<uint32_t>();
  hello.to = in.number<uint32_t>();
  hello.size = in.number<uint32_t>();
  hello.segment_bytes = in.number<uint64_t>();
  hello.nonce = in.raw<16>();
  in.finish();
  if (hello.size < 2 || hello.size > kMaxRanks) wire::reject(kName, "group size " + std::to_string(hello.size));
  if (hello.from >= hello.size || hello.to >= hello.size || hello.from == hello.to)
    wire::reject(kName, "from rank " + std::to_string(hello.from) + " to rank " + std::to_string(hello.to) + " of " +
                            std::to_string(hello.size));
  if ((hello.kind == Kind::call) != (hello.from > hello.to))
    wire::reject(kName, "the higher rank calls, the lower one answers");
  const bool has_segment = hello.segment_bytes > 0 && hello.segment_bytes <= kMaxSegmentBytes;
  if (has_segment != (hello.kind != Kind::refuse))
    wire::reject(kName, "segment of " + std::to_string(hello.segment_bytes) + " bytes");
  return hello;
}

size_t OfferMessage::encoded_bytes(uint32_t size) {
  return kOfferHead + size_t{size} * 16;
}

std::vector<uint8_t> OfferMessage::encode() const {
  const auto size = static_cast<uint32_t>(tokens.size());
  wire::Writer out(encoded_bytes(size));
  out.number(kOfferMagic);
  out.number(kHelloVersion);
  out.number(size);
  out.number(uint32_t{0});
  out.raw(nonce);
  for (const Bytes16& token : tokens) out.raw(token);
  return out.take();
}

OfferMessage OfferMessage::decode(std::span<const uint8_t> bytes, uint32_t expected_size) {
  wire::Reader in("offer", bytes, encoded_bytes(expected_size));
  OfferMessage offer;
  in.constant("magic", kOfferMagic);
  in.constant("version", kHelloVersion);
  in.constant("group size", expected_size);
  in.constant("reserved field", uint32_t{0});
  offer.nonce = in.raw<16>();
  offer.tokens.reserve(expected_size);
  for (uint32_t r = 0; r < expected_size; ++r) offer.tokens.push_back(in.raw<16>());
  in.finish();
  return offer;
}

std::vector<uint8_t> OutcomeMessage::encode() const {
  wire::Writer out(kEncodedBytes);
  out.number(kOutcomeMagic);
  out.number(kHelloVersion);
  out.number(static_cast<uint32_t>(kind));
  out.number(rank);
  out.number(peer);
  out.number(static_cast<uint32_t>(error));
  out.raw(nonce);
  out.text(printable(text), kMaxTextBytes);
  return out.take();
}

OutcomeMessage OutcomeMessage::decode(std::span<const uint8_t> bytes) {
  constexpr char kName[] = "outcome";
  wire::Reader in(kName, bytes, kEncodedBytes);
  OutcomeMessage outcome;
  in.constant("magic", kOutcomeMagic);
  in.constant("version", kHelloVersion);
  outcome.kind = checked_kind(kName, in.number<uint32_t>(), Kind::gave_up);
  outcome.rank = in.number<uint32_t>();
  outcome.peer = in.number<uint32_t>();
  const uint32_t error = in.number<uint32_t>();
  outcome.nonce = in.raw<16>();
  outcome.text = in.text("text", kMaxTextBytes);
  in.finish();
  if (error > static_cast<uint32_t>(ErrorKind::system)) wire::reject(kName, "error kind " + std::to_string(error));
  outcome.error = static_cast<ErrorKind>(error);
  if (outcome.rank >= kMaxRanks) wire::reject(kName, "rank " + std::to_string(outcome.rank));
  if (outcome.peer != kNobody && (outcome.peer >= kMaxRanks || outcome.peer == outcome.rank))
    wire::reject(kName, "peer " + std::to_string(outcome.peer));
  if (outcome.kind == Kind::peer_lost && outcome.peer == kNobody) wire::reject(kName, "a lost peer without a rank");
  return outcome;
}

}  // namespace ark
