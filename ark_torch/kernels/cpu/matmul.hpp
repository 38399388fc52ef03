// Matrix products of a tile: out[r, c] = sum over d of a[r, d] b[d, c] (+ bias[r, c]), accumulated in float32.
//
// There are two kernels. If b is contiguous along the depth (weights [N, K], transposed), 16 lanes are along the depth,
// a tile of accumulators is kept in registers, and lanes are added at the end. Otherwise 16 lanes are 16 columns and
// the depth is walked in blocks of kDepthBlock whose sums are added, since one long chain of additions would lose a
// digit. An element's sum has the same order in any tile: bits depend neither on the number of workers nor on the
// number of rows.
#pragma once

#include "cpu/reduce.hpp"
#include "cpu/wide.hpp"
#include "protocol/base.hpp"

namespace ark::cpu {

// With one row the product is bound by memory: b is read once, in as many streams as hardware prefetchers follow. With
// many rows a block of them stays in the second-level cache while b passes, and each loaded element of b serves
// several.

// Strides in elements.
struct Product {
  int64_t depth;
  int64_t a_row, a_depth;
  int64_t b_depth, b_column;
  int64_t out_row, out_column;
  int64_t bias_row, bias_column;
};

struct NoBias {};

#if defined(__AVX512F__)
inline constexpr int kTileRows = 6, kTileColumns = 4;  // 24 of 32 registers
#elif defined(__AVX__)
inline constexpr int kTileRows = 4, kTileColumns = 3;  // 12 of 16
#else
inline constexpr int kTileRows = 1, kTileColumns = 2;
#endif
inline constexpr int kStreams = 8;  // of b, with one row
inline constexpr int64_t kRowBlock = 8 * kTileRows;
inline constexpr int64_t kDepthBlock = 256;
inline constexpr int64_t kBytesAhead = 512;  // prefetched in a column

// Bytes of scratch memory that a product needs: a block of rows as float32.
constexpr int64_t product_scratch(int64_t rows, int64_t depth) {
  return (rows < kRowBlock ? rows : kRowBlock) * ((depth + kLanes - 1) / kLanes * kLanes) * 4;
}

template <class Out, class Bias>
ARK_INLINE void finish_one(const Product& s, Out* out, const Bias* bias, int64_t r, int64_t c, float sum) {
  if constexpr (!std::is_same_v<Bias, NoBias>) sum += load_one(bias + r * s.bias_row + c * s.bias_column);
  store_one(out + r * s.out_row + c * s.out_column, sum);
}

// With few rows memory is the limit, and hardware prefetchers stop at the end of a column: asks for the same depth of
// the next columns, or in long columns for what follows.
template <Prefetch kPrefetch, class B>
ARK_INLINE void prefetch(const B* at, int64_t to_next) {
  if constexpr (kPrefetch == Prefetch::usual) __builtin_prefetch(at + to_next, 0, 2);
  if constexpr (kPrefetch == Prefetch::ahead) __builtin_prefetch(at + kBytesAhead / sizeof(B), 0, 2);
}

// Lanes along the depth.
template <int Rows, int Columns, Prefetch kPrefetch = Prefetch::usual, class B, class Out, class Bias>
ARK_INLINE void dot_tile(const Product& s, const float* a, int64_t a_row, const B* b, Out* out, const Bias* bias,
                         int64_t r0, int64_t c0) {
  Wide total[Rows][Columns] = {};
  const B* weights = b + c0 * s.b_column;
  for_columns(0, s.depth, [&](int64_t d, auto lanes) ARK_BODY {
    Wide x[Rows];
    ARK_UNROLL for (int r = 0; r < Rows; ++r) x[r] = load_wide(a + r * a_row + d, lanes);
    ARK_UNROLL for (int c = 0; c < Columns; ++c) {
      const Wide w = load_wide(weights + c * s.b_column + d, lanes);
      if constexpr (Rows <= 4) prefetch<kPrefetch>(weights + c * s.b_column + d, Columns * s.b_column);
      ARK_UNROLL for (int r = 0; r < Rows; ++r) add_product(total[r][c], x[r], w);
    }
  });
  ARK_UNROLL for (int r = 0; r < Rows; ++r) ARK_UNROLL for (int c = 0; c < Columns; ++c)
      finish_one(s, out, bias, r0 + r, c0 + c, sum_of(narrow(total[r][c])));
}

// Lanes along the columns, `Vectors` times 16; the last vector may be partial.
template <int Rows, int Vectors, class B, class Out, class Bias, class Last>
ARK_INLINE void outer_tile(const Product& s, const float* a, int64_t a_row, const B* b, Out* out, const Bias* bias,
                           int64_t r0, int64_t c0, Last last) {
  Wide total[Rows][Vectors] = {};
  const B* weights = b + c0 * s.b_column;
  for (int64_t d0 = 0; d0 < s.depth; d0 += kDepthBlock) {
    const int64_t d1 = s.depth - d0 > kDepthBlock ? d0 + kDepthBlock : s.depth;
    Wide sum[Rows][Vectors] = {};
    for (int64_t d = d0; d < d1; ++d) {
      Wide w[Vectors];
      ARK_UNROLL for (int v = 0; v < Vectors; ++v) {
        const B* at = weights + d * s.b_depth + v * kLanes * s.b_column;
        if (s.b_column == 1)
          w[v] = v == Vectors - 1 ? load_wide(at, last) : load_wide(at, All{});
        else
          w[v] = wide(v == Vectors - 1 ? load_strided(at, s.b_column, last) : load_strided(at, s.b_column, All{}));
      }
      ARK_UNROLL for (int r = 0; r < Rows; ++r) {
        const Wide x = wide_of(a[r * a_row + d]);
        ARK_UNROLL for (int v = 0; v < Vectors; ++v) add_product(sum[r][v], x, w[v]);
      }
    }
    ARK_UNROLL for (int r = 0; r < Rows; ++r) ARK_UNROLL for (int v = 0; v < Vectors; ++v) add(total[r][v], sum[r][v]);
  }
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vectors; ++v)
      for (int lane = 0; lane < (v == Vectors - 1 ? count_of(last) : kLanes); ++lane)
        finish_one(s, out, bias, r0 + r, c0 + v * kLanes + lane, narrow(total[r][v])[lane]);
}

