// Quantization by buckets on a GPU, and sums of what ranks have quantized. The bytes are those of
// csrc/collectives/compressed, bit for bit.
//
// compressed_encode turns elements (plus a residual) into records; compressed_reduce turns all ranks' records into one,
// through float32 sums in rank order; compressed_sum turns them into elements. Each reads and writes memory once. All
// arithmetic is that of protocol/quantize.hpp, in PTX with explicit rounding (cuda/formats.cuh), so results do not
// depend on the assignment to threads.
#pragma once

#include "cuda/compressed_codes.cuh"
#include "cuda/packet.cuh"

namespace ark::device {

// Records go to places on this GPU or on peers (fused/tiles.cuh): encode stores each bucket's record at its owner,
// reduce stores the sums' records on every rank.
//
// A launch has up to kMostPieces runs of buckets of equal width in its parameters: nothing needs to be copied to the
// device before, and a captured launch keeps them. A team takes `run` consecutive buckets, and loads the next one's
// elements before it encodes the current one's. Memory order: kernels are ordered by the stream; threads wait for each
// other only at the team's barriers, which all of its threads reach.
//
// Elements after a bucket's last one repeat the first one, which changes neither scale nor sums.

#if defined(__CUDACC__)

// One bucket and the threads that process it.
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
__device__ __forceinline__ void find_run(const CodeParams& p, uint32& begin, uint32& end) {
  const uint32 team = kWide ? blockIdx.x : blockIdx.x * (kCodeThreads / 32) + threadIdx.x / 32;
  begin = team * p.run;
  end = begin + p.run < p.buckets ? begin + p.run : p.buckets;
}

template <bool kWide, int kBits>
__device__ __forceinline__ Team team_of(const CodeParams& p, uint32 bucket, uint32 element_bytes) {
  uint32 low = 0, high = p.pieces;  // binary search for the last piece that starts at or before the bucket
  while (high - low > 1) {
    const uint32 middle = (low + high) / 2;
    (p.piece[middle].first <= bucket ? low : high) = middle;
  }
  const quantize::Piece& piece = p.piece[low].piece;
  const uint32 i = bucket - p.piece[low].first;
  const uint64 begin = uint64{i} * piece.bucket, left = piece.numel - begin;
  Team team;
  team.thread = kWide ? threadIdx.x : threadIdx.x % 32;
  team.threads = kWide ? kCodeThreads : 32;
  team.element = piece.element + begin;
  team.at = piece.at + uint64{i} * static_cast<uint32>(quantize::record_bytes(piece.bucket, kBits, element_bytes));
  team.numel = left < piece.bucket ? static_cast<uint32>(left) : piece.bucket;
  team.number = piece.number + i;
  team.rank = p.piece[low].rank;
  return team;
}

// Collects a team's records in shared memory and sends them as wide stores. Consecutive records start at multiples of 8
// bytes, and stores that cross lines cost a link twice the requests.
template <bool kWide, uint32 kBits>
class Outbox {
  static constexpr uint32 kRecord = quantize::kHeadBytes + (kWide ? quantize::kMostBucket : kWarpBucket) / 8 * kBits;
  static constexpr uint32 kRoom = kWide ? kRecord : 4 * kRecord;
  static constexpr int kThreads = kWide ? kCodeThreads : 32;

 public:
  // Called by every thread of the block. `records`: offset of this rank's records in a place.
  __device__ __forceinline__ Outbox(const TileLinks& links, uint32 blocks, uint64 records)
      : ranks_(links.ranks), records_(records) {
    TileExchange exchange(links, blocks);
    const int rank = static_cast<int>(threadIdx.x);
    bool well = true;
    if (rank < ranks_) {
      shared().places[rank] = exchange.place_of(rank);
      well = shared().places[rank] != nullptr;
      exchange.refuse_other();
    }
    well_ = __syncthreads_and(well) != 0;
  }
  __device__ __forceinline__ bool well() const { return well_; }  // false for the whole block: give up

