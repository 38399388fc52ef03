// Pools embedding rows on the CPU, forward and backward, one bag or one gradient row at a time.
//
// All sums are in float32 (float64 for float64), in index order, and rounded once, as in the GPU's kernels. A weight's
// product is rounded before it is added, and a mean is the sum divided by the bag's length.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

namespace ark::ops {

template <class T>
using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;

// NaNs become the positive quiet NaN, as everywhere in this library.
template <class T>
T rounded(Sum<T> value) {
  return value != value ? static_cast<T>(std::numeric_limits<Sum<T>>::quiet_NaN()) : static_cast<T>(value);
}

// One table's bags for a whole batch.
template <class T, class I>
struct Bags {
  const T* rows;
  const I* indices;
  const I* offsets;
  const T* weights;  // null: all 1
  int64_t dim, entries, bags;
  bool mean, last_offset;

  int64_t begin(int64_t bag) const { return offsets[bag]; }
  int64_t end(int64_t bag) const { return bag + 1 == bags && !last_offset ? entries : int64_t{offsets[bag + 1]}; }
};

// out: dim elements; sums: scratch of the same size.
template <class T, class I>
void pool(const Bags<T, I>& table, int64_t bag, T* out, Sum<T>* sums) {
  const int64_t dim = table.dim, from = table.begin(bag), to = table.end(bag);
  for (int64_t c = 0; c < dim; ++c) sums[c] = 0;
  for (int64_t i = from; i < to; ++i) {
    const T* const row = table.rows + int64_t{table.indices[i]} * dim;
    if (table.weights != nullptr) {
      const Sum<T> weight = table.weights[i];
      for (int64_t c = 0; c < dim; ++c) sums[c] += static_cast<Sum<T>>(row[c]) * weight;
    } else {
      for (int64_t c = 0; c < dim; ++c) sums[c] += static_cast<Sum<T>>(row[c]);
    }
  }
  if (table.mean && to > from) {
    const Sum<T> count = static_cast<Sum<T>>(to - from);
    for (int64_t c = 0; c < dim; ++c) sums[c] /= count;
  }
  for (int64_t c = 0; c < dim; ++c) out[c] = rounded<T>(sums[c]);
}

// Adds index i's contribution to its row's gradient. `gradient` and `length` are those of its bag.
template <class T, class I>
void add_gradient(const Bags<T, I>& table, int64_t i, int64_t length, const T* gradient, Sum<T>* sums) {
  const int64_t dim = table.dim;
  if (table.mean) {
    const Sum<T> count = static_cast<Sum<T>>(length);
    for (int64_t c = 0; c < dim; ++c) sums[c] += static_cast<Sum<T>>(gradient[c]) / count;
  } else if (table.weights != nullptr) {
    const Sum<T> weight = table.weights[i];
    for (int64_t c = 0; c < dim; ++c) sums[c] += static_cast<Sum<T>>(gradient[c]) * weight;
  } else {
    for (int64_t c = 0; c < dim; ++c) sums[c] += static_cast<Sum<T>>(gradient[c]);
  }
}

// A row's entries, in index order, are added in parts of kRowPart, and the parts' sums in order. So a GPU may split a
// row that very many bags use among threads.
inline constexpr int64_t kRowPart = 64;

// The mean of a row's squares: pairwise within blocks of 32 columns, then the blocks in order.
template <class F>
F mean_of_squares(const F* gradient, int64_t dim) {
  F total = 0;
  for (int64_t block = 0; block < dim; block += 32) {
    F squares[32];
    for (int64_t i = 0; i < 32; ++i) squares[i] = block + i < dim ? gradient[block + i] * gradient[block + i] : F{0};
    for (int width = 16; width > 0; width /= 2)
      for (int i = 0; i < width; ++i) squares[i] = squares[2 * i] + squares[2 * i + 1];
    total += squares[0];
  }
  return total / static_cast<F>(dim);
}

// The gradient of one weight.
template <class T, class I>
T weight_gradient(const Bags<T, I>& table, int64_t i, const T* gradient) {
  const T* const row = table.rows + int64_t{table.indices[i]} * table.dim;
  Sum<T> sum = 0;
  for (int64_t c = 0; c < table.dim; ++c) sum += static_cast<Sum<T>>(row[c]) * static_cast<Sum<T>>(gradient[c]);
  return rounded<T>(sum);
}

}  // namespace ark::ops
