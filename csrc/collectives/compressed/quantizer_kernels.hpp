// The loops over a bucket's elements, and their table for one instruction set. Private to quantizer_<isa>.cpp.
//
// Vector operations follow protocol/quantize.hpp, in the same order. Stack buffers that stay in the L1 cache hold the
// bucket's elements as float32, padded to whole vectors, and its codes, one byte each. So no loop depends on both the
// element type and the code width, and only loops over the caller's memory handle a short bucket's end. Whole float32
// buckets are used in place.
#pragma once

#include "collectives/cpu/reduce/reduce_formats.hpp"
#include "quantizer_pack.hpp"
#include "quantizer_random.hpp"

namespace ark::ARK_REDUCE_ISA::quantizer {

using compressed::DecodeJob;
using compressed::EncodeJob;
using compressed::Feedback;
using compressed::QuantizerKernels;
using quantize::Format;
using quantize::Rounding;
using quantize::Rule;
using quantize::Scale;

inline constexpr uint32_t kRoom = quantize::kMostBucket + ARK_REDUCE_BYTES;  // in elements

template <class Element>
inline constexpr uint32_t kElementBytes = sizeof(ElementOf<typename Element::Raw>);

ARK_INLINE unsigned char* bytes_of(float* x) {
  return reinterpret_cast<unsigned char*>(x);
}
ARK_INLINE const unsigned char* bytes_of(const float* x) {
  return reinterpret_cast<const unsigned char*>(x);
}
ARK_INLINE F32 smaller(F32 x, F32 than) {
  return x < than ? x : than;  // returns `than` if x is a NaN
}
ARK_INLINE F32 larger(F32 x, F32 than) {
  return x > than ? x : than;
}

// Calls body<kWhole>(i, lanes) for every vector of `numel` elements.
template <class Body>
ARK_INLINE void each_vector(uint32_t numel, Body&& body) {
  uint32_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) body.template operator()<true>(i, kLanes);
  if (i < numel) body.template operator()<false>(i, numel - i);
}

// Loads the elements as float32 and adds the residual. Copies of the first element pad the last vector.
template <class Element, bool kFed>
__attribute__((noinline)) void take(const EncodeJob& given, float* to) {
  const EncodeJob job = given;
  const auto* from = static_cast<const unsigned char*>(job.input);
  each_vector(
      job.numel, [&]<bool kWhole>(uint32_t i, uint32_t lanes) __attribute__((always_inline)) {
        F32 x = Element::decode(load<typename Element::Raw, kWhole>(from + i * kElementBytes<Element>, lanes));
        if constexpr (kFed) x = x + load<F32, kWhole>(bytes_of(job.residual + i), lanes);
        store<true>(bytes_of(to + i), x, kLanes);
      });
  for (uint32_t i = job.numel; i % kLanes != 0; ++i) to[i] = to[0];
}

struct Extent {
  F32 low, high;
  I32 magnitude;
};

template <Format kFormat>
ARK_INLINE void extend(Extent& extent, const float* from) {
  const F32 x = load<F32, true>(bytes_of(from), kLanes);
  if constexpr (kFormat == Format::uniform) {
    extent.low = smaller(x, extent.low);
    extent.high = larger(x, extent.high);
  }
  const I32 magnitude = bits_as<I32>(x) & 0x7fffffff;
  extent.magnitude = magnitude > extent.magnitude ? magnitude : extent.magnitude;
}

// `numel` is a multiple of the vector length.
template <Format kFormat>
__attribute__((noinline)) Scale measure(const float* x, uint32_t numel, uint32_t bits) {
  const F32 first = F32{} + x[0];
  Extent a{first, first, bits_as<I32>(first) & 0x7fffffff}, b = a;
  uint32_t i = 0;
  for (; i + 2 * kLanes <= numel; i += 2 * kLanes) {
    extend<kFormat>(a, x + i);
    extend<kFormat>(b, x + i + kLanes);
  }
  if (i < numel) extend<kFormat>(a, x + i);
  if constexpr (kFormat == Format::uniform) a.low = smaller(b.low, a.low), a.high = larger(b.high, a.high);
  a.magnitude = b.magnitude > a.magnitude ? b.magnitude : a.magnitude;
  float low = a.low[0], high = a.high[0];
  int32_t magnitude = a.magnitude[0];
  for (int lane = 1; lane < kLanes; ++lane) {
    if constexpr (kFormat == Format::uniform) {
      low = a.low[lane] < low ? a.low[lane] : low;
      high = a.high[lane] > high ? a.high[lane] : high;
    }
    magnitude = a.magnitude[lane] > magnitude ? a.magnitude[lane] : magnitude;
  }
  if (magnitude >= 0x7f800000) return quantize::not_finite();
  if constexpr (kFormat == Format::uniform) return quantize::uniform_scale(low, high, bits);
  return quantize::fp8_scale(bits_as<float>(magnitude));
}

