// Loads and stores with cache hints, as chosen by the plan (csrc/compiler/passes/cache_policy.hpp).
//
// The second-level cache takes its policy from a register, created where it is used (createpolicy, compute capability
// 8.0), the first-level cache from the instruction. A hint changes no bit and no order: the loads are weak like plain
// ones. They are volatile, so that none moves across a barrier; the stores clobber memory, so that no plain access
// moves across them.
#pragma once

#include "cuda/loop/types.cuh"

namespace ark::loop {

enum class Cache : uint8_t { normal, evict_first, evict_last, no_allocate };

#if defined(__CUDACC__)

// An element of T whose pointer type carries the cache policy.
template <class T, Cache kCache>
struct Hinted {
  T element;
};

// A policy for the second-level cache. kOnce: created once and used for all that follows.
template <Cache kCache, bool kOnce = false>
ARK_LOOP uint64 cache_policy() {
  static_assert(kCache == Cache::evict_first || kCache == Cache::evict_last);
  uint64 policy;
  if constexpr (kCache == Cache::evict_first && kOnce)
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  else if constexpr (kOnce)
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0;" : "=l"(policy));
  else if constexpr (kCache == Cache::evict_first)
    asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  else
    asm("createpolicy.fractional.L2::evict_last.b64 %0;" : "=l"(policy));
  return policy;
}

// `type` (b8, b16, b32, b64, v4.b32) is loaded to, or stored from, the operands `...`, starting at %0.
#define ARK_HINTED_LOAD(type, registers, address, policy, ...)                                                 \
  if constexpr (kCache == Cache::evict_first)                                                                  \
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint." type " " registers ", [" address "], " policy ";" \
                 : __VA_ARGS__                                                                                 \
                 : "l"(from), "l"(cache_policy<kCache>()));                                                    \
  else if constexpr (kCache == Cache::evict_last)                                                              \
    asm volatile("ld.global.L2::cache_hint." type " " registers ", [" address "], " policy ";"                 \
                 : __VA_ARGS__                                                                                 \
                 : "l"(from), "l"(cache_policy<kCache>()));                                                    \
  else                                                                                                         \
    asm volatile("ld.global.L1::no_allocate." type " " registers ", [" address "];" : __VA_ARGS__ : "l"(from))

template <Cache kCache, int kBytes>
struct HintedWord;

template <Cache kCache>
struct HintedWord<kCache, 1> {
  uint32 word;
  ARK_LOOP void load(const void* from) { ARK_HINTED_LOAD("u8", "%0", "%1", "%2", "=r"(word)); }
};
template <Cache kCache>
struct HintedWord<kCache, 2> {
  uint16 word;
  ARK_LOOP void load(const void* from) { ARK_HINTED_LOAD("u16", "%0", "%1", "%2", "=h"(word)); }
};
template <Cache kCache>
struct HintedWord<kCache, 4> {
  uint32 word;
  ARK_LOOP void load(const void* from) { ARK_HINTED_LOAD("u32", "%0", "%1", "%2", "=r"(word)); }
};
template <Cache kCache>
struct HintedWord<kCache, 8> {
  uint64 word;
  ARK_LOOP void load(const void* from) { ARK_HINTED_LOAD("u64", "%0", "%1", "%2", "=l"(word)); }
};
template <Cache kCache>
struct HintedWord<kCache, 16> {
  struct {
    uint32 a, b, c, d;
  } word;
  ARK_LOOP void load(const void* from) {
    ARK_HINTED_LOAD("v4.u32", "{%0, %1, %2, %3}", "%4", "%5", "=r"(word.a), "=r"(word.b), "=r"(word.c), "=r"(word.d));
  }
};
#undef ARK_HINTED_LOAD

// A type of 1, 2, 4, 8 or 16 bytes, aligned to its size.
template <Cache kCache, class T>
ARK_LOOP T load_hinted(const void* from) {
  HintedWord<kCache, sizeof(T)> word;
  word.load(from);
  if constexpr (sizeof(T) == 1)
    return __builtin_bit_cast(T, static_cast<uint8_t>(word.word));
  else
    return __builtin_bit_cast(T, word.word);
}

#define ARK_HINTED_STORE(type, registers, policy, ...)                                                         \
  if constexpr (kCache == Cache::no_allocate)                                                                  \
    asm volatile("st.global.L1::no_allocate." type " [%0], " registers ";" ::"l"(to), __VA_ARGS__ : "memory"); \
  else                                                                                                         \
    asm volatile("st.global.L2::cache_hint." type " [%0], " registers ", " policy ";" ::"l"(to), __VA_ARGS__,  \
                 "l"(cache_policy<kCache>())                                                                   \
                 : "memory")

template <Cache kCache, class T>
ARK_LOOP void store_hinted(void* to, const T& x) {
  if constexpr (sizeof(T) == 1) {
    const uint32 word = __builtin_bit_cast(uint8_t, x);
    ARK_HINTED_STORE("u8", "%1", "%2", "r"(word));
  } else if constexpr (sizeof(T) == 2) {
    ARK_HINTED_STORE("u16", "%1", "%2", "h"(__builtin_bit_cast(uint16, x)));
  } else if constexpr (sizeof(T) == 4) {
    ARK_HINTED_STORE("u32", "%1", "%2", "r"(__builtin_bit_cast(uint32, x)));
  } else if constexpr (sizeof(T) == 8) {
    ARK_HINTED_STORE("u64", "%1", "%2", "l"(__builtin_bit_cast(uint64, x)));
  } else {
    struct Words {
      uint32 a, b, c, d;
    };
    const Words words = __builtin_bit_cast(Words, x);
    ARK_HINTED_STORE("v4.u32", "{%1, %2, %3, %4}", "%5", "r"(words.a), "r"(words.b), "r"(words.c), "r"(words.d));
  }
}
#undef ARK_HINTED_STORE

// The bytes of a T at elements that are plain or hinted.
template <class T, class Element>
ARK_LOOP T load_bytes(const Element* from) {
  return *reinterpret_cast<const T*>(from);
}
template <class T, class Element, Cache kCache>
ARK_LOOP T load_bytes(const Hinted<Element, kCache>* from) {
  return load_hinted<kCache, T>(from);
}
template <class T, class Element>
ARK_LOOP void store_bytes(Element* to, const T& x) {
  *reinterpret_cast<T*>(to) = x;
}
template <class T, class Element, Cache kCache>
ARK_LOOP void store_bytes(Hinted<Element, kCache>* to, const T& x) {
  store_hinted<kCache>(to, x);
}
// The same of up to 16 bytes, always in one instruction: NVRTC splits a store into words if it cannot prove that their
// addresses are consecutive.
template <class T, class Element>
ARK_LOOP void store_whole(Element* to, const T& x) {
  if constexpr (sizeof(T) == 16) {
    if (__isGlobal(to)) {
      const auto all = __builtin_bit_cast(Together<uint32, 4>, x);
      asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(all.at[0]), "r"(all.at[1]), "r"(all.at[2]),
                   "r"(all.at[3])
                   : "memory");
      return;
    }
  }
  store_bytes(to, x);
}
template <class T, class Element, Cache kCache>
ARK_LOOP void store_whole(Hinted<Element, kCache>* to, const T& x) {
  store_bytes(to, x);
}

