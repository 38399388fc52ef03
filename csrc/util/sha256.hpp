// SHA-256 (FIPS 180-4). A few lines of our own, since users need not have a cryptographic library: cache keys and the
// check of what is loaded from the cache, not speed (about 200 MB/s).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace ark::jit {

class Sha256 {
 public:
  void update(const void* data, size_t bytes);
  // A field: its length goes before it, so that no two lists of fields hash alike ("ab", "c" and "a", "bc").
  void field(std::string_view text);
  // 64 hexadecimal digits. The object is spent.
  std::string hex_digest();

 private:
  void block(const uint8_t* bytes);

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> pending_{};
  size_t pending_bytes_ = 0;
  uint64_t total_bytes_ = 0;
};

std::string sha256_hex(std::span<const uint8_t> data);

}  // namespace ark::jit
