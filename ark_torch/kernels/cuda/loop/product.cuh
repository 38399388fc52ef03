// What kernels of matrix products share: a product's shape, its rows' positions, and how an element is finished.
#pragma once

#include "cuda/loop/ptx.cuh"
#include "cuda/loop/task.cuh"
#include "protocol/codes.hpp"

namespace ark::loop {

using ark::NoScale;

// Strides in elements. Rows, columns and depths are counted in int.
struct Product {
  int64_t depth;
  int64_t a_row, a_depth;
  int64_t b_depth, b_column;
  int64_t out_row, out_column;
  int64_t bias_row, bias_column;
  // Whether rows of a and columns of b, along whichever dimension is contiguous, start at multiples of 16 bytes.
  bool a_aligned, b_aligned;
  Cache b_cache = Cache::normal;  // of loads by kernels of few rows
  bool tf32 = false;              // whether kernels of many rows multiply float32 on tensor cores, in TF32
};

struct NoBias {};

// In place of a bias: a bias, and the epilogue applied to each sum with it before it is stored.
template <class Bias, class Finish>
struct Finished {
  const Bias* bias;
  Finish finish;
};
template <class Bias, class Finish>
ARK_LOOP Finished<Bias, Finish> finished_by(const Bias* bias, Finish finish) {
  return {bias, finish};
}

// In place of a bias: the biases of both products of a dual one, and the epilogue applied to both sums of an element.
template <class Bias, class Finish>
struct Dual {
  const Bias *first, *second;
  Finish finish;
};
template <class Bias, class Finish>
ARK_LOOP Dual<Bias, Finish> dual_by(const Bias* first, const Bias* second, Finish finish) {
  return {first, second, finish};
}

// In place of a bias: a bias, and scales of rows (NoScale: none) and columns, by which each sum is multiplied before it
// is added.
template <int kRowStride, int kColumnStride, class RowScale, class ColumnScale, class Bias>
struct Scaled {
  const RowScale* rows;
  const ColumnScale* columns;
  const Bias* bias;
  ARK_LOOP float of_row(int r) const {
    if constexpr (kSame<RowScale, NoScale>)
      return 1;
    else
      return load_one(rows + r * kRowStride);
  }
  ARK_LOOP float of_column(int c) const { return load_one(columns + c * static_cast<int64_t>(kColumnStride)); }
};
template <int kRowStride, int kColumnStride, class RowScale, class ColumnScale, class Bias>
ARK_LOOP Scaled<kRowStride, kColumnStride, RowScale, ColumnScale, Bias> scaled_by(const RowScale* rows,
                                                                                  const ColumnScale* columns,
                                                                                  const Bias* bias) {
  return {rows, columns, bias};
}

// The positions of row r of a and of the result, in elements.
struct EvenRows {
  static constexpr bool kEven = true;
  int64_t a_row, out_row;
  ARK_LOOP int64_t a(int r) const { return r * a_row; }
  // Of a segment's b, see matvec.cuh.
  ARK_LOOP int64_t b(int) const { return 0; }
  ARK_LOOP int64_t out(int r) const { return r * out_row; }
};

template <class T>
inline constexpr bool kIsHalf = sizeof(T) == 2;

ARK_LOOP constexpr int64_t in_wholes(int64_t count, int64_t whole) {
  return (count + whole - 1) / whole;
}

ARK_LOOP bool is_aligned(const void* at, int bytes) {
  return reinterpret_cast<uint64>(at) % bytes == 0;
}

template <class Bias>
inline constexpr bool kHasBias = !kSame<Bias, NoBias>;
template <class Bias, class Finish>
inline constexpr bool kHasBias<Finished<Bias, Finish>> = kHasBias<Bias>;
template <int kRow, int kColumn, class A, class B, class Bias>
inline constexpr bool kHasBias<Scaled<kRow, kColumn, A, B, Bias>> = kHasBias<Bias>;

template <class Bias, class Finish>
inline constexpr bool kHasBias<Dual<Bias, Finish>> = kHasBias<Bias>;

template <class Bias>
inline constexpr bool kDual = false;
template <class Bias, class Finish>
inline constexpr bool kDual<Dual<Bias, Finish>> = true;

template <class Bias>
inline constexpr bool kScaled = false;
template <class Bias, class Finish>
inline constexpr bool kScaled<Finished<Bias, Finish>> = kScaled<Bias>;
template <int kRow, int kColumn, class A, class B, class Bias>
inline constexpr bool kScaled<Scaled<kRow, kColumn, A, B, Bias>> = true;

// The bias added to an element's sum.
template <class Bias>
ARK_LOOP float bias_of(const Product& s, const Bias* bias, int64_t r, int64_t c) {
  if constexpr (kSame<Bias, NoBias>)
    return 0;
  else
    return load_one(bias + r * s.bias_row + c * s.bias_column);
}
template <class Bias, class Finish>
ARK_LOOP float bias_of(const Product& s, const Finished<Bias, Finish>* by, int64_t r, int64_t c) {
  return bias_of(s, by->bias, r, c);
}
template <int kRow, int kColumn, class A, class B, class Bias>
ARK_LOOP float bias_of(const Product& s, const Scaled<kRow, kColumn, A, B, Bias>* by, int64_t r, int64_t c) {
  return bias_of(s, by->bias, r, c);
}

template <class Bias>
ARK_LOOP float finished(const Bias*, float sum, float bias) {
  return kSame<Bias, NoBias> ? sum : sum + bias;
}
template <int kRow, int kColumn, class A, class B, class Bias>
ARK_LOOP float finished(const Scaled<kRow, kColumn, A, B, Bias>* by, float sum, float bias) {
  return finished(by->bias, sum, bias);
}
template <class Bias, class Finish>
ARK_LOOP float finished(const Finished<Bias, Finish>* by, float sum, float bias) {
  return by->finish(finished(by->bias, sum, bias));
}

// The bias of the first or the second product of a dual one; else the only one.
template <class Bias>
ARK_LOOP const Bias* nth_bias(const Bias* bias, int) {
  return bias;
}
template <class Bias, class Finish>
ARK_LOOP const Bias* nth_bias(const Dual<Bias, Finish>* by, int n) {
  return n == 0 ? by->first : by->second;
}
// An element of a dual product.
template <class Bias, class Finish>
ARK_LOOP float finished_dual(const Product& s, const Dual<Bias, Finish>* by, int r, int c, float first, float second) {
  return by->finish(finished(by->first, first, bias_of(s, by->first, r, c)),
                    finished(by->second, second, bias_of(s, by->second, r, c)));
}

template <class Out, class Bias>
ARK_LOOP void finish_one(const Product& s, Out* row, const Bias* bias, int r, int c, float sum) {
  store_one(row + c * s.out_column, finished(bias, sum, bias_of(s, bias, r, c)));
}

// Columns c and c + 1. `paired`: they may be stored as one.
template <class Out>
ARK_LOOP void store_pair(const Product& s, Out* row, int c, int c1, float x, float y, bool paired) {
  if (paired && c + 1 < c1) {
    *reinterpret_cast<Together<Out, 2>*>(row + c) = {narrow(x, Out{}), narrow(y, Out{})};
    return;
  }
  if (c < c1) store_one(row + c * s.out_column, x);
  if (c + 1 < c1) store_one(row + (c + 1) * s.out_column, y);
}
template <class Out, class Bias>
ARK_LOOP void finish_pair(const Product& s, Out* row, const Bias* bias, int r, int c, int c1, float x, float y,
                          bool paired) {
  if (c < c1) x = finished(bias, x, bias_of(s, bias, r, c));
  if (c + 1 < c1) y = finished(bias, y, bias_of(s, bias, r, c + 1));
  store_pair(s, row, c, c1, x, y, paired);
}
template <class Out, class By>
ARK_LOOP void finish_dual_pair(const Product& s, Out* row, const By* by, int r, int c, int c1, const float* first,
                               const float* second, bool paired) {
  float done[2] = {};
  ARK_UNROLL for (int e = 0; e < 2; ++e) if (c + e < c1) done[e] = finished_dual(s, by, r, c + e, first[e], second[e]);
  store_pair(s, row, c, c1, done[0], done[1], paired);
}

// The scales of a thread's two rows, r and r + 8, and, spread over a warp's lanes, of its columns: each lane holds
// those of columns c and c + 1.
template <bool kAny>
struct RowAndColumnScales {
  template <class Bias>
  ARK_LOOP RowAndColumnScales(const Bias*, int, int, int, int, bool) {}
  ARK_LOOP float applied(float sum, int, int, int) const { return sum; }
};
template <>
struct RowAndColumnScales<true> {
  float of_rows[2], of_columns[2];

  template <class Bias>
  ARK_LOOP RowAndColumnScales(const Bias* by, int r, int r1, int c, int c1, bool holds) {
    const auto* const scales = scales_of(by);
    ARK_UNROLL for (int i = 0; i < 2; ++i) {
      of_rows[i] = r + i * 8 < r1 ? scales->of_row(r + i * 8) : 0;
      of_columns[i] = holds && c + i < c1 ? scales->of_column(c + i) : 0;
    }
  }
  template <int kRow, int kColumn, class A, class B, class Bias>
  static ARK_LOOP const auto* scales_of(const Scaled<kRow, kColumn, A, B, Bias>* by) {
    return by;
  }
  template <class Bias, class Finish>
  static ARK_LOOP const auto* scales_of(const Finished<Bias, Finish>* by) {
    return scales_of(by->bias);
  }
  // `lane` holds the column, as the first or second of its two.
  ARK_LOOP float applied(float sum, int row, int column, int lane) const {
    return sum * shuffle_from<32>(of_columns[column], lane) * of_rows[row];
  }
};

}  // namespace ark::loop
