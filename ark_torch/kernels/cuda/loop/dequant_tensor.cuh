// Up to 16 rows of halves times columns of codes, on tensor cores: codes stream, and are decoded between a load and its
// multiplications.
//
// As matvec_tensor.cuh: a warp keeps 16 rows x 128 of the depth of a in registers and lets columns pass. Four lanes
// load of a column 64 codes of 8 bits, or 128 of 4 bits, in order. 128 of the depth lie in one group, so that its scale
// is multiplied into their sum: weights themselves are exact whole numbers, or float8. A group's zero is multiplied by
// the sum of the rows, which tensor cores add up, too, once for all columns.
#pragma once

#include "cuda/loop/coded_columns.cuh"
#include "cuda/loop/decode.cuh"
#include "cuda/loop/matvec_tensor.cuh"

namespace ark::loop {

inline constexpr int kDequantSlice = 128;  // of depth, a warp's
// Of columns, a warp's: as many loads under way as registers allow beside the rows.
template <int Rows>
inline constexpr int kDequantOctets = Rows > 8 ? 2 : 4;

// Whether sums of columns are complete before anything is multiplied into them.
template <Product s, Codes q, class Zero>
inline constexpr bool kScaledLast = q.group == s.depth&& kSame<Zero, NoScale>;
// What this kernel takes: whole chunks of codes, and groups of whole slices.
template <Product s, Codes q>
inline constexpr bool kDequantsByTensor = s.b_aligned&& s.b_depth == 1 && s.depth* q.bits % 128 == 0 &&
                                          (q.group == s.depth || q.group % kDequantSlice == 0);

// As tensor_parts of matvec_tensor.cuh.
template <int Rows, Product kShape, Codes q, class AAt, class Columns>
ARK_LOOP void dequant_parts(AAt a, const Columns& columns, int r0, int rows, int c, int batches, Parts parts) {
  constexpr Product s = kShape;
  using T = typename Pointee<AAt>::Type;
  using B = typename Columns::Element;
  using Zero = typename Columns::ZeroElement;
  using Words = Coding<q, B, T>;
  constexpr int kOctets = kDequantOctets<Rows>, kTogether = kOctets * 8;
  constexpr int kChunks = kDequantSlice * q.bits / 8 / 64;  // of codes, a lane's of a column
  constexpr int kPerLoad = 128 / q.bits;                    // codes in a chunk
  constexpr bool kScaled = !kScaledLast<s, q, Zero>, kZeros = !kSame<Zero, NoScale>;
  constexpr DepthSplit split = split_k(s.depth, kDequantSlice);
  constexpr int kStep = split.slices * kDequantSlice;
  constexpr bool kWhole = split.passes * kStep == s.depth;
  const int self = thread_anew(), lane = self % 32;  // such that nothing of it is kept from run to run
  const int slice = self / 32 % split.slices, group = self / 32 / split.slices;
  if (group >= split.groups) return;
  const ChunkLoads<s.b_cache> loads;
  const int my_line = lane / 4;  // row of a, column of b
  const int my_depth = slice * kDequantSlice + lane % 4 * kPerLoad;

  // The next batch of columns to be loaded.
  struct {
    int batch = 0, pass = 0, left, d, column;
    const B* from;
  } next;
  Chunk ring[kOctets][kChunks] = {};
  static_assert(kTogether <= 32);
  float scale_of_lane = 0, zero_of_lane = 0;  // of a column for each lane
  auto place = [&] {
    next.column = c + (next.batch * split.groups + group) * kTogether;
    next.d = my_depth + next.pass * kStep;
    next.left = next.pass < split.passes ? columns.left(next.column) : 0;
    next.from = columns.from(next.column + my_line) + next.d * q.bits / 8;
  };
  auto load = [&](int octet, int chunk) {
    const int d = chunk * 4 * kPerLoad;
    const bool there = kWhole || next.d + d < s.depth;
    if (!there) ring[octet][chunk] = {};
    loads.load(ring[octet][chunk], next.from + octet * 8 * s.b_column + d * q.bits / 8,
               octet * 8 + my_line < next.left && there);
  };
  auto load_scales = [&] {
    const int of = (next.d - lane % 4 * kPerLoad) / q.group;
    if (lane >= least(next.left, kTogether) || (!kWhole && of * q.group >= s.depth)) return;
    scale_of_lane = columns.scale(of, next.column + lane);
    if constexpr (kZeros) zero_of_lane = columns.zero(of, next.column + lane);
  };
  place();
  ARK_UNROLL for (int o = 0; o < kOctets; ++o) ARK_UNROLL for (int i = 0; i < kChunks; ++i) load(o, i);
  if constexpr (kScaled) load_scales();
  ARK_ROLLED for (int pass = 0; pass < split.passes; ++pass) {
    // Eight elements each of a's rows my_line and 8 further; word i of a chunk of 4 bits meets chunk i.
    Chunk x[4][2];
    float of_rows[4] = {};
    const T* const from = now(a);
    ARK_UNROLL for (int i = 0; i < 4; ++i) {
      const int d = my_depth + pass * kStep + (q.bits == 4 ? i * 8 : i / 2 * 4 * kPerLoad + i % 2 * 8);
      ARK_UNROLL for (int half = 0; half < 2; ++half) {
        const int row = half * 8 + my_line;
        x[i][half] =
            load_row_chunk(s, from + (r0 + (row < rows ? row : 0)) * s.a_row, d, half * 8 < Rows && row < rows);
        Words::deal(x[i][half]);
      }
      if constexpr (kZeros) {
        const uint32 one = pair_of<T>(1);
        ARK_UNROLL for (int w = 0; w < 4; w += 2) {
          const uint32 lines[4] = {x[i][0].words[w], x[i][1].words[w], x[i][0].words[w + 1], x[i][1].words[w + 1]};
          multiply_add<T>(of_rows, lines, one, one);
        }
      }
    }
    ARK_ROLLED for (int batch = 0; batch < batches; ++batch) {
      if (++next.batch == batches) {
        next.batch = 0;
        ++next.pass;
      }
      place();
      ARK_UNROLL for (int o = 0; o < kOctets; ++o) {
        float sums[4] = {};
        ARK_UNROLL for (int chunk = 0; chunk < kChunks; ++chunk) {
          ARK_UNROLL for (int word = 0; word < 4; ++word) {
            uint32 pairs[Words::kPairs];
            Words::word(ring[o][chunk].words[word], pairs);
            ARK_UNROLL for (int i = 0; i < Words::kPairs; i += 2) {
              const Chunk* const of = x[q.bits == 4 ? word : chunk * 2 + word / 2];
              const int w = q.bits == 4 ? i : word % 2 * 2;
              const uint32 lines[4] = {of[0].words[w], of[1].words[w], of[0].words[w + 1], of[1].words[w + 1]};
              multiply_add<T>(sums, lines, pairs[i], pairs[i + 1]);
            }
          }
          // Behind its use, which the sum orders: else it would be into other registers, and copied from there.
          asm volatile("" : "+f"(sums[0]));
          load(o, chunk);
        }
        if constexpr (kScaled) {
          ARK_UNROLL for (int i = 0; i < 2; ++i) {
            const int from = o * 8 + lane % 4 * 2 + i;
            const float scale = __shfl_sync(~0u, scale_of_lane, from);
            const float zero = kZeros ? __shfl_sync(~0u, zero_of_lane, from) : 0;
            ARK_UNROLL for (int half = 0; half < 2; ++half) {
              float& sum = sums[half * 2 + i];
              const float of_row = of_rows[half * 2];
              if constexpr (kZeros && !q.zero_after) sum = fused(-zero, of_row, sum);
              sum *= scale;
              if constexpr (kZeros && q.zero_after) sum = fused(zero, of_row, sum);
            }
          }
        }
        add_octet<Rows>(parts, lane, slice, (batch * split.groups + group) * kTogether + o * 8, pass == 0, sums);
      }
      if constexpr (kScaled) load_scales();
    }
  }
}

}  // namespace ark::loop
