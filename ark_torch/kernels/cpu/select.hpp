// The k largest elements of a row, whole rows in order, and running sums.
//
// PyTorch does not specify which of several equal elements topk selects. This selects the same ones as its CPU kernel,
// by running the same algorithms of the same standard library on the same pairs: partial_sort if k is small compared
// with the row, else nth_element and a sort of what precedes it. NaN is greater than all. A stable order is a plain
// sort by value, then position.
#pragma once

#include <algorithm>
#include <new>

#include "cpu/vector.hpp"

namespace ark::cpu {

template <class V>
struct Placed {
  V value;
  int64_t place;
};

template <bool kLargest, class V>
ARK_INLINE bool comes_first(V x, V y) {
  if constexpr (kLargest)
    return (x != x && y == y) || x > y;
  else
    return (x == x && y != y) || x < y;
}

// Writes the positions of the first k of n. `scratch` has 16 bytes for each of n.
template <bool kLargest, bool kStable, class T>
inline void select_row(const T* x, int64_t stride, int64_t n, int64_t* out, int64_t out_stride, int64_t k,
                       char* scratch) {
  using V =
      std::conditional_t<std::is_same_v<T, float> || std::is_same_v<T, bf16> || std::is_same_v<T, f16>, float, int64_t>;
  static_assert(sizeof(Placed<V>) == 16);
  auto* const row = reinterpret_cast<Placed<V>*>(scratch);
  for (int64_t i = 0; i < n; ++i) ::new (row + i) Placed<V>{static_cast<V>(load_one(x + i * stride)), i};
  const auto before = [](const Placed<V>& a, const Placed<V>& b) {
    if constexpr (kStable) {
      if (comes_first<kLargest>(a.value, b.value)) return true;
      return !comes_first<kLargest>(b.value, a.value) && a.place < b.place;
    } else {
      return comes_first<kLargest>(a.value, b.value);
    }
  };
  if (kStable || k * 64 <= n) {
    if (k == n)
      std::sort(row, row + n, before);
    else
      std::partial_sort(row, row + k, row + n, before);
  } else {
    std::nth_element(row, row + k - 1, row + n, before);
    std::sort(row, row + k - 1, before);
  }
  for (int64_t i = 0; i < k; ++i) out[i * out_stride] = row[i].place;
}

// out[i] = x[0] + ... + x[i], or the product; accumulated in a wide type, each result rounded.
template <bool kProduct, class T, class Out>
inline void scan_row(const T* x, int64_t stride, Out* out, int64_t out_stride, int64_t n) {
  using V = std::conditional_t<std::is_same_v<Out, float> || std::is_same_v<Out, bf16> || std::is_same_v<Out, f16>,
                               double, int64_t>;
  using Stored = std::conditional_t<std::is_same_v<V, double>, float, int64_t>;
  V sum = kProduct ? 1 : 0;
  for (int64_t i = 0; i < n; ++i) {
    const V next = static_cast<V>(load_one(x + i * stride));
    if constexpr (kProduct)
      sum *= next;
    else
      sum += next;
    store_one(out + i * out_stride, static_cast<Stored>(sum));
  }
}

}  // namespace ark::cpu
