// Reductions of a row by a Group (group.cuh): each thread has a running result, and they are combined at the end in a
// fixed order.
//
// A column's thread depends only on its position and the Group, and one Group of one task reduces a row, so bits do not
// depend on tiles or SMs. Usage: each thread calls add() for its columns, then all threads of the Group, converged,
// call result(), which returns the same to all.
#pragma once

#include "cuda/loop/group.cuh"
#include "cuda/loop/ops.cuh"
#include "cuda/loop/pieces.cuh"
#include "cuda/loop/runs.cuh"

namespace ark::loop {

// NaN if either is NaN. +0 is greater than -0, so the order of the operands does not affect any bit.
ARK_LOOP float greater_of(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
ARK_LOOP float less_of(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

template <class V, class Group>
struct Sum;

// A thread adds in blocks, and adds the blocks' sums with a compensation for what each addition rounds away (Knuth's
// two-sum): the error of a long sum does not grow with its length.
template <class Group>
struct Sum<Floats, Group> {
  static constexpr int kBlock = 64;
  float block = 0, total = 0, lost = 0;
  int count = 0;
  ARK_LOOP void add(float x) {
    block += x;
    if (++count == kBlock) close();
  }
  ARK_LOOP void close() {
    const float sum = total + block, part = sum - total;
    lost += (total - (sum - part)) + (block - part);
    total = sum;
    block = 0;
    count = 0;
  }
  ARK_LOOP float result() const {
    Sum whole = *this;
    whole.close();
    // The compensation is NaN if a sum is infinite; then it is ignored.
    const float sum = whole.lost == whole.lost ? whole.total + whole.lost : whole.total;
    return Group::all(sum, [](float a, float b) { return a + b; });
  }
};
template <class Group>
struct Sum<Ints, Group> {
  Ints total = 0;
  ARK_LOOP void add(Ints x) { total = loop::add(total, x); }
  ARK_LOOP Ints result() const {
    return Group::all(total, [](Ints a, Ints b) { return loop::add(a, b); });
  }
};

// The maximum; NaN is greater than all. For booleans: whether any is true.
template <class V, class Group>
struct Greatest;
template <class Group>
struct Greatest<Floats, Group> {
  float best = -kInfinity;
  ARK_LOOP void add(float x) { best = greater_of(best, x); }
  ARK_LOOP float result() const {
    return Group::all(best, [](float a, float b) { return greater_of(a, b); });
  }
};
template <class Group>
struct Greatest<Ints, Group> {
  Ints best = kLeastInt;
  ARK_LOOP void add(Ints x) { best = maximum(best, x); }
  ARK_LOOP Ints result() const {
    return Group::all(best, [](Ints a, Ints b) { return maximum(a, b); });
  }
};
template <class Group>
struct Greatest<Mask, Group> {
  Mask some = false;
  ARK_LOOP void add(Mask x) { some = some || x; }
  ARK_LOOP Mask result() const {
    return Group::all(some, [](Mask a, Mask b) { return a || b; });
  }
};

// The minimum; NaN is less than all. For booleans: whether all are true.
template <class V, class Group>
struct Least;
template <class Group>
struct Least<Floats, Group> {
  float best = kInfinity;
  ARK_LOOP void add(float x) { best = less_of(best, x); }
  ARK_LOOP float result() const {
    return Group::all(best, [](float a, float b) { return less_of(a, b); });
  }
};
template <class Group>
struct Least<Ints, Group> {
  Ints best = kGreatestInt;
  ARK_LOOP void add(Ints x) { best = minimum(best, x); }
  ARK_LOOP Ints result() const {
    return Group::all(best, [](Ints a, Ints b) { return minimum(a, b); });
  }
};
template <class Group>
struct Least<Mask, Group> {
  Mask all = true;
  ARK_LOOP void add(Mask x) { all = all && x; }
  ARK_LOOP Mask result() const {
    return Group::all(all, [](Mask a, Mask b) { return a && b; });
  }
};

// A number and its position in the row; -1: none yet.
template <class V>
struct Placed {
  V value;
  int64_t at;
};
template <class V>
ARK_LOOP Placed<V> shuffle_xor(Placed<V> x, int mask) {
  return {shuffle_xor(x.value, mask), shuffle_xor(x.at, mask)};
}

// The position of the maximum; of equals, the first. NaN is greater than all. A thread's positions must increase.
template <class V, class Group>
struct WhereGreatest {
  Placed<V> best = {V{}, -1};
  ARK_LOOP void add(V x, int64_t position) {
    if (best.at < 0 || x > best.value || (x != x && best.value == best.value)) best = {x, position};
  }
  ARK_LOOP Ints result() const {
    return Group::all(best, [](Placed<V> a, Placed<V> b) { return before(a, b) ? a : b; }).at;
  }

 private:
  static ARK_LOOP bool before(const Placed<V>& a, const Placed<V>& b) {
    if (a.at < 0 || b.at < 0) return a.at >= 0;
    const bool nan = a.value != a.value, other_nan = b.value != b.value;
    if (nan != other_nan) return nan;
    if (!nan && a.value != b.value) return a.value > b.value;
    return a.at < b.at;
  }
};

}  // namespace ark::loop
