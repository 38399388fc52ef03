// Reductions of a row: 16 running results, one per lane, combined at the end in a fixed order.
//
// A column's lane depends only on its position, and one task reduces a row, so bits do not depend on tiles or workers.
// Usage: add() for every 16 columns, then result(), which is in all lanes; if lanes are rows, add() for every column,
// then each().
#pragma once

#include <type_traits>

#include "cpu/ops.hpp"

namespace ark::cpu {

// Combines halves until one lane is left: 8 with 8, 4 with 4, ...
template <class Lanes, class Combine>
ARK_INLINE auto fold(const Lanes& lanes, Combine&& combine) {
  std::remove_cvref_t<decltype(lanes[0])> all[kLanes];
  std::memcpy(all, &lanes, sizeof(lanes));
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) all[i] = combine(all[i], all[i + half]);
  return all[0];
}
// The same order and bits as fold, in registers.
ARK_INLINE float sum_of(Floats x) {
  using Four = float __attribute__((vector_size(16)));
#if defined(__AVX__)
  using Eight = float __attribute__((vector_size(32)));
#endif
#if defined(__AVX512F__)
  const Eight eight = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
                      __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
#elif defined(__AVX__)
  const Eight eight = x;
#endif
#if defined(__AVX__)
  const Four four =
      __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
#else
  Four parts[kLanes / 4];
  std::memcpy(parts, &x, sizeof(x));
  static_assert(kLanes == 16);
  const Four four = (parts[0] + parts[2]) + (parts[1] + parts[3]);
#endif
  const Four two = four + __builtin_shufflevector(four, four, 2, 3, 0, 1);
  return two[0] + two[1];
}

template <class Lanes, class Count>
ARK_INLINE Lanes only(Lanes x, Lanes otherwise, Count lanes) {
  return select(active(lanes), x, otherwise);
}
template <class Lanes>
ARK_INLINE Lanes only(Lanes x, Lanes, All) {
  return x;
}

template <class Lanes>
struct Sum {
  Lanes total{};
  template <class Count>
  ARK_INLINE void add(Lanes x, Count lanes) {
    total += only(x, Lanes{}, lanes);
  }
  ARK_INLINE Lanes result() const {
    return splat(fold(total, [](auto a, auto b) { return a + b; }));
  }
  ARK_INLINE Lanes each() const { return total; }
};

// Adds in blocks, and adds the blocks' sums with a compensation for what each addition rounds away (Knuth's two-sum):
// the error of a long sum does not grow with its length.
template <>
struct Sum<Floats> {
  static constexpr int kBlock = 64;
  Floats block{}, total{}, lost{};
  int count = 0;
  template <class Count>
  ARK_INLINE void add(Floats x, Count lanes) {
    block += only(x, Floats{}, lanes);
    if (++count == kBlock) close();
  }
  ARK_INLINE void close() {
    const Floats sum = total + block;
    const Floats part = sum - total;
    lost += (total - (sum - part)) + (block - part);
    total = sum;
    block = Floats{};
    count = 0;
  }
  ARK_INLINE Floats result() const {
    Sum whole = *this;
    whole.close();
    return splat(sum_of(whole.total) + sum_of(whole.lost_here()));
  }
  ARK_INLINE Floats each() const {
    Sum whole = *this;
    whole.close();
    return whole.total + whole.lost_here();
  }

 private:
  // The compensation is NaN if a sum is infinite; then it is ignored.
  ARK_INLINE Floats lost_here() const { return lost == lost ? lost : Floats{}; }
};

// The maximum; NaN is greater than all.
template <class Lanes>
struct Greatest;
template <>
struct Greatest<Floats> {
  Floats best = splat(-kInfinity);
  template <class Count>
  ARK_INLINE void add(Floats x, Count lanes) {
    const Floats y = only(x, splat(-kInfinity), lanes);
    best = ((y > best) | (y != y)) ? y : best;
  }
  ARK_INLINE Floats result() const {
    return splat(fold(best, [](float a, float b) { return a > b || a != a ? a : b; }));
  }
  ARK_INLINE Floats each() const { return best; }
};
template <>
struct Greatest<Ints> {
  Ints best = splat(std::numeric_limits<int64_t>::min());
  template <class Count>
  ARK_INLINE void add(Ints x, Count lanes) {
    best = maximum(best, only(x, splat(std::numeric_limits<int64_t>::min()), lanes));
  }
  ARK_INLINE Ints result() const {
    return splat(fold(best, [](int64_t a, int64_t b) { return a > b ? a : b; }));
  }
  ARK_INLINE Ints each() const { return best; }
};
template <>
struct Greatest<Mask> {  // for booleans: whether any is true
  Mask some{};
  template <class Count>
  ARK_INLINE void add(Mask x, Count lanes) {
    some |= only(x, Mask{}, lanes);
  }
  ARK_INLINE Mask result() const { return splat(any_of(some)); }
  ARK_INLINE Mask each() const { return some; }
};

// The minimum; NaN is less than all.
template <class Lanes>
struct Least {
  Greatest<Lanes> negated;
  template <class Count>
  ARK_INLINE void add(Lanes x, Count lanes) {
    if constexpr (std::is_same_v<Lanes, Floats>)
      negated.add(-x, lanes);
    else
      negated.add(~x, lanes);  // reverses the order of integers, and of booleans
  }
  ARK_INLINE Lanes result() const {
    if constexpr (std::is_same_v<Lanes, Floats>)
      return -negated.result();
    else
      return ~negated.result();
  }
  ARK_INLINE Lanes each() const {
    if constexpr (std::is_same_v<Lanes, Floats>)
      return -negated.each();
    else
      return ~negated.each();
  }
};

// The position of the maximum; of equals, the first. NaN is greater than all.
template <class Lanes>
struct WhereGreatest {
  Lanes best{};
  Ints where = splat(int64_t{-1});  // none yet
  template <class Count>
  ARK_INLINE void add(Lanes x, Ints position, Count lanes) {
    const Mask take = active(lanes) & ((gt(x, best) | narrow_mask(where < 0)) | (is_nan(x) & ~is_nan(best)));
    best = select(take, x, best);
    where = select(take, position, where);
  }
  ARK_INLINE Ints result() const {
    auto value = best[0];
    int64_t at = where[0];
    for (int i = 1; i < kLanes; ++i) {
      if (where[i] < 0) continue;
      const auto other = best[i];
      const bool nan = value != value, other_nan = other != other;
      const bool same = nan || other_nan ? nan == other_nan : value == other;
      const bool greater = nan || other_nan ? other_nan && !nan : other > value;
      if (greater || (same && where[i] < at)) {
        value = other;
        at = where[i];
      }
    }
    return splat(at);
  }

 private:
  static ARK_INLINE Mask is_nan(Floats x) { return x != x; }
  static ARK_INLINE Mask is_nan(Ints) { return Mask{}; }
};

}  // namespace ark::cpu