// Lanes along contiguous columns, few rows: rows of b are read in long runs, four at a time, and sums stay in the
// first-level cache. An element's sum has the same order as in outer_tile.
template <int Rows, Prefetch kPrefetch, class B, class Out, class Bias>
ARK_INLINE void outer_runs(const Product& s, const float* a, int64_t a_row, const B* b, Out* out, const Bias* bias,
                           int64_t r0, int64_t c0, int64_t c1) {
  constexpr int64_t kRun = 1024;
  alignas(64) float total[Rows][kRun], part[Rows][kRun];
  auto add = [&]<int Depth>(std::integral_constant<int, Depth>, int64_t d, int64_t from, int64_t columns) ARK_BODY {
    const B* weights = b + d * s.b_depth + from;
    Floats x[Rows][Depth];
    ARK_UNROLL for (int r = 0; r < Rows; ++r) ARK_UNROLL for (int i = 0; i < Depth; ++i) x[r][i] =
        splat(a[r * a_row + d + i]);
    for_columns(0, columns, [&](int64_t c, auto lanes) ARK_BODY {
      Floats w[Depth];
      ARK_UNROLL for (int i = 0; i < Depth; ++i) {
        w[i] = load(weights + i * s.b_depth + c, lanes);
        prefetch<kPrefetch>(weights + i * s.b_depth + c, Depth * s.b_depth);
      }
      ARK_UNROLL for (int r = 0; r < Rows; ++r) {
        Floats sum = load(&part[r][c], All{});
        ARK_UNROLL for (int i = 0; i < Depth; ++i) sum += x[r][i] * w[i];
        store(&part[r][c], sum, All{});
      }
    });
  };
  for (int64_t from = c0; from < c1; from += kRun) {
    const int64_t columns = c1 - from < kRun ? c1 - from : kRun;
    for (int64_t d0 = 0; d0 < s.depth; d0 += kDepthBlock) {
      const int64_t d1 = s.depth - d0 > kDepthBlock ? d0 + kDepthBlock : s.depth;
      std::memset(part, 0, sizeof(part));
      int64_t d = d0;
      for (; d + 4 <= d1; d += 4) add(std::integral_constant<int, 4>{}, d, from, columns);
      for (; d < d1; ++d) add(std::integral_constant<int, 1>{}, d, from, columns);
      for (int r = 0; r < Rows; ++r)
        for (int64_t c = 0; c < columns; c += kLanes) {
          const Floats sum = load(&part[r][c], All{});
          store(&total[r][c], d0 == 0 ? sum : load(&total[r][c], All{}) + sum, All{});
        }
    }
    for (int r = 0; r < Rows; ++r)
      for (int64_t c = 0; c < columns; ++c) finish_one(s, out, bias, r0 + r, from + c, total[r][c]);
  }
}