  // Where the team writes its next record.
  __device__ __forceinline__ char* next(const Team& team, uint32 bytes) {
    const uint64 at = records_ + team.at;
    if (filled_ != 0 && (team.rank != rank_ || at != offset_ + filled_ || filled_ + bytes > kRoom)) send();
    if (filled_ == 0) offset_ = at, rank_ = team.rank;
    char* const record = buffer() + offset_ % 16 + filled_;
    filled_ += bytes;
    return record;
  }
  // Stores a record that is already in memory in its final form.
  template <class Store>
  __device__ __forceinline__ void store(const Team& team, const Store& store) {
    ARK_ROLLED for (int r = from(team.rank); r < to(team.rank); ++r) store(shared().places[r] + records_ + team.at);
  }

  __device__ __forceinline__ void send() {
    if (filled_ == 0) return;
    sync();
    const uint32 begin = static_cast<uint32>(offset_ % 16), end = begin + filled_;
    const char* const from_here = buffer();
    ARK_ROLLED for (int r = from(rank_); r < to(rank_); ++r) {
      char* const there = shared().places[r] + (offset_ - begin);
      for (uint32 i = threadIdx.x % kThreads * 16; i < end; i += kThreads * 16) {
        if (i >= begin && i + 16 <= end)
          *reinterpret_cast<uint4*>(there + i) = *reinterpret_cast<const uint4*>(from_here + i);
        else if (i >= begin)
          *reinterpret_cast<uint64*>(there + i) = *reinterpret_cast<const uint64*>(from_here + i);
        else if (i + 16 <= end)
          *reinterpret_cast<uint64*>(there + i + 8) = *reinterpret_cast<const uint64*>(from_here + i + 8);
      }
    }
    sync();
    filled_ = 0;
  }

 private:
  struct Shared {
    alignas(16) char buffer[kCodeThreads / kThreads][kBits == 0 ? 16 : kRoom + 16];
    char* places[kMaxRanks];
  };
  static __device__ __forceinline__ Shared& shared() {
    __shared__ Shared all;
    return all;
  }
  static __device__ __forceinline__ char* buffer() { return shared().buffer[threadIdx.x / kThreads]; }
  static __device__ __forceinline__ void sync() {
    if constexpr (kWide)
      __syncthreads();
    else
      __syncwarp();
  }
  __device__ __forceinline__ int from(int rank) const { return rank == kEveryRank ? 0 : rank; }
  __device__ __forceinline__ int to(int rank) const { return rank == kEveryRank ? ranks_ : rank + 1; }

