// Keys to sort rows by: the order of the numbers, with NaN greatest, then their position in the row, lowest first.
//
// No two keys of a row are equal, so the result does not depend on the sorting algorithm. The greatest key comes first;
// the least possible key stands for no element.
#pragma once

#include "cuda/loop/ops.cuh"

namespace ark::loop {

// Maps the order of numbers to that of unsigned integers.
ARK_LOOP uint32 ordered(float x) {
  if (x != x) return 0xffffffffu;
  const uint32 bits = bits_as<uint32>(x == 0.0f ? 0.0f : x);  // the two zeros are equal
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}
ARK_LOOP uint32 ordered(int32_t x) {
  return static_cast<uint32>(x) ^ 0x80000000u;
}
ARK_LOOP uint32 ordered(bool x) {
  return x ? 1 : 0;
}
ARK_LOOP uint64 ordered(int64_t x) {
  return static_cast<uint64>(x) ^ 0x8000000000000000ull;
}
ARK_LOOP uint32 ordered(bf16 x) {
  return ordered(widen(x));
}
ARK_LOOP uint32 ordered(f16 x) {
  return ordered(widen(x));
}

// For 64-bit numbers.
struct WideKey {
  uint64 order, rest;
  ARK_LOOP bool operator<(const WideKey& other) const {
    return order < other.order || (order == other.order && rest < other.rest);
  }
};

template <class T>
struct KeyOf {
  using type = uint64;
};
template <>
struct KeyOf<int64_t> {
  using type = WideKey;
};

// kLargest: the largest number has the greatest key; else the smallest.
template <bool kLargest, class T>
ARK_LOOP auto key_of(T x, uint32 place) {
  auto order = ordered(x);
  if constexpr (!kLargest) order = ~order;
  if constexpr (sizeof(order) == 8)
    return WideKey{order, ~place};
  else
    return static_cast<uint64>(order) << 32 | ~place;
}
ARK_LOOP uint32 place_of(uint64 key) {
  return ~static_cast<uint32>(key);
}
ARK_LOOP uint32 place_of(const WideKey& key) {
  return ~static_cast<uint32>(key.rest);
}

// The key of a lane, among `kWidth` adjacent ones.
template <int kWidth>
ARK_LOOP uint64 key_from(uint64 key, int lane) {
  return __shfl_sync(~0u, key, lane, kWidth);
}
template <int kWidth>
ARK_LOOP WideKey key_from(const WideKey& key, int lane) {
  return {__shfl_sync(~0u, key.order, lane, kWidth), __shfl_sync(~0u, key.rest, lane, kWidth)};
}

// Sorts `count` keys (a power of two) by all threads, greatest first (Batcher's bitonic sort).
template <class Key>
ARK_LOOP void sort_keys(Key* keys, uint32 count) {
  sync();
  for (uint32 size = 2; size <= count; size *= 2) {
    for (uint32 apart = size / 2; apart > 0; apart /= 2) {
      for (uint32 i = static_cast<uint32>(thread()); i < count / 2; i += kThreads) {
        const uint32 low = 2 * i - (i & (apart - 1));
        const Key a = keys[low], b = keys[low + apart];
        if ((a < b) == ((low & size) == 0)) {
          keys[low] = b;
          keys[low + apart] = a;
        }
      }
      // At distances up to 32, a warp's 32 pairs are 64 adjacent keys that no other warp touches.
      const uint32 next = apart > 1 ? apart / 2 : size;
      if (apart > 32 || next > 32)
        sync();
      else
        __syncwarp();
    }
  }
  sync();
}

}  // namespace ark::loop
