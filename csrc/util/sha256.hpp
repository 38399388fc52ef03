// SHA-256 (FIPS 180-4) for cache keys and for checking cached files. It is our own, because users may have no
// cryptographic library. It is not tuned for speed.
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
  // Hashes the length before the text, so that different lists of fields never collide ("ab", "c" and "a", "bc").
  void field(std::string_view text);
  // Returns 64 hexadecimal digits. Call it once, last.
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