  int ranks_, rank_ = 0;
  bool well_ = false;
  uint64 records_, offset_ = 0;  // of the first record in the buffer
  uint32 filled_ = 0;
};

__device__ __forceinline__ bool at_16(const void* pointer) {
  return reinterpret_cast<uint64>(pointer) % 16 == 0;
}

// The maximum over a team's threads. Floats are compared as integers of the same order.
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

// Replaces values after the bucket's last element by its first one.
template <bool kWide>
__device__ __forceinline__ void fill_behind(const Team& team, float (*x)[kGroup]) {
  if (team.whole()) return;  // the same for all of the team's threads
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

// A thread's elements in their memory format.
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

// Two elements at a time.
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
  // order_of() is its own inverse
  const auto float_of = [](int order) { return bits_as<float>(order < 0 ? order ^ 0x7fffffff : order); };
  return Code::scale(float_of(~down), float_of(top));
}

template <bool kWide, quantize::Format kFormat, int kBits, bool kLost>
__device__ __forceinline__ void write_record(const Team& team, const quantize::Rule& rule, const Range& range,
                                             Outbox<kWide, kBits>& outbox, float (*x)[kGroup]) {
  using Code = Coder<kFormat, kBits>;
  const quantize::Scale scale = scale_of<kWide, Code>(range);
  const bool finite = scale.base == scale.base;
  const uint32 bytes = static_cast<uint32>(quantize::code_bytes(team.numel, kBits));
  char* const record = outbox.next(team, quantize::kHeadBytes + bytes);
  char* const codes = record + quantize::kHeadBytes;
  if (team.thread == 0) {
    *reinterpret_cast<float2*>(record) = make_float2(scale.base, scale.step);
    for (uint32 i = (team.numel + 7) / 8 * kBits; i < bytes; ++i) codes[i] = 0;
  }
  ARK_UNROLL for (int h = 0; h < kHeld; ++h) {
    const uint32 count = team.count(h);
    const bool coded = finite || Code::kCodesNaN;
    uint64 word = 0;
    if (coded && rule.rounding == quantize::Rounding::stochastic)
      word = Code::template encode<true, kLost>(x[h], scale, quantize::random_of(rule, team.number, team.group(h)));
    else if (coded)
      word = Code::template encode<false, kLost>(x[h], scale, quantize::Random{});
    if (kLost && !finite) {
      ARK_UNROLL for (int j = 0; j < kGroup; ++j) x[h][j] = 0.0f;
    }
    if (count < kGroup) word &= (uint64{1} << (count * kBits)) - 1;
    if (count != 0) store_word<kBits>(codes + team.group(h) * kBits, word);
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

// Subtracts from x what the tensor's own type keeps of it.
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
struct StoreExact {
  const Team& team;
  const float (*x)[kGroup];
  __device__ __forceinline__ void operator()(char* record) const {
    constexpr uint32 kBytes = Elements<Format>::kBytes;
    store_elements<Format>(team, record, 0, x);
    if (team.thread == 0)
      for (uint64 i = team.numel * kBytes; i < quantize::record_bytes(team.numel, 0, kBytes); ++i) record[i] = 0;
  }
};

template <class Format, quantize::Format kFormat, int kBits, bool kWide, bool kFed>
__device__ __forceinline__ void encode_bucket(const CodeParams& p, const Team& team, Outbox<kWide, kBits>& outbox,
                                              const Held<Format>& held) {
  float x[kHeld][kGroup];
  held.decode(x);
  if constexpr (!kFed) {
    if constexpr (kBits == 0)
      outbox.store(team, StoreExact<Format>{team, x});
    else if constexpr (Pairs<Format>::kKnown)
      write_record<kWide, kFormat, kBits, false>(team, p.rule, range_of(held), outbox, x);
    else
      write_record<kWide, kFormat, kBits, false>(team, p.rule, range_of(x), outbox, x);
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
    outbox.store(team, StoreExact<Format>{team, x});
    subtract_rounded<Format>(x);
  } else {
    write_record<kWide, kFormat, kBits, true>(team, p.rule, range_of(x), outbox, x);
  }
  store_elements<Float32>(team, p.residual, team.element, x);
}

template <class Format, quantize::Format kFormat, int kBits, bool kWide, bool kFed>
__device__ __forceinline__ void compressed_encode(const CodeParams& p) {
  begin_kernel();
  constexpr uint32 kBytes = Elements<Format>::kBytes;
  uint32 bucket, end;
  find_run<kWide>(p, bucket, end);
  bool more = bucket < end;
  Team team{};
  Held<Format> held;
  if (more) {
    team = team_of<kWide, kBits>(p, bucket, kBytes);
    held.load(team, p.input);
  }
  Outbox<kWide, kBits> outbox(p.links, p.blocks, p.records);
  if (!outbox.well()) more = false;
  ARK_ROLLED while (more) {
    more = ++bucket < end;
    Team next;
    Held<Format> ahead;
    if (more) {
      next = team_of<kWide, kBits>(p, bucket, kBytes);
      ahead.load(next, p.input);
    }
    encode_bucket<Format, kFormat, kBits, kWide, kFed>(p, team, outbox, held);
    team = next, held = ahead;
  }
  outbox.send();
  TileExchange(p.links, p.blocks, false).finish();
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

// Adds up a bucket's records of all ranks, starting from -0, which leaves any number unchanged.
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
__device__ __forceinline__ void reduce_bucket(const CodeParams& p, const Team& team, Outbox<kWide, kBits>& outbox) {
  float x[kHeld][kGroup];
  add_ranks<Format, kFormat, kBits>(p, team, p.input, x);
  if constexpr (kBits == 0) {
    outbox.store(team, StoreExact<Format>{team, x});
    return;
  } else {
    fill_behind<kWide>(team, x);
    write_record<kWide, kFormat, kBits, kFed>(team, p.rule, range_of(x), outbox, x);
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
  uint32 bucket, end;
  find_run<kWide>(p, bucket, end);
  Outbox<kWide, kBits> outbox(p.links, p.blocks, p.records);
  if (!outbox.well()) end = 0;
  ARK_ROLLED for (; bucket < end; ++bucket) reduce_bucket<Format, kFormat, kBits, kWide, kFed>(
      p, team_of<kWide, kBits>(p, bucket, Elements<Format>::kBytes), outbox);
  outbox.send();
  TileExchange(p.links, p.blocks, false).finish();
}

// Bits of the smallest float32 that the element type stores as infinity; those of NaN are greater.
template <class Format>
inline constexpr uint32 kOverflow = 0x7f800000;
template <>
inline constexpr uint32 kOverflow<BFloat16> = 0x7f7f8000;
template <>
inline constexpr uint32 kOverflow<Float16> = 0x477ff000;

// Lowers *p.nonfinite to the smallest index of a NaN or Inf among the team's results. Without one, the cost is a
// maximum per element and a vote per warp. The search is unrolled: as a loop it takes eight more registers on sm_80.
// The host only polls the word, so relaxed order is enough.
template <class Format>
__device__ __forceinline__ void note_nonfinite(const CodeParams& p, const Team& team, const float (*x)[kGroup]) {
  float largest = 0.0f;
  ARK_UNROLL for (int h = 0; h < kHeld; ++h) ARK_UNROLL for (int j = 0; j < kGroup; ++j) largest =
      most(largest, fabsf(x[h][j]));
  if (!__any_sync(~0u, bits_as<uint32>(largest) >= kOverflow<Format>)) return;
  uint32 first = ~0u;
  ARK_UNROLL for (int h = kHeld - 1; h >= 0; --h) ARK_UNROLL for (int j = kGroup - 1; j >= 0; --j) {
    const bool overflows = bits_as<uint32>(fabsf(x[h][j])) >= kOverflow<Format>;
    if (overflows && static_cast<uint32>(j) < team.count(h)) first = team.group(h) * kGroup + j;
  }
  first = __reduce_min_sync(~0u, first);
  if (threadIdx.x % 32 != 0 || first == ~0u) return;
  const uint64 index = team.element - p.first_element + first;
  uint64 known;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(known) : "l"(p.nonfinite) : "memory");
  if (index < known) asm volatile("red.relaxed.sys.global.min.u64 [%0], %1;" ::"l"(p.nonfinite), "l"(index) : "memory");
}

// Turns records of all ranks into elements, the part's first element first.
template <class Format, quantize::Format kFormat, int kBits, bool kWide>
__device__ __forceinline__ void compressed_sum(const CodeParams& p) {
  begin_kernel();
  uint32 bucket, end;
  find_run<kWide>(p, bucket, end);
  ARK_ROLLED for (; bucket < end; ++bucket) {
    const Team team = team_of<kWide, kBits>(p, bucket, Elements<Format>::kBytes);
    float x[kHeld][kGroup];
    add_ranks<Format, kFormat, kBits>(p, team, p.input, x);
    store_elements<Format>(team, p.output, team.element - p.first_element, x);
    if (p.nonfinite != nullptr) note_nonfinite<Format>(p, team, x);
  }
}

#endif

}  // namespace ark::device
