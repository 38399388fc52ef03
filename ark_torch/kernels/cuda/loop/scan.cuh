// Running sums and products along rows, in float64 or int64, each rounded to the result's type.
//
// Short rows: one per thread. Long rows: one after the other by all threads, some thousand elements at a time: within a
// thread, then over the lanes before it, then over the warps before it. The order depends only on the row's length.
#pragma once

#include "cuda/loop/group.cuh"
#include "cuda/loop/ops.cuh"

namespace ark::loop {

template <bool kFloat>
struct Wide {
  using type = int64_t;
};
template <>
struct Wide<true> {
  using type = double;
};

template <bool kProduct>
ARK_LOOP double combined(double x, double y) {
  return kProduct ? x * y : x + y;
}
template <bool kProduct>
ARK_LOOP int64_t combined(int64_t x, int64_t y) {
  return kProduct ? mul(x, y) : add(x, y);
}
ARK_LOOP float to_stored(double x) {
  return static_cast<float>(x);
}
ARK_LOOP int64_t to_stored(int64_t x) {
  return x;
}

template <bool kProduct, int64_t kLength, int64_t kTo, int64_t kFrom, class V, class Out, class T>
ARK_LOOP void scan_by_block(Out* to, const T* from) {
  constexpr int kItems = 4;
  __shared__ V totals[kWarps];
  V carried = kProduct ? 1 : 0;
  for (int64_t begin = 0; begin < kLength; begin += kItems * kThreads) {
    const int64_t first = begin + thread() * kItems;
    V x[kItems];
    ARK_UNROLL for (int i = 0; i < kItems; ++i) {
      x[i] = kProduct ? 1 : 0;
      if (first + i < kLength) x[i] = static_cast<V>(load_one(from + (first + i) * kFrom));
      if (i > 0) x[i] = combined<kProduct>(x[i - 1], x[i]);
    }
    V sum = x[kItems - 1];
    ARK_UNROLL for (int apart = 1; apart < 32; apart *= 2) {
      const V other = __shfl_up_sync(~0u, sum, apart);
      if (lane() >= apart) sum = combined<kProduct>(other, sum);
    }
    sync();  // the previous totals have been read
    if (lane() == 31) totals[warp()] = sum;
    sync();
    const V lanes_before = __shfl_up_sync(~0u, sum, 1);
    V before = carried;
    ARK_UNROLL for (int i = 0; i < kWarps; ++i) {
      if (i == warp()) before = carried;
      carried = combined<kProduct>(carried, totals[i]);
    }
    if (lane() > 0) before = combined<kProduct>(before, lanes_before);
    ARK_UNROLL for (int i = 0; i < kItems; ++i) if (first + i < kLength)
        store_one(to + (first + i) * kTo, to_stored(combined<kProduct>(before, x[i])));
  }
}

// place(row, to_at, from_at) returns the offsets of a row of kLength elements, whose strides are kTo and kFrom.
template <bool kProduct, int64_t kLength, int64_t kTo, int64_t kFrom, class Out, class T, class Place>
ARK_LOOP void scan_rows(Out* to, const T* from, uint32 rows, Place place) {
  using V = typename Wide<kIsFloat<Out>>::type;
  if constexpr (kLength <= 32) {
    for_elements(rows, [&](int64_t row) {
      int64_t to_at, from_at;
      place(static_cast<uint32>(row), to_at, from_at);
      V sum = kProduct ? 1 : 0;
      for (int64_t i = 0; i < kLength; ++i) {
        sum = combined<kProduct>(sum, static_cast<V>(load_one(from + from_at + i * kFrom)));
        store_one(to + to_at + i * kTo, to_stored(sum));
      }
    });
  } else {
    for (uint32 row = 0; row < rows; ++row) {
      int64_t to_at, from_at;
      place(row, to_at, from_at);
      scan_by_block<kProduct, kLength, kTo, kFrom, V>(to + to_at, from + from_at);
    }
  }
}

}  // namespace ark::loop
