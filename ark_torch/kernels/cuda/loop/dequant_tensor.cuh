// Up to 16 half-type rows times columns of codes, on tensor cores: codes stream, and are decoded between a load and its
// multiplications.
//
// As in matvec_tensor.cuh, a warp keeps up to 16 rows x 128 depths of a in registers while columns pass. Here columns
// are the tensor core's 16 lines, so that few rows leave no line empty. Four lanes load 64 8-bit codes (or 128 4-bit
// ones) of a column, in order. A slice of 128 depths is within one group, whose scale multiplies their sum: the weights
// themselves are exact integers, or float8. A group's zero multiplies the sum of the rows, which tensor cores compute
// once for all columns.
#pragma once

#include "cuda/loop/coded_columns.cuh"
#include "cuda/loop/decode.cuh"
#include "cuda/loop/matvec_tensor.cuh"

namespace ark::loop {

inline constexpr int kDequantSlice = 128;   // depths per warp
inline constexpr int kDequantColumns = 16;  // columns per warp: the tensor core's lines
// Whether registers suffice to hide latency: only with few rows, and not where addresses take more registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
template <int Rows>
inline constexpr bool kDequantRoom = false;
#else
template <int Rows>
inline constexpr bool kDequantRoom = Rows <= 8;
#endif

// Whether scales apply only once a column's sum is complete.
template <Product s, Codes q, class Zero>
inline constexpr bool kScaledLast = q.group == s.depth&& kSame<Zero, NoScale>;
// What this kernel supports: whole chunks of codes, and groups of whole slices.
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
  constexpr int kOctets = kDequantColumns / 8;
  constexpr int kBlocks = Rows > 8 ? 2 : 1;  // of eight rows
  constexpr bool kAhead = kDequantRoom<Rows> && split_k(s.depth, kDequantSlice).passes > 1;
  constexpr int kSums = kDequantRoom<Rows> ? 2 : 1;         // partial sums per column, which halve the dependency chain
  constexpr int kChunks = kDequantSlice * q.bits / 8 / 64;  // chunks of codes per lane and column
  constexpr int kPerLoad = 128 / q.bits;                    // codes per chunk
  constexpr bool kScaled = !kScaledLast<s, q, Zero>, kZeros = !kSame<Zero, NoScale>;
  constexpr DepthSplit split = split_k(s.depth, kDequantSlice);
  constexpr int kStep = split.slices * kDequantSlice;
  constexpr bool kWhole = split.passes * kStep == s.depth;
  const int self = thread_anew(), lane = self % 32;  // re-read: no register keeps anything of it across runs
  const int slice = self / 32 % split.slices, group = self / 32 / split.slices;
  if (group >= split.groups) return;
  const ChunkLoads<s.b_cache> loads;
  const int my_line = lane / 4;  // column of b, row of a
  const int my_depth = slice * kDequantSlice + lane % 4 * kPerLoad;
  const uint32 power = Words::joined();

