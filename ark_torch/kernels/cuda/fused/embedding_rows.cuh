// Gradients of embedding tables' rows: added up, and stored (dense, sparse) or applied to the rows in place (SGD,
// row-wise Adagrad).
//
// The kernels receive the sorted keys of all indices, equal ones in index order (embedding_gradient.cuh). A row's
// gradient is the float32 sum over its bags, in parts of kRowPart whose sums are added in order: the same bits for any
// launch, and those of the CPU (csrc/ops/pooling.hpp). Only the group that reads a row writes it.
#pragma once

#include "cuda/fused/embedding_gradient.cuh"

namespace ark::device {

// sum_rows has a group of kLanes threads per key; the one at a row's first key continues, the others leave. A row of
// more than one part goes to a list, and a block of sum_crowded_rows splits its parts among its groups: in tables with
// few rows, one row may be in every bag. The order of the list depends on the launch, but no bit depends on it.

inline constexpr uint32 kRowPart = 64;  // indices

#if defined(__CUDACC__)

// Division of many numbers by the same whole number of at least 1: as IEEE 754 rounds it, but in place. The compiler's
// division calls a function for numbers of unusual size, and few registers outlast a call.
class Divisor {
 public:
  __device__ __forceinline__ explicit Divisor(float by) : by_(by) {
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse_) : "f"(by));
    double inverse = inverse_;
    ARK_UNROLL for (int i = 0; i < 2; ++i) inverse =
        __fma_rn(__fma_rn(-static_cast<double>(by), inverse, 1.0), inverse, inverse);
    inverse_ = static_cast<float>(inverse);  // rounded once: 1 / by is never so near to the middle of two floats
  }
  // Of another lane, by which all lanes of a warp then divide.
  __device__ __forceinline__ Divisor(const Divisor& mine, int lane, int lanes)
      : by_(__shfl_sync(~0u, mine.by_, lane, lanes)), inverse_(__shfl_sync(~0u, mine.inverse_, lane, lanes)) {}

  // Two corrections of the quotient by its exact remainder round it right, where remainders are no subnormal numbers.
  __device__ __forceinline__ float applied(float x) const {
    const float magnitude = fabsf(x);
    if (magnitude >= 0x1p-60f && magnitude <= 3.402823466e38f) {
      float q = __fmul_rn(x, inverse_);
      ARK_UNROLL for (int i = 0; i < 2; ++i) q = __fmaf_rn(__fmaf_rn(-q, by_, x), inverse_, q);
      return q;
    }
    if (!(magnitude > 0.0f && magnitude < 1.0f)) return __fmul_rn(x, inverse_);  // zeros, infinities, NaN
    const double wide = x, by = by_, inverse = inverse_;
    double q = wide * inverse;
    ARK_UNROLL for (int i = 0; i < 2; ++i) q = __fma_rn(__fma_rn(-q, by, wide), inverse, q);
    return static_cast<float>(q);
  }

 private:
  float by_, inverse_;
};

// What an entry's gradient is multiplied by: its bag's weight.
class Factor {
 public:
  __device__ __forceinline__ explicit Factor(float by) : by_(by) {}
  __device__ __forceinline__ Factor(const Factor& mine, int lane, int lanes)
      : by_(__shfl_sync(~0u, mine.by_, lane, lanes)) {}
  __device__ __forceinline__ float applied(float x) const { return multiply(x, by_); }

 private:
  float by_;
};
template <bool kMean>
struct Weighing {
  using Type = Factor;
};
template <>
struct Weighing<true> {
  using Type = Divisor;
};

// Adds the entries [from, from + count) of the sorted list to `total`, in order. All threads of a warp call it; its
// groups may have different counts and tables.
template <class Format, class Index, bool kWide, int kLanes, bool kMean>
__device__ __forceinline__ void sum_part(const RowSumParams& p, const RowTable& table, const char* column, bool active,
                                         uint32 from, uint32 count, float (&total)[BagAccess<Format, kWide>::kValues]) {
  using Access = BagAccess<Format, kWide>;
  constexpr int kAhead = kLanes < kMostAhead ? kLanes : kMostAhead;
  constexpr uint32 kAll = ~0u;
  const uint32 lane = threadIdx.x % kLanes;
  const uint32 longest = kLanes == 32 ? count : __reduce_max_sync(kAll, count);
  for (uint32 base = 0; base < longest; base += kLanes) {
    const int most = static_cast<int>(min(longest - base, static_cast<uint32>(kLanes)));
    const int mine = base < count ? static_cast<int>(min(count - base, static_cast<uint32>(kLanes))) : 0;
    uint32 bag = 0;
    float scale = 1.0f;
    if (static_cast<int>(lane) < mine) {
      const uint32 place = static_cast<uint32>(p.places[from + base + lane]);
      bag = static_cast<uint32>(p.bags[place]);
      if constexpr (kMean)
        scale = static_cast<float>(end_of_bag<Index>(p, table, bag) -
                                   static_cast<long long>(static_cast<const Index*>(table.offsets)[bag]));
      else if (table.weights != nullptr)
        scale = load_weight<Format>(table.weights, place - table.first);
    }
    const typename Weighing<kMean>::Type own(scale);
    ARK_ROLLED for (int done = 0; done < most; done += kAhead) {
      typename Access::Raw raw[kAhead];
      ARK_UNROLL for (int i = 0; i < kAhead; ++i) {
        const uint32 next = __shfl_sync(kAll, bag, (done + i) % kLanes, kLanes);
        if (done + i < mine && active) raw[i] = Access::load(column + uint64{next} * p.row_bytes);
      }
      ARK_UNROLL for (int i = 0; i < kAhead; ++i) {
        const typename Weighing<kMean>::Type by(own, (done + i) % kLanes, kLanes);
        if (done + i >= mine || !active) continue;
        float values[Access::kValues];
        Access::decode(raw[i], values);
        ARK_UNROLL for (int v = 0; v < Access::kValues; ++v) total[v] = add(total[v], by.applied(values[v]));
      }
    }
  }
}