// Vector forms of uniform_code() and uniform_value().
template <bool kChance>
struct Uniform {
  float base, step, inverse, levels;
  ARK_INLINE I32 code(F32 x, [[maybe_unused]] I32 chance) const {
    F32 t = (x - base) * inverse;
    if constexpr (kChance) t = t + __builtin_convertvector(chance, F32) * (1.0f / 65536);
    t = larger(t, F32{});
    t = smaller(t, F32{} + levels);
    if constexpr (kChance) return __builtin_convertvector(t, I32);
    return bits_as<I32>(t + 8388608.0f) & 0xff;
  }
  ARK_INLINE F32 value(I32 code) const { return base + __builtin_convertvector(code, F32) * step; }
};

// Vector forms of fp8_code() and fp8_value().
template <bool kChance>
struct Small {
  float base, step, inverse, levels;
  ARK_INLINE I32 code(F32 x, [[maybe_unused]] I32 chance) const {
    const F32 y = canonical(x * inverse);
    if constexpr (!kChance) return widen(Float8E4M3FN::encode(y));
    const I32 u = bits_as<I32>(y), magnitude = u & 0x7fffffff;
    const F32 fraction = __builtin_convertvector(chance, F32) * (1.0f / 65536);
    const I32 small = __builtin_convertvector(bits_as<F32>(magnitude) * 512.0f + fraction, I32);
    I32 code = (magnitude - 0x3c000000 + (chance << 4)) >> 20;
    code = code < 0x7e ? code : I32{} + 0x7e;
    code = magnitude < 0x3c800000 ? small : code;
    code = code | ((u >> 24) & 0x80);
    return magnitude > 0x7f800000 ? I32{} + 0x7f : code;
  }
  ARK_INLINE F32 value(I32 code) const { return Float8E4M3FN::decode(narrow<U8>(code)) * base; }
};

// Writes the codes of whole vectors. kLost: `lost`, which may alias x, receives the quantisation error.
template <template <bool> class Coder, bool kChance, bool kLost>
__attribute__((noinline)) void write_codes(const float* x, uint32_t numel, const Coder<kChance>& given,
                                           const Rule& rule, uint32_t number, unsigned char* codes, float* lost) {
  const Coder<kChance> coder = given;
  const bool finite = coder.base == coder.base;
  uint16_t chance[kRandomElements];
  for (uint32_t i = 0; i < numel; i += kLanes) {
    const F32 v = load<F32, true>(bytes_of(x + i), kLanes);
    I32 drawn = {};
    if constexpr (kChance) {
      if (i % kRandomElements == 0) chances(rule, number, i / 8, chance);
      const auto* at = reinterpret_cast<const unsigned char*>(chance + i % kRandomElements);
      drawn = widen(load<U16, true>(at, kLanes));
    }
    const I32 code = coder.code(v, drawn);
    store<true>(codes + i, narrow<U8>(code), kLanes);
    if constexpr (kLost) store<true>(bytes_of(lost + i), finite ? v - coder.value(code) : F32{}, kLanes);
  }
}

ARK_INLINE void write_head(unsigned char* record, float base, float step) {
  __builtin_memcpy(record, &base, 4);
  __builtin_memcpy(record + 4, &step, 4);
}
ARK_INLINE float read_float(const unsigned char* from) {
  float x;
  __builtin_memcpy(&x, from, 4);
  return x;
}