  // The next batch of columns to load. An octet of columns belongs to one product.
  struct {
    int batch = 0, pass = 0, d, column, left[kOctets];
    const B* from[kOctets];
  } next;
  Chunk ring[kOctets][kChunks] = {};
  float scale_of_lane = 0, zero_of_lane = 0;  // each lane holds one column's
  auto place = [&] {
    next.column = c + (next.batch * split.groups + group) * kDequantColumns;
    next.d = my_depth + next.pass * kStep;
    ARK_UNROLL for (int o = 0; o < kOctets; ++o) {
      const bool first = Columns::kLast && o > 0;  // octets of one product are consecutive
      next.left[o] = first ? next.left[0] - o * 8 : next.pass < split.passes ? columns.left(next.column + o * 8) : 0;
      next.from[o] =
          first ? next.from[0] + o * 8 * s.b_column : columns.from(next.column + o * 8 + my_line) + next.d * q.bits / 8;
    }
  };
  auto load = [&](int octet, int chunk) {
    const int d = chunk * 4 * kPerLoad;
    const bool there = kWhole || next.d + d < s.depth;
    if (!there) ring[octet][chunk] = {};
    loads.load(ring[octet][chunk], next.from[octet] + d * q.bits / 8, my_line < next.left[octet] && there);
  };
  auto load_scales = [&] {
    const int of = (next.d - lane % 4 * kPerLoad) / q.group;
    if (lane >= kDequantColumns || next.pass == split.passes || columns.left(next.column + lane) <= 0 ||
        (!kWhole && of * q.group >= s.depth))
      return;
    scale_of_lane = columns.scale(of, next.column + lane);
    if constexpr (kZeros) zero_of_lane = columns.zero(of, next.column + lane);
  };
  place();
  ARK_UNROLL for (int o = 0; o < kOctets; ++o) ARK_UNROLL for (int i = 0; i < kChunks; ++i) load(o, i);
  if constexpr (kScaled) load_scales();
  // Eight elements each of a's rows my_line and my_line + 8; with 4 bits, word i of a chunk of codes meets chunk i. The
  // next pass's rows load while columns are multiplied.
  Chunk x[4][kBlocks], ahead[4][kBlocks];
  auto load_rows = [&](int pass) {
    const T* const from = now(a);
    ARK_UNROLL for (int i = 0; i < 4; ++i) {
      const int d = my_depth + pass * kStep + (q.bits == 4 ? i * 8 : i / 2 * 4 * kPerLoad + i % 2 * 8);
      ARK_UNROLL for (int half = 0; half < kBlocks; ++half) {
        const int row = half * 8 + my_line;
        ahead[i][half] = load_row_chunk(s, from + (r0 + (row < rows ? row : 0)) * s.a_row, d, row < rows);
      }
    }
  };
  if (kAhead) load_rows(0);
  ARK_ROLLED for (int pass = 0; pass < split.passes; ++pass) {
    float of_rows[kBlocks][4] = {};
    if (!kAhead) load_rows(pass);
    ARK_UNROLL for (int i = 0; i < 4; ++i) {
      ARK_UNROLL for (int half = 0; half < kBlocks; ++half) {
        x[i][half] = ahead[i][half];
        Words::deal(x[i][half]);
        if constexpr (kZeros) {
          const uint32 one = pair_of<T>(1), ones[4] = {one, one, one, one};
          ARK_UNROLL for (int w = 0; w < 4; w += 2)
              multiply_add<T>(of_rows[half], ones, x[i][half].words[w], x[i][half].words[w + 1]);
        }
      }
    }
    if (kAhead && pass + 1 < split.passes) load_rows(pass + 1);
    ARK_ROLLED for (int batch = 0; batch < batches; ++batch) {
      if (++next.batch == batches) {
        next.batch = 0;
        ++next.pass;
      }
      place();
      float sums[kSums][kBlocks][4] = {};
      ARK_UNROLL for (int chunk = 0; chunk < kChunks; ++chunk) {
        ARK_UNROLL for (int word = 0; word < 4; ++word) {
          uint32 one[Words::kPairs], other[Words::kPairs];
          Words::word(ring[0][chunk].words[word], power, one);
          Words::word(ring[1][chunk].words[word], power, other);
          ARK_UNROLL for (int i = 0; i < Words::kPairs; i += 2) {
            const Chunk* const of = x[q.bits == 4 ? word : chunk * 2 + word / 2];
            const int w = q.bits == 4 ? i : word % 2 * 2;
            const uint32 weights[4] = {one[i], other[i], one[i + 1], other[i + 1]};
            ARK_UNROLL for (int half = 0; half < kBlocks; ++half) multiply_add<T>(
                sums[(word * Words::kPairs + i) / 2 % kSums][half], weights, of[half].words[w], of[half].words[w + 1]);
          }
        }
        // Load after the last use, which the dependency on the sum enforces; otherwise the load would go to other
        // registers and be copied.
        asm volatile("" : "+f"(sums[0][0][0]));
        load(0, chunk);
        load(1, chunk);
      }
      ARK_UNROLL for (int k = 1; k < kSums; ++k) ARK_UNROLL for (int half = 0; half < kBlocks; ++half)
          ARK_UNROLL for (int i = 0; i < 4; ++i) sums[0][half][i] += sums[k][half][i];
      ARK_UNROLL for (int octet = 0; octet < 2; ++octet) {
        const int in_batch = octet * 8 + my_line;
        const float scale = kScaled ? __shfl_sync(~0u, scale_of_lane, in_batch) : 1;
        const float zero = kZeros ? __shfl_sync(~0u, zero_of_lane, in_batch) : 0;
        ARK_UNROLL for (int half = 0; half < kBlocks; ++half) ARK_UNROLL for (int i = 0; i < 2; ++i) {
          float sum = sums[0][half][octet * 2 + i];
          if constexpr (kZeros && !q.zero_after) sum = fused(-zero, of_rows[half][i], sum);
          if constexpr (kScaled) sum *= scale;
          if constexpr (kZeros && q.zero_after) sum = fused(zero, of_rows[half][i], sum);
          const int row = half * 8 + lane % 4 * 2 + i;
          if (row >= Rows) continue;
          float* const to = parts.at(row, slice, (batch * split.groups + group) * kDequantColumns + in_batch);
          *to = pass == 0 ? sum : *to + sum;
        }
      }
      if constexpr (kScaled) load_scales();
    }
  }
}

}  // namespace ark::loop
