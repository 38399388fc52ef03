// Quantisation by buckets on a GPU, and the sums of what ranks have quantised: the bytes of
// csrc/collectives/compressed.
//
// compressed_encode: elements (and what a residual adds) to records. compressed_reduce: records of all ranks to one,
// through float32 sums in rank order; compressed_sum: to elements. Each reads and writes memory once. All arithmetic is
// protocol/quantize.hpp's, in PTX whose rounding is spelled out (cuda/formats.cuh), so a result does not depend on the
// threads that make it.
//
// Records go to places of this GPU or of peers (fused/tiles.cuh): encode stores each bucket's where its owner adds
// them, reduce stores the sums' on every rank.
//
// A launch has up to kMostPieces runs of buckets of one width, told in its parameters: nothing is copied to the device
// before, and a captured launch keeps them. A team takes `run` neighbouring buckets and reads the next one's elements
// before it codes this one's. Memory order: kernels follow one another on a stream; no thread waits for another but at
// the team's barriers, which all of its threads reach.
//
// Elements behind a bucket's last one are its first one's again: they change neither scale nor sums.
#pragma once

#include "cuda/compressed_codes.cuh"
#include "cuda/packet.cuh"

namespace ark::device {

#if defined(__CUDACC__)

// One bucket and the threads that have it.
struct Team {
  uint32 thread, threads;
  uint64 element, at;
  uint32 numel, number;
  int rank;

  __device__ __forceinline__ uint32 group(int held) const { return thread + held * threads; }
  __device__ __forceinline__ uint32 count(int held) const {  // elements of the group
    const uint32 begin = group(held) * kGroup;
    return begin >= numel ? 0 : numel - begin < kGroup ? numel - begin : kGroup;
  }
  __device__ __forceinline__ bool whole() const { return numel == threads * (kHeld * kGroup); }
};

// The buckets of this thread's team.
template <bool kWide>
__device__ __forceinline__ void find_run(const CodeParams& p, uint64& begin, uint64& end) {
  const uint64 team = kWide ? blockIdx.x : uint64{blockIdx.x} * (kCodeThreads / 32) + threadIdx.x / 32;
  begin = team * p.run;
  end = begin + p.run < p.buckets ? begin + p.run : p.buckets;
}

template <bool kWide, int kBits>
__device__ __forceinline__ Team team_of(const CodeParams& p, uint64 bucket, uint32 element_bytes) {
  uint32 low = 0, high = p.pieces;  // the last piece that begins at or before it
  while (high - low > 1) {
    const uint32 middle = (low + high) / 2;
    (p.piece[middle].first <= bucket ? low : high) = middle;
  }
  const quantize::Piece& piece = p.piece[low].piece;
  const uint64 i = bucket - p.piece[low].first, begin = i * piece.bucket, left = piece.numel - begin;
  Team team;
  team.thread = kWide ? threadIdx.x : threadIdx.x % 32;
  team.threads = kWide ? kCodeThreads : 32;
  team.element = piece.element + begin;
  team.at = piece.at + i * quantize::record_bytes(piece.bucket, kBits, element_bytes);
  team.numel = left < piece.bucket ? static_cast<uint32>(left) : piece.bucket;
  team.number = piece.number + static_cast<uint32>(i);
  team.rank = p.piece[low].rank;
  return team;
}

// Where records go: a rank's place, or every rank's, `offset` bytes in.
class Records {
 public:
  // Every thread calls it. False, for the whole block: time to leave.
  static __device__ __forceinline__ bool find(TileExchange& exchange, const TileLinks& links, char** places) {
    const int rank = static_cast<int>(threadIdx.x);
    bool well = true;
    if (rank < links.ranks) {
      places[rank] = exchange.place_of(rank);
      well = places[rank] != nullptr;
    }
    return __syncthreads_and(well) != 0;
  }

  __device__ __forceinline__ Records(char* const* places, const TileLinks& links, int rank, uint64 offset)
      : places_(places),
        offset_(offset),
        from_(rank == kEveryRank ? 0 : rank),
        to_(rank == kEveryRank ? links.ranks : rank + 1) {}
  __device__ __forceinline__ int from() const { return from_; }
  __device__ __forceinline__ int to() const { return to_; }
  __device__ __forceinline__ char* of(int rank) const { return places_[rank] + offset_; }