template <template <bool> class Coder, bool kChance>
ARK_INLINE void write(const EncodeJob& job, const Rule& rule, const Scale& scale, const float* x, uint32_t whole,
                      unsigned char* codes, float* lost) {
  const Coder<kChance> coder{scale.base, scale.step, scale.inverse, static_cast<float>((1u << job.bits) - 1)};
  if (lost != nullptr)
    write_codes<Coder, kChance, true>(x, whole, coder, rule, job.number, codes, lost);
  else
    write_codes<Coder, kChance, false>(x, whole, coder, rule, job.number, codes, lost);
}

// x holds whole vectors. lost: null, or room for as many.
inline __attribute__((noinline)) void encode_floats(const EncodeJob& job, const Rule& rule, const float* x,
                                                    float* lost) {
  alignas(ARK_REDUCE_BYTES) unsigned char codes[kRoom];
  const uint32_t whole = (job.numel + kLanes - 1) / kLanes * kLanes;
  const bool uniform = rule.format == Format::uniform, chance = rule.rounding == Rounding::stochastic;
  const Scale scale = uniform ? measure<Format::uniform>(x, whole, job.bits) : measure<Format::fp8>(x, whole, job.bits);
  write_head(job.record, scale.base, scale.step);
  if (uniform && chance) write<Uniform, true>(job, rule, scale, x, whole, codes, lost);
  if (uniform && !chance) write<Uniform, false>(job, rule, scale, x, whole, codes, lost);
  if (!uniform && chance) write<Small, true>(job, rule, scale, x, whole, codes, lost);
  if (!uniform && !chance) write<Small, false>(job, rule, scale, x, whole, codes, lost);
  for (uint32_t i = job.numel; i % 8 != 0; ++i) codes[i] = 0;
  packer(job.bits)(codes, job.numel, job.record + quantize::kHeadBytes);
}

// Copies an exact bucket's elements unchanged, adding the residual where it is not zero.
template <class Element>
__attribute__((noinline)) void encode_exact(const EncodeJob& given, bool fed) {
  const EncodeJob job = given;
  const uint32_t size = kElementBytes<Element>,
                 bytes = static_cast<uint32_t>(quantize::record_bytes(job.numel, 0, size));
  for (uint32_t i = job.numel * size; i < bytes; ++i) job.record[i] = 0;
  if (!fed) {
    __builtin_memcpy(job.record, job.input, job.numel * size);
    return;
  }
  each_vector(
      job.numel, [&]<bool kWhole>(uint32_t i, uint32_t lanes) __attribute__((always_inline)) {
        const auto* from = static_cast<const unsigned char*>(job.input) + i * size;
        const F32 x = Element::decode(load<typename Element::Raw, kWhole>(from, lanes));
        const F32 owed = load<F32, kWhole>(bytes_of(job.residual + i), lanes);
        const F32 sum = owed == 0.0f ? x : x + owed;
        const auto raw = Element::encode(canonical(sum));
        const F32 lost = sum - Element::decode(raw);
        const F32 kept = (bits_as<I32>(lost) & 0x7fffffff) < 0x7f800000 ? lost : F32{};
        store<kWhole>(bytes_of(job.residual + i), kept, lanes);
        store<kWhole>(job.record + i * size, raw, lanes);
      });
}

template <class Element>
void encode(const EncodeJob& job, const Rule& rule, Feedback feedback) {
  const DefaultFloatMode mode;
  if (job.numel == 0) return;
  const bool fed = feedback == Feedback::replaced;
  if (job.bits == 0) return encode_exact<Element>(job, fed);
  if (kElementBytes<Element> == 4 && feedback == Feedback::none && job.numel % kLanes == 0)
    return encode_floats(job, rule, static_cast<const float*>(job.input), nullptr);
  alignas(ARK_REDUCE_BYTES) float x[kRoom];
  if (fed)
    take<Element, true>(job, x);
  else
    take<Element, false>(job, x);
  encode_floats(job, rule, x, feedback == Feedback::none ? nullptr : x);
  if (fed) __builtin_memcpy(job.residual, x, job.numel * sizeof(float));
  if (feedback == Feedback::added_to)
    each_vector(
        job.numel, [&]<bool kWhole>(uint32_t i, uint32_t lanes) __attribute__((always_inline)) {
          const F32 lost = load<F32, true>(bytes_of(x + i), kLanes) * job.weight;
          store<kWhole>(bytes_of(job.residual + i), load<F32, kWhole>(bytes_of(job.residual + i), lanes) + lost, lanes);
        });
}

