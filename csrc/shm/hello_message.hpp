// The messages of the bootstrap besides the handle record.
//
// Hello travels over a local socket that any process of the machine may connect to: fixed 64 bytes, parsed before
// anything else is believed. Offer and Outcome travel through the store. All decode() functions throw
// Error(invalid_argument) and touch nothing else, so that they can be fuzzed alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "shm/handle.hpp"
#include "util/error.hpp"

namespace ark {

// First and only message in each direction on a connection between two ranks. The descriptor of the sender's segment
// travels with it, except in a refusal.
struct HelloMessage {
  static constexpr size_t kEncodedBytes = 64;
  enum class Kind : uint32_t {
    call = 1,    // from the higher rank, which connects
    answer = 2,  // from the lower rank, which listens
    refuse = 3,  // from the lower rank: it cannot take part; its outcome message says why
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

// Rank 0's nonce together with the token of every rank it saw (rendezvous.hpp says what for).
struct OfferMessage {
  Bytes16 nonce{};
  std::vector<Bytes16> tokens;  // [size]

  static size_t encoded_bytes(uint32_t size);
  std::vector<uint8_t> encode() const;
  static OfferMessage decode(std::span<const uint8_t> bytes, uint32_t expected_size);
  bool operator==(const OfferMessage&) const = default;
};

// How a rank's attempts to reach the others ended.
struct OutcomeMessage {
  static constexpr size_t kEncodedBytes = 512;
  static constexpr size_t kMaxTextBytes = 448;
  static constexpr uint32_t kNobody = UINT32_MAX;
  enum class Kind : uint32_t {
    connected = 1,  // holds everyone's segment
    apart = 2,      // memory cannot be shared; text says why
    peer_lost = 3,  // `peer` ended
    gave_up = 4,    // raised an error of its own: `error`, `peer` and text are that error's
  };

  Kind kind = Kind::connected;
  Bytes16 nonce{};
  uint32_t rank = 0;
  uint32_t peer = kNobody;
  ErrorKind error = ErrorKind::system;  // of gave_up
  std::string text;

  std::vector<uint8_t> encode() const;
  static OutcomeMessage decode(std::span<const uint8_t> bytes);
  bool operator==(const OutcomeMessage&) const = default;
};

}  // namespace ark
