// The messages of the bootstrap besides the handle record.
//
// HelloMessage travels over a local socket to which any process of the machine may connect: a fixed 64 bytes, parsed
// before anything else is trusted. OfferMessage and OutcomeMessage travel through the store. All decode() functions
// throw Error(invalid_argument) and have no side effects, so they can be fuzzed alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "shm/handle.hpp"
#include "util/error.hpp"

namespace ark {

// The first and only message in each direction between two ranks. Except in a refusal, the sender's segment descriptor
// travels with it.
struct HelloMessage {
  static constexpr size_t kEncodedBytes = 64;
  enum class Kind : uint32_t {
    call = 1,    // from the higher rank, which connects
    answer = 2,  // from the lower rank, which listens
    refuse = 3,  // from the lower rank: it cannot take part; its outcome says why
  };

  Kind kind = Kind::call;
  Bytes16 nonce{};
  uint32_t from = 0;
  uint32_t to = 0;
  uint32_t size = 0;
  uint64_t segment_bytes = 0;  // of the sender

  std::vector<uint8_t> encode() const;
  static HelloMessage decode(std::span<const uint8_t> bytes);
  bool operator==(const HelloMessage&) const = default;
};

// Rank 0's nonce and the token of every rank that it saw (see rendezvous.hpp).
struct OfferMessage {
  Bytes16 nonce{};
  std::vector<Bytes16> tokens;  // by rank

  static size_t encoded_bytes(uint32_t size);
  std::vector<uint8_t> encode() const;
  static OfferMessage decode(std::span<const uint8_t> bytes, uint32_t expected_size);
  bool operator==(const OfferMessage&) const = default;
};

// The outcome of a rank's attempts to reach the others.
struct OutcomeMessage {
  static constexpr size_t kEncodedBytes = 512;
  static constexpr size_t kMaxTextBytes = 448;
  static constexpr uint32_t kNobody = UINT32_MAX;
  enum class Kind : uint32_t {
    connected = 1,  // has all segments
    apart = 2,      // memory cannot be shared; text says why
    peer_lost = 3,  // `peer` ended
    gave_up = 4,    // raised an error of its own: `error`, `peer` and text describe it
  };

  Kind kind = Kind::connected;
  Bytes16 nonce{};
  uint32_t rank = 0;
  uint32_t peer = kNobody;
  ErrorKind error = ErrorKind::system;  // for gave_up
  std::string text;

  std::vector<uint8_t> encode() const;
  static OutcomeMessage decode(std::span<const uint8_t> bytes);
  bool operator==(const OutcomeMessage&) const = default;
};

}  // namespace ark