template <class Coder>
__attribute__((noinline)) void write_values(const unsigned char* codes, uint32_t numel, const Coder& given, float* to) {
  const Coder coder = given;
  for (uint32_t i = 0; i < numel; i += kLanes)
    store<true>(bytes_of(to + i), coder.value(widen(load<U8, true>(codes + i, kLanes))), kLanes);
}

// Decodes a record to float32, in whole vectors.
template <class Element>
__attribute__((noinline)) void read_values(const DecodeJob& job, float* to) {
  if (job.bits == 0) {
    each_vector(
        job.numel, [&]<bool kWhole>(uint32_t i, uint32_t lanes) __attribute__((always_inline)) {
          const auto* from = job.record + i * kElementBytes<Element>;
          store<true>(bytes_of(to + i), Element::decode(load<typename Element::Raw, kWhole>(from, lanes)), kLanes);
        });
    return;
  }
  alignas(ARK_REDUCE_BYTES) unsigned char codes[kRoom];
  unpacker(job.bits)(job.record + quantize::kHeadBytes, job.numel, codes);
  const float base = read_float(job.record), step = read_float(job.record + 4);
  if (job.format == Format::uniform)
    write_values(codes, job.numel, Uniform<false>{base, step, 0.0f, 0.0f}, to);
  else
    write_values(codes, job.numel, Small<false>{base, step, 0.0f, 0.0f}, to);
}

template <class Element>
__attribute__((noinline)) void store_sums(const float* sums, void* output, uint32_t numel) {
  const DefaultFloatMode mode;
  each_vector(
      numel, [&]<bool kWhole>(uint32_t i, uint32_t lanes) __attribute__((always_inline)) {
        const auto raw = Element::encode(canonical(load<F32, kWhole>(bytes_of(sums + i), lanes)));
        store<kWhole>(static_cast<unsigned char*>(output) + i * kElementBytes<Element>, raw, lanes);
      });
}

template <class Element>
void decode(const DecodeJob& job) {
  const DefaultFloatMode mode;
  const bool finite = job.bits != 0 && read_float(job.record) == read_float(job.record);  // no NaN to make canonical
  if (kElementBytes<Element> == 4 && finite && job.numel % kLanes == 0)
    return read_values<Element>(job, static_cast<float*>(job.output));
  alignas(ARK_REDUCE_BYTES) float x[kRoom];
  read_values<Element>(job, x);
  store_sums<Element>(x, job.output, job.numel);
}

template <class Element>
void accumulate(const DecodeJob& job, bool first) {
  const DefaultFloatMode mode;
  float* const sums = static_cast<float*>(job.output);
  if (first && job.numel % kLanes == 0) return read_values<Element>(job, sums);
  alignas(ARK_REDUCE_BYTES) float x[kRoom];
  read_values<Element>(job, x);
  if (first) {
    __builtin_memcpy(sums, x, job.numel * sizeof(float));
    return;
  }
  each_vector(
      job.numel, [&]<bool kWhole>(uint32_t i, uint32_t lanes) __attribute__((always_inline)) {
        const F32 more = load<F32, true>(bytes_of(x + i), kLanes);
        store<kWhole>(bytes_of(sums + i), load<F32, kWhole>(bytes_of(sums + i), lanes) + more, lanes);
      });
}

inline void divide(float* sums, uint32_t numel, float by) {
  const DefaultFloatMode mode;
  each_vector(
      numel, [&]<bool kWhole>(uint32_t i, uint32_t lanes) __attribute__((always_inline)) {
        store<kWhole>(bytes_of(sums + i), load<F32, kWhole>(bytes_of(sums + i), lanes) / by, lanes);
      });
}

template <class Element>
inline constexpr QuantizerKernels kKernels{encode<Element>, decode<Element>, accumulate<Element>, store_sums<Element>,
                                           divide};

inline const QuantizerKernels* find(DType dtype) {
  switch (dtype) {
    case DType::f32: return &kKernels<Native<float>>;
    case DType::bf16: return &kKernels<BFloat16>;
    case DType::f16: return &kKernels<Float16>;
    default: return nullptr;
  }
}

}  // namespace ark::ARK_REDUCE_ISA::quantizer
