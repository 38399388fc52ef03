// Products of few rows: how the depth is split over a block's threads, and how their partial sums are combined.
//
// Both depend only on the product's depth and types, never on the tile: an element's sum has one order.
#pragma once

#include "cuda/loop/product.cuh"

namespace ark::loop {

// One warp keeps a slice of the depth of a. Warps take `slices` of them at once, `passes` times. The remaining warps
// form further groups, `groups` in all, each with columns of its own.
struct DepthSplit {
  int slices, passes, groups;
};
ARK_LOOP constexpr DepthSplit split_k(int64_t depth, int slice) {
  const int64_t count = depth > 0 ? in_wholes(depth, slice) : 1;
  const int64_t passes = in_wholes(count, kWarps);
  const int64_t slices = in_wholes(count, passes);
  return {static_cast<int>(slices), static_cast<int>(passes), static_cast<int>(kWarps / slices)};
}

// Adds up kCount values over the lanes whose numbers differ in bits kFrom .. kTo. These bits of a lane, from the
// highest down, select the value whose sum it gets; with fewer values than lanes, several lanes get the same one.
template <int kFrom, int kTo, int kCount>
ARK_LOOP float fold_lanes(const float (&values)[kCount]) {
  if constexpr (kCount == 1) {
    float sum = values[0];
    ARK_UNROLL for (int mask = kFrom; mask >= kTo; mask /= 2) sum += shuffle_xor(sum, mask);
    return sum;
  } else {
    constexpr int kHalf = kCount / 2;
    const bool upper = (lane() & kFrom) != 0;
    float kept[kHalf];
    ARK_UNROLL for (int i = 0; i < kHalf; ++i) {
      const float mine = upper ? values[i + kHalf] : values[i], other = upper ? values[i] : values[i + kHalf];
      kept[i] = mine + shuffle_xor(other, kFrom);
    }
    return fold_lanes<kFrom / 2, kTo>(kept);
  }
}

// kCount elements of a row of a from depth d (a multiple of kCount), as float32; zeros if not wanted or after the end.
template <int kCount, class A>
ARK_LOOP void load_run(const Product& s, const A* row, int d, bool wanted, float (&to)[kCount]) {
  constexpr int kEach = kPerChunk<A>;
  const A* const from = row + d * s.a_depth;
  if (kCount % kEach == 0 && s.a_depth == 1 && s.a_aligned && (s.depth % kCount == 0 || d + kCount <= s.depth)) {
    ARK_UNROLL for (int i = 0; i < kCount / kEach; ++i) {
      Chunk chunk{};
      if (wanted) chunk = *reinterpret_cast<const Chunk*>(from + i * kEach);
      ARK_UNROLL for (int j = 0; j < kEach; ++j) to[i * kEach + j] = chunk_element<A>(chunk, j);
    }
  } else {
    ARK_UNROLL for (int i = 0; i < kCount; ++i) to[i] =
        wanted && d + i < s.depth ? load_one(from + i * s.a_depth) : 0.0f;
  }
}

// Sums of slices in shared memory: `lines` (each row of each segment) times columns. Lines are offset by 8 words, since
// four of them are written at once.
struct Parts {
  float* data;
  int line_words, width;
  ARK_LOOP Parts(int slices, int width)
      : data(reinterpret_cast<float*>(workspace())), line_words(slices * width + 8), width(width) {}
  ARK_LOOP float* at(int line, int slice, int column) const {
    return data + line * line_words + slice * width + column;
  }
  // A copy from which the compiler cannot precompute anything. The code that adds up slices needs their addresses,
  // while the code that makes them needs all registers.
  ARK_LOOP Parts anew() const {
    Parts same = *this;
    asm volatile("" : "+r"(same.line_words), "+r"(same.width));
    return same;
  }
};

// Adds a tensor core's sums of 16 rows x 8 columns to a slice from `column` on, or stores them if `first`.
template <int Rows>
ARK_LOOP void add_octet(const Parts& parts, int lane, int slice, int column, bool first, const float (&sums)[4]) {
  ARK_UNROLL for (int half = 0; half < 2; ++half) {
    struct alignas(8) Pair {
      float x, y;
    };
    const int row = half * 8 + lane / 4;
    auto* const to = reinterpret_cast<Pair*>(parts.at(row, slice, column + lane % 4 * 2));
    Pair sum{sums[half * 2], sums[half * 2 + 1]};
    if (!first && row < Rows) sum = {to->x + sum.x, to->y + sum.y};
    if (row < Rows) *to = sum;
  }
}

// Columns [c0, c1) of one b.
template <class B>
struct OneRun {
  using Element = B;
  static constexpr bool kOne = true;
  const B* b;
  int64_t stride;
  int c1;
  ARK_LOOP const B* from(int c) const { return b + c * stride; }
  ARK_LOOP int left(int c) const { return c1 - c; }
};

// Columns [c0, c1) of `segments` products of `Rows` rows each, of which `rows` are used. `add` computes sums of slices
// for whole batches of columns: of kMost columns, or if that is 0 of as many as the workspace has room for. They are
// combined here, and `finish` gets each sum with its line and column.
template <int Rows, int kMost = 0, class Add, class Finish>
ARK_LOOP void in_slices(int rows, int segments, int c0, int c1, int slices, int batch_columns, Add add, Finish finish) {
  constexpr int kWords = kWorkspaceBytes / 4;
  const int most = kMost > 0 ? kMost : (kWords / Rows - 8) / slices / batch_columns * batch_columns;
  for (int c = c0; c < c1; c += most) {
    const int columns = least(c1 - c, most), batches = (columns + batch_columns - 1) / batch_columns;
    const Parts parts(slices, batches * batch_columns);
    const int most_segments = segments == 1 ? 1 : kWords / (Rows * parts.line_words);
    for (int first = 0; first < segments; first += most_segments) {
      const int count = least(segments - first, most_segments);
      sync();
      add(first, count, c, batches, parts);
      sync();
      const Parts made = parts.anew();
      for (int i = thread_anew(); i < count * Rows * columns; i += kThreads) {
        const int line = Rows == 1 && count == 1 ? 0 : i / columns;  // single rows need no division
        const int column = i - line * columns;
        if (line % Rows >= rows) continue;
        float sum = *made.at(line, 0, column);
        ARK_UNROLL for (int slice = 1; slice < slices; ++slice) sum += *made.at(line, slice, column);
        finish(first * Rows + line, c + column, sum);
      }
    }
  }
}

}  // namespace ark::loop
