// What a rank tells the others about its part of a window, through the store: a record of fixed size, trusted in
// nothing, as shm/handle.hpp's.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "dma/rdma/options.hpp"

namespace ark {

struct RmaRecord {
  static constexpr size_t kEncodedBytes = 512;
  static constexpr size_t kMaxReasonBytes = 384;

  uint32_t rank = 0, size = 0;
  uint32_t window = 0;  // its number in the group
  uint64_t elements = 0;
  uint32_t item = 1, type = 0;                    // bytes of an element; its type
  uint64_t address = 0;                           // for RDMA; 0: not registered
  std::array<uint32_t, rdma::kMostRails> keys{};  // by rail
  std::string reason;                             // why there is no window; empty: there is

  std::vector<uint8_t> encode() const;
  // Error(invalid_argument) that names the field and its value.
  static RmaRecord decode(std::span<const uint8_t> bytes);
  bool operator==(const RmaRecord&) const = default;
};

}  // namespace ark
