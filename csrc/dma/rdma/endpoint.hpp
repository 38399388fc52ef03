// What ranks tell each other through the store about RDMA: fixed-size records that are trusted in nothing.
//
// An Offer says what a rank could use; all ranks read all of them and decide alike. An Endpoint is one rank's end of
// the connection to one peer. Both are written field by field, as shm/handle.hpp does: every byte is checked or
// zero.
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
  bool ethernet = false;   // RoCE; else InfiniBand
  uint32_t rails = 0;      // devices that it could use together; 0 unless usable
  uint32_t mtu = 0;        // bytes, of the port (the least of several)
  uint32_t mtu_asked = 0;  // 0: any
  std::string device;      // the first's; empty unless usable
  std::string reason;      // why it is not usable

  std::vector<uint8_t> encode() const;
  // Error(invalid_argument) that names the field and its value.
  static Offer decode(std::span<const uint8_t> bytes);
  bool operator==(const Offer&) const = default;
};

// What all ranks conclude from all offers.
struct Decision {
  bool rdma = false;
  int mtu = 0;         // bytes, where rdma
  int rails = 1;       // of every rank
  std::string reason;  // for people: why, or why not
};
// Error(invalid_argument) where RDMA was asked for and cannot be.
Decision decide(const std::vector<Offer>& offers, int rank);

struct Endpoint {
  static constexpr size_t kEncodedBytes = 128;

  uint32_t from = 0, to = 0, size = 0;
  uint32_t pair = 0;          // number of the queue pair
  uint32_t first_packet = 0;  // its first sequence number
  std::array<uint8_t, 16> gid{};
  uint32_t lid = 0;
  uint32_t key = 0;    // of the inbox
  uint64_t inbox = 0;  // address
  uint32_t slots = 0, slot_bytes = 0;

  std::vector<uint8_t> encode() const;
  static Endpoint decode(std::span<const uint8_t> bytes);
  bool operator==(const Endpoint&) const = default;
};

}  // namespace ark::rdma