 private:
  char* const* places_;
  uint64 offset_;
  int from_, to_;
};

__device__ __forceinline__ bool at_16(const void* pointer) {
  return reinterpret_cast<uint64>(pointer) % 16 == 0;
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

// The bucket's first element where a team's sums hold something else behind the last.
template <bool kWide>
__device__ __forceinline__ void fill_behind(const Team& team, float (*x)[kGroup]) {
  if (team.whole()) return;  // the same for all of its threads
  float first = x[0][0];
  if constexpr (kWide) {
    __shared__ float shared;
    if (threadIdx.x == 0) shared = first;
    __syncthreads();
    first = shared;
    __syncthreads();
  } else {
    first = __shfl_sync(~0u, first, 0);
  }
  ARK_UNROLL for (int h = 0; h < kHeld; ++h) {
    const uint32 count = team.count(h);
    ARK_UNROLL for (int j = 0; j < kGroup; ++j) x[h][j] = static_cast<uint32>(j) < count ? x[h][j] : first;
  }
}

// A thread's elements as they stand in memory.
template <class Format>
struct Held {
  uint32 words[kHeld][Elements<Format>::kWords];

  __device__ __forceinline__ void load(const Team& team, const void* tensor) {
    const char* const from = static_cast<const char*>(tensor) + team.element * Elements<Format>::kBytes;
    const bool wide = at_16(from);
    ARK_UNROLL for (int h = 0; h < kHeld; ++h)
        Elements<Format>::load(from + team.group(h) * (kGroup * Elements<Format>::kBytes), team.count(h),
                               wide && team.count(h) == kGroup, from, words[h]);
  }
  __device__ __forceinline__ void decode(float (*x)[kGroup]) const {
    ARK_UNROLL for (int h = 0; h < kHeld; ++h) Elements<Format>::decode(words[h], x[h]);
  }
};

struct Range {
  float low, high;
};

__device__ __forceinline__ Range range_of(const float (*x)[kGroup]) {
  Range range{x[0][0], x[0][0]};
  ARK_UNROLL for (int h = 0; h < kHeld; ++h) ARK_UNROLL for (int j = 0; j < kGroup; ++j) {
    range.low = least(range.low, x[h][j]);
    range.high = most(range.high, x[h][j]);
  }
  return range;
}

// Two at a time.
template <class Format>
__device__ __forceinline__ Range range_of(const Held<Format>& held) {
  uint32 low = held.words[0][0], high = low;
  ARK_UNROLL for (int h = 0; h < kHeld; ++h) ARK_UNROLL for (int w = 0; w < Elements<Format>::kWords; ++w) {
    low = Pairs<Format>::least(low, held.words[h][w]);
    high = Pairs<Format>::most(high, held.words[h][w]);
  }
  float lows[2], highs[2];
  Format::decode(low, lows), Format::decode(high, highs);
  return {least(lows[0], lows[1]), most(highs[0], highs[1])};
}

template <bool kWide, class Code>
__device__ __forceinline__ quantize::Scale scale_of(const Range& range) {
  const bool finite = quantize::is_finite(range.low) && quantize::is_finite(range.high);
  constexpr int kNothing = -0x7fffffff - 1, kBad = 0x7fffffff;
  const int top = team_max<kWide>(finite ? order_of(range.high) : kBad);
  const int down = team_max<kWide>(finite ? ~order_of(range.low) : kNothing);
  if (top == kBad) return quantize::not_finite();
  // order_of() is its own inverse.
  const auto float_of = [](int order) { return bits_as<float>(order < 0 ? order ^ 0x7fffffff : order); };
  return Code::scale(float_of(~down), float_of(top));
}

template <bool kWide, quantize::Format kFormat, int kBits, bool kLost>
__device__ __forceinline__ void write_record(const Team& team, const quantize::Rule& rule, const Range& range,
                                             const Records& records, float (*x)[kGroup]) {
  using Code = Coder<kFormat, kBits>;
  const quantize::Scale scale = scale_of<kWide, Code>(range);
  const bool finite = scale.base == scale.base;
  uint64 word[kHeld];
  ARK_UNROLL for (int h = 0; h < kHeld; ++h) {
    const uint32 count = team.count(h);
    word[h] = 0;
    const bool coded = finite || Code::kCodesNaN;
    if (coded && rule.rounding == quantize::Rounding::stochastic)
      word[h] = Code::template encode<true, kLost>(x[h], scale, quantize::random_of(rule, team.number, team.group(h)));
    else if (coded)
      word[h] = Code::template encode<false, kLost>(x[h], scale, quantize::Random{});
    if (kLost && !finite) {
      ARK_UNROLL for (int j = 0; j < kGroup; ++j) x[h][j] = 0.0f;
    }
    if (count < kGroup) word[h] &= (uint64{1} << (count * kBits)) - 1;
  }
  ARK_ROLLED for (int r = records.from(); r < records.to(); ++r) {
    char* const record = records.of(r);
    char* const codes = record + quantize::kHeadBytes;
    if (team.thread == 0) {
      *reinterpret_cast<float2*>(record) = make_float2(scale.base, scale.step);
      const uint32 used = (team.numel + 7) / 8 * kBits;
      for (uint32 i = used; i < static_cast<uint32>(quantize::code_bytes(team.numel, kBits)); ++i) codes[i] = 0;
    }
    ARK_UNROLL for (int h = 0; h < kHeld; ++h) if (team.count(h) != 0)
        store_word<kBits>(codes + team.group(h) * kBits, word[h]);
  }
}

template <class Format>
__device__ __forceinline__ void store_elements(const Team& team, void* tensor, uint64 element,
                                               const float (*x)[kGroup]) {
  char* const to = static_cast<char*>(tensor) + element * Elements<Format>::kBytes;
  const bool wide = at_16(to);
  ARK_UNROLL for (int h = 0; h < kHeld; ++h) Elements<Format>::store(
      to + team.group(h) * (kGroup * Elements<Format>::kBytes), team.count(h), wide && team.count(h) == kGroup, x[h]);
}

// What a tensor's own type keeps of x, taken from it.
template <class Format>
__device__ __forceinline__ void subtract_rounded(float (*x)[kGroup]) {
  ARK_UNROLL for (int h = 0; h < kHeld; ++h) ARK_UNROLL for (int j = 0; j < kGroup; ++j) {
    float sent[2];
    const float pair[2] = {x[h][j], 0.0f};
    Format::decode(Format::encode(pair), sent);
    const float lost = subtract(x[h][j], sent[0]);
    x[h][j] = quantize::is_finite(lost) ? lost : 0.0f;
  }
}

template <class Format>
__device__ __forceinline__ void write_exact(const Team& team, const Records& records, const float (*x)[kGroup]) {
  constexpr uint32 kBytes = Elements<Format>::kBytes;
  ARK_ROLLED for (int r = records.from(); r < records.to(); ++r) {
    char* const record = records.of(r);
    store_elements<Format>(team, record, 0, x);
    if (team.thread == 0)
      for (uint64 i = team.numel * kBytes; i < quantize::record_bytes(team.numel, 0, kBytes); ++i) record[i] = 0;
  }
}

template <class Format, quantize::Format kFormat, int kBits, bool kWide, bool kFed>
__device__ __forceinline__ void encode_bucket(const CodeParams& p, const Team& team, const Records& records,
                                              const Held<Format>& held) {
  float x[kHeld][kGroup];
  held.decode(x);
  if constexpr (!kFed) {
    if constexpr (kBits == 0)
      write_exact<Format>(team, records, x);
    else if constexpr (Pairs<Format>::kKnown)
      write_record<kWide, kFormat, kBits, false>(team, p.rule, range_of(held), records, x);
    else
      write_record<kWide, kFormat, kBits, false>(team, p.rule, range_of(x), records, x);
    return;
  }
  Held<Float32> owed;
  owed.load(team, p.residual);
  float more[kHeld][kGroup];
  owed.decode(more);
  ARK_UNROLL for (int h = 0; h < kHeld; ++h) ARK_UNROLL for (int j = 0; j < kGroup; ++j) {
    if (kBits == 0 && more[h][j] == 0.0f) continue;
    x[h][j] = add(x[h][j], more[h][j]);
  }
  if constexpr (kBits == 0) {
    write_exact<Format>(team, records, x);
    subtract_rounded<Format>(x);
  } else {
    write_record<kWide, kFormat, kBits, true>(team, p.rule, range_of(x), records, x);
  }
  store_elements<Float32>(team, p.residual, team.element, x);
}

template <class Format, quantize::Format kFormat, int kBits, bool kWide, bool kFed>
__device__ __forceinline__ void compressed_encode(const CodeParams& p) {
  begin_kernel();
  constexpr uint32 kBytes = Elements<Format>::kBytes;
  TileExchange exchange(p.links, p.blocks);
  __shared__ char* places[kMaxRanks];
  uint64 bucket, end;
  find_run<kWide>(p, bucket, end);
  bool more = bucket < end;
  Team team{};
  Held<Format> held;
  if (more) {
    team = team_of<kWide, kBits>(p, bucket, kBytes);
    held.load(team, p.input);
  }
  if (!Records::find(exchange, p.links, places)) more = false;
  ARK_ROLLED while (more) {
    more = ++bucket < end;
    Team next;
    Held<Format> ahead;
    if (more) {
      next = team_of<kWide, kBits>(p, bucket, kBytes);
      ahead.load(next, p.input);
    }
    encode_bucket<Format, kFormat, kBits, kWide, kFed>(p, team, Records(places, p.links, team.rank, team.at), held);
    team = next, held = ahead;
  }
  exchange.finish();
}

// Adds the team's elements of a record to x.
template <class Format, quantize::Format kFormat, int kBits>
__device__ __forceinline__ void add_record(const Team& team, const char* record, float (*x)[kGroup]) {
  if constexpr (kBits == 0) {
    Team there = team;
    there.element = 0;
    Held<Format> held;
    held.load(there, record);
    float values[kHeld][kGroup];
    held.decode(values);
    ARK_UNROLL for (int h = 0; h < kHeld; ++h) ARK_UNROLL for (int j = 0; j < kGroup; ++j) x[h][j] =
        add(x[h][j], values[h][j]);
  } else {
    using Code = Coder<kFormat, kBits>;
    const char* const codes = record + quantize::kHeadBytes;
    const auto steps = Code::steps(*reinterpret_cast<const float2*>(record));
    uint64 word[kHeld];
    ARK_UNROLL for (int h = 0; h < kHeld; ++h) word[h] =
        team.count(h) != 0 ? load_word<kBits>(codes + team.group(h) * kBits) : 0;
    ARK_UNROLL for (int h = 0; h < kHeld; ++h) {
      float values[kGroup];
      Code::decode(word[h], steps, values);
      ARK_UNROLL for (int j = 0; j < kGroup; ++j) x[h][j] = add(x[h][j], values[j]);
    }
  }
}

// What a bucket's records have added up to, from -0, to which any number adds as it is.
template <class Format, quantize::Format kFormat, int kBits>
__device__ __forceinline__ void add_ranks(const CodeParams& p, const Team& team, const void* records,
                                          float (*x)[kGroup]) {
  ARK_UNROLL for (int h = 0; h < kHeld; ++h) ARK_UNROLL for (int j = 0; j < kGroup; ++j) x[h][j] = -0.0f;
  const char* record = static_cast<const char*>(records) + team.at;
  ARK_ROLLED for (uint32 r = 0; r < p.ranks; ++r, record += p.rank_bytes)
      add_record<Format, kFormat, kBits>(team, record, x);
  if (!p.average) return;
  ARK_UNROLL for (int h = 0; h < kHeld; ++h) ARK_UNROLL for (int j = 0; j < kGroup; ++j) x[h][j] =
      divide_by_ranks(x[h][j], static_cast<int>(p.ranks));
}

template <class Format, quantize::Format kFormat, int kBits, bool kWide, bool kFed>
__device__ __forceinline__ void reduce_bucket(const CodeParams& p, const Team& team, const Records& records) {
  float x[kHeld][kGroup];
  add_ranks<Format, kFormat, kBits>(p, team, p.input, x);
  if constexpr (kBits == 0) {
    write_exact<Format>(team, records, x);
    return;
  } else {
    fill_behind<kWide>(team, x);
    write_record<kWide, kFormat, kBits, kFed>(team, p.rule, range_of(x), records, x);
  }
  if constexpr (kFed) {
    const float weight = p.average ? static_cast<float>(p.ranks) : 1.0f;
    Held<Float32> owed;
    owed.load(team, p.residual);
    float more[kHeld][kGroup];
    owed.decode(more);
    ARK_UNROLL for (int h = 0; h < kHeld; ++h) ARK_UNROLL for (int j = 0; j < kGroup; ++j) x[h][j] =
        add(more[h][j], multiply(x[h][j], weight));
    store_elements<Float32>(team, p.residual, team.element, x);
  }
}

template <class Format, quantize::Format kFormat, int kBits, bool kWide, bool kFed>
__device__ __forceinline__ void compressed_reduce(const CodeParams& p) {
  begin_kernel();
  TileExchange exchange(p.links, p.blocks);
  __shared__ char* places[kMaxRanks];
  uint64 bucket, end;
  find_run<kWide>(p, bucket, end);
  if (!Records::find(exchange, p.links, places)) end = 0;
  ARK_ROLLED for (; bucket < end; ++bucket) {
    const Team team = team_of<kWide, kBits>(p, bucket, Elements<Format>::kBytes);
    reduce_bucket<Format, kFormat, kBits, kWide, kFed>(p, team,
                                                       Records(places, p.links, team.rank, p.records + team.at));
  }
  exchange.finish();
}

// Records of all ranks to elements, the part's first one first.
template <class Format, quantize::Format kFormat, int kBits, bool kWide>
__device__ __forceinline__ void compressed_sum(const CodeParams& p) {
  begin_kernel();
  uint64 bucket, end;
  find_run<kWide>(p, bucket, end);
  ARK_ROLLED for (; bucket < end; ++bucket) {
    const Team team = team_of<kWide, kBits>(p, bucket, Elements<Format>::kBytes);
    float x[kHeld][kGroup];
    add_ranks<Format, kFormat, kBits>(p, team, p.input, x);
    store_elements<Format>(team, p.output, team.element - p.first_element, x);
  }
}

#endif

}  // namespace ark::device
