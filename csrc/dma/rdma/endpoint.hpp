// Fixed-size RDMA records that ranks exchange through the store.
//
// An Offer says what a rank could use. Every rank reads all offers and reaches the same decision. An Endpoint is one
// rank's end of the connection to one peer. The store is not trusted: records are encoded field by field, as in
// shm/handle.hpp, and decode() checks every byte.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "util/error.hpp"

namespace ark::rdma {

enum class Wish : uint32_t { automatic = 0, rdma = 1, gloo = 2 };

struct Offer {
  static constexpr size_t kEncodedBytes = 512;
  static constexpr size_t kMaxDeviceBytes = 64, kMaxReasonBytes = 384;

  uint32_t rank = 0, size = 0;
  Wish wish = Wish::automatic;
  bool usable = false;
  bool ethernet = false;   // RoCE; false: InfiniBand
  uint32_t rails = 0;      // devices that the rank can use at once; 0 unless usable
  uint32_t mtu = 0;        // of the port, in bytes; the smallest of several
  uint32_t mtu_asked = 0;  // requested MTU; 0: any
  std::string device;      // the first device; empty unless usable
  std::string reason;      // why RDMA is not usable

  std::vector<uint8_t> encode() const;
  // Throws Error(invalid_argument) that names the field and its value.
  static Offer decode(std::span<const uint8_t> bytes);
  bool operator==(const Offer&) const = default;
};

// The conclusion that every rank draws from all offers.
struct Decision {
  bool rdma = false;
  int mtu = 0;         // in bytes, if rdma
  int rails = 1;       // devices that every rank uses
  std::string reason;  // for people: why RDMA is used or not
};
// Throws Error(invalid_argument) if a rank requires RDMA and it cannot be used.
Decision decide(const std::vector<Offer>& offers, int rank);

struct Endpoint {
  static constexpr size_t kEncodedBytes = 128;

  uint32_t from = 0, to = 0, size = 0;
  uint32_t pair = 0;          // queue pair number
  uint32_t first_packet = 0;  // first packet sequence number
  std::array<uint8_t, 16> gid{};
  uint32_t lid = 0;
  uint32_t key = 0;    // remote key of the inbox
  uint64_t inbox = 0;  // address of the inbox
  uint32_t slots = 0, slot_bytes = 0;

  std::vector<uint8_t> encode() const;
  static Endpoint decode(std::span<const uint8_t> bytes);
  bool operator==(const Endpoint&) const = default;
};

}  // namespace ark::rdma