// Adds the squares of a strip of a row: within blocks of 32 columns pairwise, then the blocks in order.
template <int kValues, int kLanes>
__device__ __forceinline__ float add_squares(float squares, const float (&gradient)[kValues]) {
  constexpr int kBlock = 32 / kValues;  // lanes
  float pairs[kValues];
  ARK_UNROLL for (int v = 0; v < kValues; ++v) pairs[v] = multiply(gradient[v], gradient[v]);
  ARK_UNROLL for (int width = kValues / 2; width > 0; width /= 2) {
    ARK_UNROLL for (int v = 0; v < width; ++v) pairs[v] = add(pairs[2 * v], pairs[2 * v + 1]);
  }
  float sum = pairs[0];
  ARK_UNROLL for (int d = 1; d < (kBlock < kLanes ? kBlock : kLanes); d *= 2) sum =
      add(sum, __shfl_xor_sync(~0u, sum, d, kLanes));
  ARK_UNROLL for (int block = 0; block < kLanes; block += kBlock) squares =
      add(squares, __shfl_sync(~0u, sum, block, kLanes));
  return squares;
}

// The kernel writes the table's rows, so they are not read through the non-coherent cache.
template <class Access>
__device__ __forceinline__ typename Access::Raw load_own(const char* from) {
  typename Access::Raw raw;
  if constexpr (Access::kBytes == 16) {
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(raw.words[0]), "=r"(raw.words[1]), "=r"(raw.words[2]), "=r"(raw.words[3])
                 : "l"(from)
                 : "memory");
  } else if constexpr (Access::kBytes == 4) {
    raw.words[0] = *reinterpret_cast<const uint32*>(from);
  } else {
    raw.words[0] = *reinterpret_cast<const uint16*>(from);
  }
  return raw;
}

// Applies a row's gradient strip by strip. sum(unit, total) computes a strip's gradient. Row-wise Adagrad needs all
// strips before it writes one, and adds up those of long rows twice. All threads of a warp call it; a group that is not
// `mine` writes nothing.
template <class Format, bool kWide, int kLanes, class Sum>
__device__ __forceinline__ void use_row(const RowSumParams& p, const RowTable& table, uint32 first, uint32 row,
                                        bool mine, const Sum& sum) {
  using Access = BagAccess<Format, kWide>;
  constexpr int kValues = Access::kValues;
  const uint32 lane = threadIdx.x % kLanes;
  const bool adapts = p.use == RowUse::rowwise_adagrad, in_place = adapts || p.use == RowUse::sgd;
  float step = in_place ? *p.rate : 0.0f, squares = 0.0f;
  char* const to = p.use == RowUse::sparse
                       ? static_cast<char*>(p.values) + (mine ? static_cast<uint64>(p.slots[first]) : 0) * p.row_bytes
                       : static_cast<char*>(table.rows) + uint64{row} * p.row_bytes;
  for (uint32 pass = adapts && p.columns > 1 ? 0 : 1; pass < 2; ++pass) {
    for (uint32 strip = 0; strip < p.columns; ++strip) {
      const uint32 unit = strip * kLanes + lane;
      float total[kValues];
      ARK_UNROLL for (int v = 0; v < kValues; ++v) total[v] = 0.0f;
      sum(unit, total);
      if (adapts && (pass == 0 || p.columns == 1)) {
        squares = add_squares<kValues, kLanes>(squares, total);
        if (strip + 1 == p.columns) {
          float state = 0.0f;
          if (mine && lane == 0) {
            state = add(table.state[row], divide(squares, static_cast<float>(p.dim)));
            table.state[row] = state;
          }
          state = __shfl_sync(~0u, state, 0, kLanes);
          step = divide(step, add(__fsqrt_rn(state), p.eps));
        }
      }
      if (pass == 0 || !mine || unit >= p.units) continue;
      char* const at = to + uint64{unit} * Access::kBytes;
      if (in_place) {
        float values[kValues];
        Access::decode(load_own<Access>(at), values);
        ARK_UNROLL for (int v = 0; v < kValues; ++v) total[v] = subtract(values[v], multiply(step, total[v]));
      }
      Access::store(at, total);
    }
  }
}

