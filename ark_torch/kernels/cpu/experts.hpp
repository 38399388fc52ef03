// Grouped product (mixture of experts): row p times the matrix of a table that p selects at run time.
//
// Rows are first sorted by matrix, with a counting sort that each tile repeats, as it is cheap compared with any
// product. Each selected matrix is then read once, for up to 48 of its rows at a time; other matrices are not read. An
// element's sum has product()'s order: bits depend neither on other selections nor on tiles.
#pragma once

#include "cpu/matmul.hpp"

namespace ark::cpu {

// Strides in elements. `runs`: the index holds the end of each matrix's rows.
struct Experts {
  int64_t rows, experts, depth;
  int64_t a_depth;
  int64_t table_expert, table_depth, table_column;
  int64_t out_column;
  bool runs;
};

inline constexpr int64_t kExpertRows = 48;      // of one matrix, at a time
inline constexpr int64_t kExpertColumns = 256;  // per block of results

// The rows of matrix e are `order`[first[e] .. first[e + 1]). Returns false if an index is out of range.
template <class I, class IndexAt>
inline bool order_rows(const Context& context, const Experts& s, const I* index, IndexAt index_at, int64_t* first,
                       int64_t* order) {
  if (s.runs) {
    first[0] = 0;
    for (int64_t e = 0; e < s.experts; ++e) {
      first[e + 1] = load_one(index + index_at(e));
      if (!index_fits(context, first[e + 1], s.rows + 1) || !index_fits(context, first[e], first[e + 1] + 1))
        return false;
    }
    for (int64_t p = 0; p < s.rows; ++p) order[p] = p;
    return true;
  }
  for (int64_t e = 0; e <= s.experts; ++e) first[e] = 0;
  for (int64_t p = 0; p < s.rows; ++p) {
    const int64_t e = load_one(index + index_at(p));
    if (!index_fits(context, e, s.experts)) return false;
    ++first[e + 1];
  }
  for (int64_t e = 0; e < s.experts; ++e) first[e + 1] += first[e];
  for (int64_t p = 0; p < s.rows; ++p) order[first[load_one(index + index_at(p))]++] = p;
  for (int64_t e = s.experts; e > 0; --e) first[e] = first[e - 1];
  first[0] = 0;
  return true;
}

// Columns [c0, c1) of all rows. The `*_at` functions return the offset of row p (with runs: of index entry e).
template <int64_t Rows, class A, class W, class I, class Out, class AAt, class IndexAt, class OutAt>
inline void grouped_product(const Context& context, const Experts& s, const A* a, const W* table, const I* index,
                            Out* out, AAt a_at, IndexAt index_at, OutAt out_at, int64_t c0, int64_t c1, char* scratch) {
  constexpr int64_t kMost = Rows < kExpertRows ? Rows : kExpertRows;
  auto* const first = reinterpret_cast<int64_t*>(scratch);
  auto* const order = first + s.experts + 1;
  const int64_t counted = ((s.experts + 1 + s.rows) * 8 + 63) / 64 * 64;
  float* const packed = reinterpret_cast<float*>(scratch + counted);
  const int64_t step = (s.depth + kLanes - 1) / kLanes * kLanes;
  float* const result = packed + kMost * step;
  if (!order_rows(context, s, index, index_at, first, order)) return;
  for (int64_t p = first[s.experts]; p < s.rows; ++p)  // rows after the last run
    for (int64_t c = c0; c < c1; ++c) store_one(out + out_at(p) + c * s.out_column, 0.0f);
  const Product product_of{.depth = s.depth,
                           .a_row = step,
                           .a_depth = 1,
                           .b_depth = s.table_depth,
                           .b_column = s.table_column,
                           .out_row = kExpertColumns,
                           .out_column = 1,
                           .bias_row = 0,
                           .bias_column = 0};
  for (int64_t e = 0; e < s.experts; ++e) {
    for (int64_t from = first[e]; from < first[e + 1]; from += kMost) {
      const int64_t rows = first[e + 1] - from < kMost ? first[e + 1] - from : kMost;
      for (int64_t r = 0; r < rows; ++r) {
        const A* row = a + a_at(order[from + r]);
        for_columns(0, s.depth, [&](int64_t d, auto lanes) ARK_BODY {
          const A* at = row + d * s.a_depth;
          store(packed + r * step + d, s.a_depth == 1 ? load(at, lanes) : load_strided(at, s.a_depth, lanes), lanes);
        });
      }
      for (int64_t c = c0; c < c1; c += kExpertColumns) {
        const int64_t columns = c1 - c < kExpertColumns ? c1 - c : kExpertColumns;
        product<kMost>(product_of, packed, table + e * s.table_expert + c * s.table_column, result,
                       static_cast<const NoBias*>(nullptr), 0, rows, 0, columns, nullptr);
        for (int64_t r = 0; r < rows; ++r) {
          Out* const to = out + out_at(order[from + r]) + c * s.out_column;
          for_columns(0, columns, [&](int64_t i, auto lanes) ARK_BODY {
            const Floats x = load(result + r * kExpertColumns + i, lanes);
            if (s.out_column == 1)
              store(to + i, x, lanes);
            else
              store_strided(to + i * s.out_column, s.out_column, x, lanes);
          });
        }
      }
    }
  }
}

}  // namespace ark::cpu