// All columns for a tile's rows, one tile after the other.
template <int Rows, bool kRuns, Prefetch kPrefetch, class B, class Out, class Bias>
inline void row_group(const Product& s, const float* a, int64_t a_row, const B* b, Out* out, const Bias* bias,
                      int64_t r0, int64_t c0, int64_t c1) {
  constexpr int kColumns = Rows == 1 ? kStreams : kTileColumns;
  int64_t c = c0;
  if (s.b_depth == 1) {
    for (; c + kColumns <= c1; c += kColumns) dot_tile<Rows, kColumns, kPrefetch>(s, a, a_row, b, out, bias, r0, c);
    for (; c < c1; ++c) dot_tile<Rows, 1, kPrefetch>(s, a, a_row, b, out, bias, r0, c);
  } else if (kRuns && s.b_column == 1) {
    outer_runs<Rows, kPrefetch>(s, a, a_row, b, out, bias, r0, c0, c1);
  } else {
    for (; c + kColumns * kLanes <= c1; c += kColumns * kLanes)
      outer_tile<Rows, kColumns>(s, a, a_row, b, out, bias, r0, c, All{});
    for (; c + kLanes <= c1; c += kLanes) outer_tile<Rows, 1>(s, a, a_row, b, out, bias, r0, c, All{});
    if (c < c1) outer_tile<Rows, 1>(s, a, a_row, b, out, bias, r0, c, First{static_cast<int>(c1 - c)});
  }
}

// Rows [r0, r1) and columns [c0, c1). MostRows bounds r1 - r0, and no code is generated for more. `scratch` has
// product_scratch bytes.
template <int64_t MostRows, Prefetch kPrefetch = Prefetch::usual, class A, class B, class Out, class Bias>
ARK_INLINE void product(const Product& s, const A* a, const B* b, Out* out, const Bias* bias, int64_t r0, int64_t r1,
                        int64_t c0, int64_t c1, char* scratch) {
  // The columns of b that pass a block of rows together, so that they stay in the first-level cache. With few rows,
  // rows of b are read in runs as long as possible.
  constexpr bool kFew = MostRows <= 4;
  const int64_t pass = MostRows == 1 || (kFew && s.b_depth != 1) ? int64_t{1} << 62
                       : s.b_depth == 1                          ? kTileColumns
                                                                 : kTileColumns * kLanes;
  for (int64_t block = r0; block < r1; block += kRowBlock) {
    const int64_t block_end = block + kRowBlock < r1 ? block + kRowBlock : r1;
    const float* rows = nullptr;
    int64_t step = 0;
    if (std::is_same_v<A, float> && s.a_depth == 1) {
      rows = reinterpret_cast<const float*>(a + block * s.a_row);
      step = s.a_row;
    } else {
      float* packed = reinterpret_cast<float*>(scratch);
      step = (s.depth + kLanes - 1) / kLanes * kLanes;
      for (int64_t r = block; r < block_end; ++r)
        for_columns(0, s.depth, [&](int64_t d, auto lanes) ARK_BODY {
          const A* from = a + r * s.a_row + d * s.a_depth;
          store(packed + (r - block) * step + d,
                s.a_depth == 1 ? load(from, lanes) : load_strided(from, s.a_depth, lanes), lanes);
        });
      rows = packed;
    }
    for (int64_t c = c0; c < c1; c += pass) {
      const int64_t c_end = c1 - c > pass ? c + pass : c1;
      int64_t r = block;
      if constexpr (MostRows >= kTileRows && kTileRows > 1)
        for (; r + kTileRows <= block_end; r += kTileRows)
          row_group<kTileRows, kFew, kPrefetch>(s, rows + (r - block) * step, step, b, out, bias, r, c, c_end);
      if constexpr (MostRows >= 4 && kTileRows > 4)
        for (; r + 4 <= block_end; r += 4)
          row_group<4, kFew, kPrefetch>(s, rows + (r - block) * step, step, b, out, bias, r, c, c_end);
      if constexpr (MostRows == 3 && kTileRows > 3)
        for (; r + 3 <= block_end; r += 3)
          row_group<3, kFew, kPrefetch>(s, rows + (r - block) * step, step, b, out, bias, r, c, c_end);
      if constexpr (MostRows >= 2 && kTileRows > 2)
        for (; r + 2 <= block_end; r += 2)
          row_group<2, kFew, kPrefetch>(s, rows + (r - block) * step, step, b, out, bias, r, c, c_end);
      for (; r < block_end; ++r)
        row_group<1, kFew, kPrefetch>(s, rows + (r - block) * step, step, b, out, bias, r, c, c_end);
    }
  }
}

}  // namespace ark::cpu