__device__ __forceinline__ uint32 table_of(const RowSumParams& p, uint32 key) {
  uint32 t = 0;
  while (t + 1 < p.tables && key >= p.table[t + 1].first_row) ++t;
  return t;
}

// The address of this thread's part of a row's gradient in the bags of table t.
template <class Access>
__device__ __forceinline__ const char* column_of(const RowSumParams& p, uint32 t, uint32 unit) {
  return static_cast<const char*>(p.of_bags) + (uint64{t} * p.bags_each * p.row_bytes + uint64{unit} * Access::kBytes);
}

template <class Format, class Index, bool kWide, int kLanes, bool kMean>
__device__ __forceinline__ void sum_rows(const RowSumParams& p) {
  using Access = BagAccess<Format, kWide>;
  constexpr uint32 kAll = ~0u, kGroup = kLanes == 32 ? ~0u : (1u << kLanes % 32) - 1;
  const uint32 lane = threadIdx.x % kLanes, shift = threadIdx.x % 32 / kLanes * kLanes;
  const uint32 first = blockIdx.x * (kBagThreads / kLanes) + threadIdx.x / kLanes;
  const uint32 key = first < p.entries ? static_cast<uint32>(p.keys[first]) : p.rows;
  bool mine = key < p.rows && (first == 0 || static_cast<uint32>(p.keys[first - 1]) != key);
  if (mine && p.entries - first > kRowPart && static_cast<uint32>(p.keys[first + kRowPart]) == key) {
    if (lane == 0) p.crowded[1 + atomicAdd(p.crowded, 1u)] = first;
    mine = false;
  }
  if (!__any_sync(kAll, mine)) return;
  uint32 count = 0;
  for (bool more = mine; __any_sync(kAll, more);) {
    const uint32 at = first + count + lane;
    const bool same = more && at < p.entries && static_cast<uint32>(p.keys[at]) == key;
    const uint32 found = __popc(__ballot_sync(kAll, same) >> shift & kGroup);
    count += found;
    more = more && found == kLanes;
  }
  const uint32 t = table_of(p, mine ? key : 0);
  const RowTable& table = p.table[t];
  use_row<Format, kWide, kLanes>(p, table, first, mine ? key - table.first_row : 0, mine,
                                 [&](uint32 unit, float(&total)[Access::kValues]) {
                                   sum_part<Format, Index, kWide, kLanes, kMean>(
                                       p, table, column_of<Access>(p, t, unit), unit < p.units, first, count, total);
                                 });
}

template <class Format, class Index, bool kWide, int kLanes, bool kMean>
__device__ __forceinline__ void sum_crowded_rows(const RowSumParams& p) {
  using Access = BagAccess<Format, kWide>;
  constexpr int kValues = Access::kValues;
  constexpr uint32 kGroups = kBagThreads / kLanes;
  __shared__ float parts[kGroups][kLanes * kValues];
  const uint32 lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes, rows = *p.crowded;
  for (uint32 i = blockIdx.x; i < rows; i += gridDim.x) {
    const uint32 first = p.crowded[1 + i], key = static_cast<uint32>(p.keys[first]);
    uint32 low = first + kRowPart, high = p.entries;  // keys[low] is the row's, keys[high] is not
    while (high - low > 1) {
      const uint32 middle = low + (high - low) / 2;
      if (static_cast<uint32>(p.keys[middle]) == key)
        low = middle;
      else
        high = middle;
    }
    const uint32 t = table_of(p, key), entries = high - first;
    const RowTable& table = p.table[t];
    use_row<Format, kWide, kLanes>(
        p, table, first, key - table.first_row, group == 0, [&](uint32 unit, float(&total)[kValues]) {
          for (uint32 begin = 0; begin < entries; begin += kGroups * kRowPart) {
            const uint32 from = begin + group * kRowPart;
            float part[kValues];
            ARK_UNROLL for (int v = 0; v < kValues; ++v) part[v] = 0.0f;
            sum_part<Format, Index, kWide, kLanes, kMean>(p, table, column_of<Access>(p, t, unit), unit < p.units,
                                                          first + from,
                                                          from < entries ? min(entries - from, kRowPart) : 0, part);
            ARK_UNROLL for (int v = 0; v < kValues; ++v) parts[group][lane * kValues + v] = part[v];
            __syncthreads();
            const uint32 there = min((entries - begin + kRowPart - 1) / kRowPart, kGroups);
            for (uint32 g = 0; g < there; ++g)
              ARK_UNROLL for (int v = 0; v < kValues; ++v) total[v] = add(total[v], parts[g][lane * kValues + v]);
            __syncthreads();
          }
        });
  }
}

#endif

}  // namespace ark::device
