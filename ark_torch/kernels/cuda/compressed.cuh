// Quantisation by buckets on a GPU, and the sums of what ranks have quantised: the bytes of
// csrc/collectives/compressed.
//
// compressed_encode: elements (and what a residual adds) to records. compressed_reduce: records of all ranks to one,
// through float32 sums in rank order; compressed_sum: to elements. compressed_decode: records to elements. Each reads
// and writes memory once. All arithmetic is protocol/quantize.hpp's, in PTX whose rounding is spelled out
// (cuda/formats.cuh), so a result does not depend on the threads that make it.
//
// A launch has up to kMostPieces runs of buckets, told in its parameters: nothing is copied to the device before, and a
// captured launch keeps them. Memory order: kernels follow one another on a stream; no thread waits for another but at
// the team's barriers, which all of its threads reach.
#pragma once

#include "cuda/compressed_codes.cuh"
#include "cuda/packet.cuh"

namespace ark::device {

#if defined(__CUDACC__)

// One bucket and the threads that have it.
struct Team {
  uint32 thread, threads;
  quantize::Piece piece;
  uint64 element, at;
  uint32 numel, number;

  __device__ __forceinline__ uint32 group(int held) const { return thread + held * threads; }
  __device__ __forceinline__ uint32 count(int held) const {  // elements of the group
    const uint32 begin = group(held) * kGroup;
    return begin >= numel ? 0 : numel - begin < kGroup ? numel - begin : kGroup;
  }
};

template <bool kWide>
__device__ __forceinline__ bool find_bucket(const CodeParams& p, uint32 element_bytes, Team& team) {
  const uint64 bucket = kWide ? blockIdx.x : uint64{blockIdx.x} * (kCodeThreads / 32) + threadIdx.x / 32;
  if (bucket >= p.buckets) return false;
  uint32 low = 0, high = p.pieces;  // the last piece that begins at or before it
  while (high - low > 1) {
    const uint32 middle = (low + high) / 2;
    (p.piece[middle].first <= bucket ? low : high) = middle;
  }
  team.thread = kWide ? threadIdx.x : threadIdx.x % 32;
  team.threads = kWide ? kCodeThreads : 32;
  team.piece = p.piece[low].piece;
  const uint64 i = bucket - p.piece[low].first, begin = i * team.piece.bucket, left = team.piece.numel - begin;
  team.element = team.piece.element + begin;
  team.at = team.piece.at + i * quantize::record_bytes(team.piece.bucket, team.piece.bits, element_bytes);
  team.numel = left < team.piece.bucket ? static_cast<uint32>(left) : team.piece.bucket;
  team.number = team.piece.number + static_cast<uint32>(i);
  return true;
}

// The same for all threads of a team: orders as integers are reduced.
template <bool kWide>
__device__ __forceinline__ int team_max(int x) {
  x = __reduce_max_sync(~0u, x);
  if constexpr (kWide) {
    __shared__ int all[kCodeThreads / 32];
    if (threadIdx.x % 32 == 0) all[threadIdx.x / 32] = x;
    __syncthreads();
    ARK_UNROLL for (int w = 0; w < kCodeThreads / 32; ++w) x = all[w] > x ? all[w] : x;
    __syncthreads();
  }
  return x;
}

template <bool kWide, quantize::Format kFormat>
__device__ __forceinline__ quantize::Scale scale_of(const Team& team, const float (*x)[kGroup]) {
  if constexpr (kFormat == quantize::Format::uniform) {
    // Threads without elements know nothing: what they say is less than anything.
    float low = 0.0f, high = 0.0f;
    bool first = true;
    ARK_UNROLL for (int h = 0; h < kHeld; ++h) {
      const uint32 count = team.count(h);
      ARK_UNROLL for (int j = 0; j < kGroup; ++j) if (static_cast<uint32>(j) < count) {
        low = first ? x[h][j] : least(low, x[h][j]);
        high = first ? x[h][j] : most(high, x[h][j]);
        first = false;
      }
    }
    const bool finite = quantize::is_finite(low) && quantize::is_finite(high);
    constexpr int kNothing = -0x7fffffff - 1, kBad = 0x7fffffff;
    const int top = team_max<kWide>(first ? kNothing : finite ? order_of(high) : kBad);
    const int down = team_max<kWide>(first || !finite ? kNothing : ~order_of(low));
    if (top == kBad) return quantize::not_finite();
    // order_of() is its own inverse.
    const auto float_of = [](int order) { return bits_as<float>(order < 0 ? order ^ 0x7fffffff : order); };
    return quantize::uniform_scale(float_of(~down), float_of(top), team.piece.bits);
  } else {
    int largest = 0;
    ARK_UNROLL for (int h = 0; h < kHeld; ++h) ARK_UNROLL for (int j = 0; j < kGroup; ++j) {
      const int magnitude = bits_as<int>(x[h][j]) & 0x7fffffff;  // zero behind the last element
      largest = magnitude > largest ? magnitude : largest;
    }
    largest = team_max<kWide>(largest);
    return largest >= 0x7f800000 ? quantize::not_finite() : quantize::fp8_scale(bits_as<float>(largest));
  }
}

// x to codes, zeros behind the last one; kLost: x becomes what its codes do not say of it.
template <quantize::Format kFormat, quantize::Rounding kRounding, bool kLost>
__device__ __forceinline__ void find_codes(const Team& team, const quantize::Rule& rule, const quantize::Scale& scale,
                                           float (*x)[kGroup], uint32 (*code)[kGroup]) {
  const bool finite = scale.base == scale.base;
  ARK_UNROLL for (int h = 0; h < kHeld; ++h) {
    const uint32 count = team.count(h);
    quantize::Random random = {};
    if (kRounding == quantize::Rounding::stochastic && count != 0)
      random = quantize::random_of(rule, team.number, team.group(h));
    ARK_UNROLL for (int j = 0; j < kGroup; ++j) {
      const uint32 chance = quantize::chance_of(random, j);
      float value;
      if constexpr (kFormat == quantize::Format::uniform) {
        code[h][j] = quantize::uniform_code(x[h][j], scale, team.piece.bits, kRounding, chance);
        value = quantize::uniform_value(code[h][j], scale.base, scale.step);
      } else {
        code[h][j] = quantize::fp8_code(x[h][j], scale, kRounding, chance);
        value = quantize::fp8_value(code[h][j], scale.base);
      }
      if constexpr (kLost) x[h][j] = finite ? subtract(x[h][j], value) : 0.0f;
      if (static_cast<uint32>(j) >= count) code[h][j] = 0;
    }
  }
}

struct StoreCodes {
  const Team& team;
  char* codes;
  const uint32 (*code)[kGroup];
  template <int kBits>
  __device__ __forceinline__ void at() const {
    ARK_UNROLL for (int h = 0; h < kHeld; ++h) if (team.count(h) != 0)
        store_word<kBits>(codes + team.group(h) * kBits, packed<kBits>(code[h]));
  }
};

struct LoadCodes {
  const Team& team;
  const char* codes;
  uint32 (*code)[kGroup];
  template <int kBits>
  __device__ __forceinline__ void at() const {
    ARK_UNROLL for (int h = 0; h < kHeld; ++h) {
      const char* const from = codes + team.group(h) * kBits;
      unpacked<kBits>(team.count(h) != 0 ? load_word<kBits>(from) : 0, code[h]);
    }
  }
};

template <bool kWide, bool kLost>
__device__ __forceinline__ void write_record(const Team& team, const quantize::Rule& rule, char* record,
                                             float (*x)[kGroup]) {
  using quantize::Format;
  using quantize::Rounding;
  const bool uniform = rule.format == Format::uniform, chance = rule.rounding == Rounding::stochastic;
  const quantize::Scale scale =
      uniform ? scale_of<kWide, Format::uniform>(team, x) : scale_of<kWide, Format::fp8>(team, x);
  uint32 code[kHeld][kGroup];
  if (uniform && chance)
    find_codes<Format::uniform, Rounding::stochastic, kLost>(team, rule, scale, x, code);
  else if (uniform)
    find_codes<Format::uniform, Rounding::nearest, kLost>(team, rule, scale, x, code);
  else if (chance)
    find_codes<Format::fp8, Rounding::stochastic, kLost>(team, rule, scale, x, code);
  else
    find_codes<Format::fp8, Rounding::nearest, kLost>(team, rule, scale, x, code);
  const uint32 bits = team.piece.bits;
  char* const codes = record + quantize::kHeadBytes;
  if (team.thread == 0) {
    *reinterpret_cast<float2*>(record) = make_float2(scale.base, scale.step);
    const uint32 used = (team.numel + 7) / 8 * bits, all = static_cast<uint32>(quantize::code_bytes(team.numel, bits));
    for (uint32 i = used; i < all; ++i) codes[i] = 0;
  }
  of_width(bits, StoreCodes{team, codes, code});
}

// Adds the team's elements of a record to x.
template <class Format>
__device__ __forceinline__ void add_record(const Team& team, quantize::Format format, const char* record,
                                           float (*x)[kGroup]) {
  if (team.piece.bits == 0) {
    constexpr uint32 kBytes = Elements<Format>::kBytes;
    ARK_UNROLL for (int h = 0; h < kHeld; ++h) {
      float values[kGroup];
      Elements<Format>::load(record + team.group(h) * (kGroup * kBytes), team.count(h), false, values);
      ARK_UNROLL for (int j = 0; j < kGroup; ++j) x[h][j] = add(x[h][j], values[j]);
    }
    return;
  }
  const float2 head = *reinterpret_cast<const float2*>(record);
  uint32 code[kHeld][kGroup];
  of_width(team.piece.bits, LoadCodes{team, record + quantize::kHeadBytes, code});
  const bool uniform = format == quantize::Format::uniform;
  ARK_UNROLL for (int h = 0; h < kHeld; ++h) ARK_UNROLL for (int j = 0; j < kGroup; ++j) {
    const float value =
        uniform ? quantize::uniform_value(code[h][j], head.x, head.y) : quantize::fp8_value(code[h][j], head.x);
    x[h][j] = add(x[h][j], value);
  }
}

__device__ __forceinline__ bool at_16(const void* pointer) {
  return reinterpret_cast<uint64>(pointer) % 16 == 0;
}

template <class Format>
__device__ __forceinline__ void store_elements(const Team& team, char* to, const float (*x)[kGroup]) {
  const bool wide = at_16(to);
  ARK_UNROLL for (int h = 0; h < kHeld; ++h) Elements<Format>::store(
      to + team.group(h) * (kGroup * Elements<Format>::kBytes), team.count(h), wide && team.count(h) == kGroup, x[h]);
}

template <class Format, bool kWide>
__device__ __forceinline__ void compressed_encode(const CodeParams& p) {
  begin_kernel();
  constexpr uint32 kBytes = Elements<Format>::kBytes;
  Team team;
  if (!find_bucket<kWide>(p, kBytes, team)) return;
  const char* const from = static_cast<const char*>(p.input) + team.element * kBytes;
  char* const record = static_cast<char*>(p.codes) + team.at;
  char* const owed = reinterpret_cast<char*>(p.residual + team.element);
  const bool fed = p.residual != nullptr, exact = team.piece.bits == 0, wide = at_16(from);
  const bool wide_owed = at_16(owed);
  float x[kHeld][kGroup];
  ARK_UNROLL for (int h = 0; h < kHeld; ++h) {
    const uint32 count = team.count(h);
    Elements<Format>::load(from + team.group(h) * (kGroup * kBytes), count, wide && count == kGroup, x[h]);
    if (!fed) continue;
    float more[kGroup];
    Elements<Float32>::load(owed + team.group(h) * (kGroup * 4), count, wide_owed && count == kGroup, more);
    ARK_UNROLL for (int j = 0; j < kGroup; ++j) x[h][j] = exact && more[j] == 0.0f ? x[h][j] : add(x[h][j], more[j]);
  }
  if (exact) {
    store_elements<Format>(team, record, x);
    if (team.thread == 0)
      for (uint64 i = team.numel * kBytes; i < quantize::record_bytes(team.numel, 0, kBytes); ++i) record[i] = 0;
    if (!fed) return;
    ARK_UNROLL for (int h = 0; h < kHeld; ++h) ARK_UNROLL for (int j = 0; j < kGroup; ++j) {
      float sent[2];
      const float pair[2] = {x[h][j], 0.0f};
      Format::decode(Format::encode(pair), sent);
      const float lost = subtract(x[h][j], sent[0]);
      x[h][j] = quantize::is_finite(lost) ? lost : 0.0f;
    }
  } else if (fed) {
    write_record<kWide, true>(team, p.rule, record, x);
  } else {
    return write_record<kWide, false>(team, p.rule, record, x);
  }
  store_elements<Float32>(team, owed, x);
}

// What a bucket's records have added up to, from -0, to which any number adds as it is.
template <class Format>
__device__ __forceinline__ void add_ranks(const CodeParams& p, const Team& team, const void* records,
                                          float (*x)[kGroup]) {
  ARK_UNROLL for (int h = 0; h < kHeld; ++h) ARK_UNROLL for (int j = 0; j < kGroup; ++j) x[h][j] = -0.0f;
  const char* record = static_cast<const char*>(records) + team.at;
  ARK_ROLLED for (uint32 r = 0; r < p.ranks; ++r, record += p.rank_bytes)
      add_record<Format>(team, p.rule.format, record, x);
  if (!p.average) return;
  ARK_UNROLL for (int h = 0; h < kHeld; ++h) ARK_UNROLL for (int j = 0; j < kGroup; ++j) x[h][j] =
      divide_by_ranks(x[h][j], static_cast<int>(p.ranks));
}

template <class Format, bool kWide>
__device__ __forceinline__ void compressed_reduce(const CodeParams& p) {
  begin_kernel();
  Team team;
  if (!find_bucket<kWide>(p, Elements<Format>::kBytes, team)) return;
  float x[kHeld][kGroup];
  add_ranks<Format>(p, team, p.input, x);
  char* const record = static_cast<char*>(p.codes) + team.at;
  if (team.piece.bits == 0) return store_elements<Format>(team, record, x);
  ARK_UNROLL for (int h = 0; h < kHeld; ++h) {  // zeros behind the last one: records hold them as codes
    const uint32 count = team.count(h);
    ARK_UNROLL for (int j = 0; j < kGroup; ++j) if (static_cast<uint32>(j) >= count) x[h][j] = 0.0f;
  }
  if (p.residual == nullptr) return write_record<kWide, false>(team, p.rule, record, x);
  write_record<kWide, true>(team, p.rule, record, x);
  char* const owed = reinterpret_cast<char*>(p.residual + team.element);
  const bool wide = at_16(owed);
  const float weight = p.average ? static_cast<float>(p.ranks) : 1.0f;
  ARK_UNROLL for (int h = 0; h < kHeld; ++h) {
    float more[kGroup];
    const uint32 count = team.count(h);
    Elements<Float32>::load(owed + team.group(h) * (kGroup * 4), count, wide && count == kGroup, more);
    ARK_UNROLL for (int j = 0; j < kGroup; ++j) x[h][j] = add(more[j], multiply(x[h][j], weight));
  }
  store_elements<Float32>(team, owed, x);
}

template <class Format, bool kWide>
__device__ __forceinline__ void compressed_sum(const CodeParams& p) {
  begin_kernel();
  constexpr uint32 kBytes = Elements<Format>::kBytes;
  Team team;
  if (!find_bucket<kWide>(p, kBytes, team)) return;
  float x[kHeld][kGroup];
  add_ranks<Format>(p, team, p.input, x);
  store_elements<Format>(team, static_cast<char*>(p.output) + (team.element - p.first_element) * kBytes, x);
}

template <class Format, bool kWide>
__device__ __forceinline__ void compressed_decode(const CodeParams& p) {
  begin_kernel();
  constexpr uint32 kBytes = Elements<Format>::kBytes;
  Team team;
  if (!find_bucket<kWide>(p, kBytes, team)) return;
  float x[kHeld][kGroup];
  add_ranks<Format>(p, team, p.codes, x);
  store_elements<Format>(team, static_cast<char*>(p.output) + team.element * kBytes, x);
}

#endif

}  // namespace ark::device
