// Copies between users' tensors and slots.
//
// copy_bytes is memcpy that accepts null pointers for zero bytes. copy_out writes to a user's output. For operations
// larger than the caches (`stream`) it uses non-temporal stores, which avoid reading every line before it is
// overwritten. These stores are weakly ordered, so a fence orders them before other threads learn that the operation is
// done.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace ark {

// Outputs of operations of this size or more do not stay in cache anyway.
inline constexpr size_t kStreamBytes = size_t{4} << 20;

inline void copy_bytes(void* target, const void* source, size_t bytes) {
  if (bytes > 0) std::memcpy(target, source, bytes);
}

inline void copy_out(void* target, const void* source, size_t bytes, bool stream) {
#if defined(__x86_64__)
  if (stream && bytes >= 4096) {
    auto* to = static_cast<std::byte*>(target);
    auto* from = static_cast<const std::byte*>(source);
    const size_t head = (64 - reinterpret_cast<uintptr_t>(to) % 64) % 64;
    std::memcpy(to, from, head);
    size_t done = head;
    for (; done + 64 <= bytes; done += 64) {
      const auto* line = reinterpret_cast<const __m128i*>(from + done);
      auto* place = reinterpret_cast<__m128i*>(to + done);
      const __m128i a = _mm_loadu_si128(line), b = _mm_loadu_si128(line + 1);
      const __m128i c = _mm_loadu_si128(line + 2), d = _mm_loadu_si128(line + 3);
      _mm_stream_si128(place, a);
      _mm_stream_si128(place + 1, b);
      _mm_stream_si128(place + 2, c);
      _mm_stream_si128(place + 3, d);
    }
    std::memcpy(to + done, from + done, bytes - done);
    _mm_sfence();
    return;
  }
#endif
  copy_bytes(target, source, bytes);
}

}  // namespace ark
