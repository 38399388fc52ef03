// Types of the CPU's device library: elements in memory, and the vectors of lanes in which they are computed.
//
// Vectors are the extension of GCC and clang, so the same text serves every instruction set: 16 lanes of float, or 8
// with AVX, since GCC keeps vectors wider than a register in memory (with SSE or NEON, too: wide.hpp). Comments that
// say 16 mean a vector's lanes. Floating types compute as Floats, integers as Ints (64 bits), bool as Mask (32-bit
// lanes of all ones or all zeros, the result of a comparison of Floats).
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

// The intrinsics' headers take longer to compile than this whole library, so builtins are used where both compilers
// have them.
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

// Vectors are passed only between inlined functions of this library, so no ABI is involved.
#pragma GCC diagnostic ignored "-Wpsabi"

#define ARK_INLINE inline __attribute__((always_inline))
#define ARK_BODY __attribute__((always_inline))  // for lambdas called both for whole vectors and for the tail

namespace ark::cpu {

// How a kernel asks for an operand ahead of its loads, as the plan says (csrc/compiler/graph/stage.hpp).
enum class Prefetch : uint8_t { usual, none, ahead };

#if defined(__AVX__) && !defined(__AVX512F__)
#define ARK_LANES 0, 1, 2, 3, 4, 5, 6, 7
inline constexpr int kLanes = 8;
#else
#define ARK_LANES 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
inline constexpr int kLanes = 16;
#endif

using Floats = float __attribute__((vector_size(kLanes * 4)));
using Mask = int32_t __attribute__((vector_size(kLanes * 4)));
using Words = uint32_t __attribute__((vector_size(kLanes * 4)));
using Ints = int64_t __attribute__((vector_size(kLanes * 8)));
using Halves = uint16_t __attribute__((vector_size(kLanes * 2)));
using Shorts = int32_t __attribute__((vector_size(kLanes * 4)));
using Bytes = uint8_t __attribute__((vector_size(kLanes)));

// Element types that C++ lacks.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};
struct e4m3 {
  uint8_t bits;
};

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// How many lanes of a vector count: all of them, a compile-time constant, or the first `count`.
struct All {};
struct First {
  int count;
};

template <class To, class From>
ARK_INLINE To same_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

ARK_INLINE Floats splat(float x) {
  return x - Floats{};
}
ARK_INLINE Ints splat(int64_t x) {
  return x - Ints{};
}
ARK_INLINE Mask splat(bool x) {
  return Mask{} - static_cast<int32_t>(x);
}
ARK_INLINE Floats splat(Floats x) {
  return x;
}
ARK_INLINE Ints splat(Ints x) {
  return x;
}
ARK_INLINE Mask splat(Mask x) {
  return x;
}

// Lane by lane; integers of both widths.
ARK_INLINE Floats select(Mask mask, Floats a, Floats b) {
  return mask ? a : b;
}
ARK_INLINE Mask select(Mask mask, Mask a, Mask b) {
  return (mask & a) | (~mask & b);
}
ARK_INLINE Ints select(Mask mask, Ints a, Ints b) {
  return __builtin_convertvector(mask, Ints) ? a : b;
}

inline constexpr Shorts kIota32 = {ARK_LANES};
inline constexpr Ints kIota = {ARK_LANES};

ARK_INLINE Mask active(All) {
  return ~Mask{};
}
ARK_INLINE Mask active(First lanes) {
  return kIota32 < lanes.count;
}

}  // namespace ark::cpu