// The type of an element, without the hint.
template <class T>
struct PlainOf {
  using Type = T;
};
template <class T, Cache kCache>
struct PlainOf<Hinted<T, kCache>> {
  using Type = T;
};
template <class T>
using Plain = typename PlainOf<T>::Type;

template <class T, Cache kCache>
ARK_LOOP auto load_one(const Hinted<T, kCache>* from) {
  if constexpr (sizeof(T) == 1)  // any byte but 0 is true
    return load_hinted<kCache, uint8_t>(from) != 0;
  else
    return widen(load_hinted<kCache, T>(from));
}
template <class T, Cache kCache, class V>
ARK_LOOP void store_one(Hinted<T, kCache>* to, V x) {
  store_hinted<kCache>(to, narrow(x, T{}));
}
template <int kParts, bool kTogether = true, Cache kCache>
ARK_LOOP float load_parts(const Hinted<float, kCache>* from, int64_t apart) {
  float sum = load_one(from);
  if constexpr (kTogether) {
    float others[kParts - 1];
    ARK_UNROLL for (int i = 1; i < kParts; ++i) others[i - 1] = load_one(from + i * apart);
    ARK_UNROLL for (int i = 1; i < kParts; ++i) sum += others[i - 1];
  } else {
    _Pragma("unroll 1") for (int i = 1; i < kParts; ++i) sum += load_one(from + i * apart);
  }
  return sum;
}

#endif

}  // namespace ark::loop
