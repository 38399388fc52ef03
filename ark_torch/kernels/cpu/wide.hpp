// Vectors in the size of registers: one register with AVX-512 or AVX, four with SSE or NEON.
//
// GCC keeps a vector wider than the machine's registers in memory, and reads and writes it at every use. So loops
// accumulate in Wide, which consists of several vectors where registers are narrower than Floats.
#pragma once

#include "cpu/vector.hpp"
#include "protocol/base.hpp"

namespace ark::cpu {

#if defined(__AVX512F__)
inline constexpr int kPartLanes = 16;
#elif defined(__AVX__)
inline constexpr int kPartLanes = 8;
#else
inline constexpr int kPartLanes = 4;
#endif
inline constexpr int kParts = kLanes / kPartLanes;

using Part = float __attribute__((vector_size(kPartLanes * 4)));
using PartWords = uint32_t __attribute__((vector_size(kPartLanes * 4)));
using PartHalves = uint16_t __attribute__((vector_size(kPartLanes * 2)));

struct Wide {
  Part part[kParts];
};

ARK_INLINE Part load_part(const float* p) {
  Part x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}
ARK_INLINE Part load_part(const bf16* p) {
  PartHalves bits;
  std::memcpy(&bits, p, sizeof(bits));
  return same_bits<Part>(__builtin_convertvector(bits, PartWords) << 16);
}
ARK_INLINE Part load_part(const f16* p) {
#if defined(__AVX512F__)
  return load(p, All{});
#elif defined(__F16C__)
  HalfHalves bits;
  std::memcpy(&bits, p, sizeof(bits));
  return same_bits<Part>(__builtin_ia32_vcvtph2ps256(bits));
#else
  f16 elements[kLanes] = {};
  std::memcpy(elements, p, kPartLanes * sizeof(f16));
  const Floats x = load(elements, All{});
  Part part;
  std::memcpy(&part, &x, sizeof(part));
  return part;
#endif
}

ARK_INLINE Wide wide(Floats x) {
  return same_bits<Wide>(x);
}
ARK_INLINE Floats narrow(const Wide& x) {
  return same_bits<Floats>(x);
}
ARK_INLINE Wide wide_of(float x) {
  Wide all;
  ARK_UNROLL for (int i = 0; i < kParts; ++i) all.part[i] = x - Part{};
  return all;
}

template <class T>
ARK_INLINE Wide load_wide(const T* p, All) {
  Wide x;
  ARK_UNROLL for (int i = 0; i < kParts; ++i) x.part[i] = load_part(p + i * kPartLanes);
  return x;
}
template <class T>
ARK_INLINE Wide load_wide(const T* p, First lanes) {
  return wide(load(p, lanes));
}

ARK_INLINE void add(Wide& sum, const Wide& x) {
  ARK_UNROLL for (int i = 0; i < kParts; ++i) sum.part[i] += x.part[i];
}
ARK_INLINE void add_product(Wide& sum, const Wide& x, const Wide& y) {
  ARK_UNROLL for (int i = 0; i < kParts; ++i) sum.part[i] += x.part[i] * y.part[i];
}

}  // namespace ark::cpu
