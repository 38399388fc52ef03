// Up to 16 half-type rows times columns of codes, on tensor cores: codes stream, and are decoded between a load and its
// multiplications.
//
// As in matvec_tensor.cuh, a warp keeps up to 16 rows x 128 depths of a in registers while columns pass. Here columns
// are the tensor core's 16 lines, so that few rows leave no line empty. Four lanes load 64 8-bit codes (or 128 4-bit
// ones) of a column, in order. A slice of 128 depths is within one group, whose scale multiplies their sum: tensor
// cores multiply exact integers, or float8. A group's zero, and what weights are left too large by (decode.cuh),
// multiply the sum of the rows, which tensor cores compute once for all columns. So an infinite element of a row gives
// NaN there.
//
// Scales and zeros come through shared memory (staged_scales.cuh) or registers (lane_scales.cuh).
#pragma once

#include "cuda/loop/coded_columns.cuh"
#include "cuda/loop/decode.cuh"
#include "cuda/loop/matvec_tensor.cuh"

namespace ark::loop {

inline constexpr int kDequantSlice = 128;  // depths per warp
// Whether registers suffice to hide latency with up to eight rows: not where addresses take more of them.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool kDequantRoom = false;
#else
inline constexpr bool kDequantRoom = true;
#endif

// Whether scales apply only once a column's sum is complete.
template <Product s, Codes q, class Zero>
inline constexpr bool kScaledLast = q.group == s.depth&& kSame<Zero, NoScale>;
// What this kernel supports: whole chunks of codes, and groups of whole slices.
template <Product s, Codes q>
inline constexpr bool kDequantsByTensor = s.b_aligned&& s.b_depth == 1 && s.depth* q.bits % 128 == 0 &&
                                          (q.group == s.depth || q.group % kDequantSlice == 0);

// How warps share the codes of columns, which are CodedRuns.
template <class Columns>
struct CodeSlices {
  static constexpr Product s = Columns::s;
  static constexpr Codes q = Columns::q;
  static constexpr DepthSplit split = split_k(s.depth, kDequantSlice);
  static constexpr int kStride = split.slices * kDequantSlice;  // depths per pass
  static constexpr bool kWhole = split.passes * kStride == s.depth;
  static constexpr int kTogether = split.groups * kDequantColumns;  // columns per batch of all warps
  static constexpr int kOctets = kDequantColumns / 8;
  static constexpr int kChunks = kDequantSlice * q.bits / 8 / 64;                // chunks of codes per lane and column
  static constexpr int kPerLoad = 128 / q.bits;                                  // codes per chunk
  static constexpr int kGroups = static_cast<int>(in_wholes(s.depth, q.group));  // of a column
  // A column that has one scale for its whole sum needs none here.
  static constexpr bool kScaledHere = !kScaledLast<s, q, typename Columns::ZeroElement>;
  static constexpr bool kScales = kScaledHere && !kSame<typename Columns::ScaleElement, NoScale>;
  static constexpr bool kZeros = !kSame<typename Columns::ZeroElement, NoScale>;

  // Of a thread: the slice, the group of columns, and the depth of the first code that it loads. To be called with
  // thread_anew(), so that no register keeps them while columns pass.
  static ARK_LOOP int slice(int self) { return self / 32 % split.slices; }
  static ARK_LOOP int group(int self) { return self / 32 / split.slices; }
  static ARK_LOOP int depth(int self) { return slice(self) * kDequantSlice + self % 4 * kPerLoad; }
};

// A warp's codes, batch by batch of columns from c on: those of the next batch load as soon as a register is free.
template <class Columns>
class CodeLoads : protected CodeSlices<Columns> {
 protected:
  using Slices = CodeSlices<Columns>;
  using B = typename Columns::Element;

 public:
  Chunk codes[Slices::kOctets][Slices::kChunks] = {};

  // The loads that follow are of the next batch.
  ARK_LOOP void advance() {
    const bool begins = ++batch_ == batches_;
    if (begins) {
      batch_ = 0;
      ++pass_;
    }
    left_ -= Slices::kTogether;
    if (!kDequantRoom || begins || (!Columns::kLast && left_ <= 0))
      place();
    else
      from_ += Slices::kTogether * Slices::s.b_column;
  }
  ARK_LOOP void load(int octet, int chunk) {
    const bool there = Slices::kWhole || chunk * 4 * Slices::kPerLoad < depths_;
    if (!there) codes[octet][chunk] = {};
    loads_.load(codes[octet][chunk], from_ + octet * 8 * Slices::s.b_column + chunk * 64, octet * 8 < left_ && there);
  }

 protected:
  ARK_LOOP CodeLoads(const Columns& columns, int c, int batches) : columns_(columns), c_(c), batches_(batches) {
    place();
  }
  ARK_LOOP void load_first() {
    ARK_UNROLL for (int o = 0; o < Slices::kOctets; ++o) ARK_UNROLL for (int i = 0; i < Slices::kChunks; ++i)
        load(o, i);
  }
  ARK_LOOP void place() {
    const int self = thread_anew(), line = self % 32 / 4, depth = Slices::depth(self) + pass_ * Slices::kStride;
    const int column = c_ + (batch_ * Slices::split.groups + Slices::group(self)) * kDequantColumns;
    left_ = pass_ < Slices::split.passes ? columns_.left(column) - line : 0;
    depths_ = Slices::s.depth - depth;
    from_ = columns_.from(column + line) + static_cast<uint32>(depth) * Slices::q.bits / 8;
  }

  const Columns& columns_;
  const ChunkLoads<Slices::s.b_cache> loads_;
  const int c_, batches_;
  int batch_ = 0, pass_ = 0;  // the next batch, which belongs to one product
  int left_, depths_;         // columns and depths from the first ones on that the thread loads
  const B* from_;
};

// As tensor_parts of matvec_tensor.cuh. `Stream`: CodeLoads with scales. `there`: those are staged.
template <int Rows, class Stream, class AAt, class Columns>
ARK_LOOP void dequant_parts(AAt a, const Columns& columns, int c, int batches, Parts parts, bool there) {
  using Slices = CodeSlices<Columns>;
  constexpr Product s = Slices::s;
  constexpr Codes q = Slices::q;
  using T = typename Pointee<AAt>::Type;
  using Words = Coding<q, typename Columns::Element, T, Stream::kRaises>;
  constexpr DepthSplit split = Slices::split;
  constexpr int kOctets = Slices::kOctets, kChunks = Slices::kChunks;
  constexpr int kBlocks = Rows > 8 ? 2 : 1;                 // of eight rows
  constexpr bool kAhead = kDequantRoom && Rows == 1;        // the next pass's rows load while columns are multiplied
  constexpr int kSums = kDequantRoom && Rows <= 8 ? 2 : 1;  // partial sums per column, which halve the dependency chain
  // What a column's sum is too large by: multiples of the row's.
  constexpr bool kZeros = Slices::kZeros, kZerosFirst = kZeros && !q.zero_after;
  constexpr bool kTooLarge = kZerosFirst || Words::kSurplus != 0;
  const int pair = thread_anew() % 4;
  const bool idle = Slices::group(thread_anew()) >= split.groups;
  if (!Stream::kSyncs && idle) return;
  const uint32 power = Words::joined();

  Stream stream(columns, c, idle ? 0 : batches, parts.at(Rows, 0, 0), parts.width, there);
  // Eight elements each of a's rows line and line + 8; with 4 bits, word i of a chunk of codes meets chunk i.
  Chunk x[4][kBlocks], ahead[4][kBlocks];
  auto load_rows = [&](int pass) {
    const T* const from = now(a);
    const int self = thread_anew(), depth = Slices::depth(self) + pass * Slices::kStride;
    ARK_UNROLL for (int i = 0; i < 4; ++i) {
      const int d = depth + (q.bits == 4 ? i * 8 : i / 2 * 4 * Slices::kPerLoad + i % 2 * 8);
      ARK_UNROLL for (int half = 0; half < kBlocks; ++half) {
        const int row = half * 8 + self % 32 / 4;
        ahead[i][half] = load_row_chunk(s, from + (row < Rows ? row : 0) * s.a_row, d, row < Rows);
      }
    }
  };
  load_rows(0);
  if constexpr (Stream::kSyncs) {
    if (!there) stream.wait();
    if (idle) return;
  }
  ARK_ROLLED for (int pass = 0; pass < split.passes; ++pass) {
    float of_rows[kBlocks][4] = {};
    ARK_UNROLL for (int i = 0; i < 4; ++i) {
      ARK_UNROLL for (int half = 0; half < kBlocks; ++half) {
        x[i][half] = ahead[i][half];
        Words::deal(x[i][half]);
        if constexpr (kTooLarge || kZeros) {
          const uint32 one = pair_of<T>(1), ones[4] = {one, one, one, one};
          ARK_UNROLL for (int w = 0; w < 4; w += 2)
              multiply_add<T>(of_rows[half], ones, x[i][half].words[w], x[i][half].words[w + 1]);
        }
      }
    }
    if (kAhead && pass + 1 < split.passes) load_rows(pass + 1);
    const int self = thread_anew();
    float* to = parts.at(self % 4 * 2, Slices::slice(self), Slices::group(self) * kDequantColumns + self % 32 / 4);
    stream.begin_scales(pass);
    ARK_ROLLED for (int batch = 0; batch < batches; ++batch) {
      stream.advance();
      float sums[kSums][kBlocks][4] = {};
      ARK_UNROLL for (int chunk = 0; chunk < kChunks; ++chunk) {
        ARK_UNROLL for (int word = 0; word < 4; ++word) {
          uint32 one[Words::kPairs], other[Words::kPairs];
          Words::word(stream.codes[0][chunk].words[word], power, one);
          Words::word(stream.codes[1][chunk].words[word], power, other);
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
        ARK_UNROLL for (int o = 0; o < kOctets; ++o) stream.load(o, chunk);
      }
      ARK_UNROLL for (int k = 1; k < kSums; ++k) ARK_UNROLL for (int half = 0; half < kBlocks; ++half)
          ARK_UNROLL for (int i = 0; i < 4; ++i) sums[0][half][i] += sums[k][half][i];
      ARK_UNROLL for (int octet = 0; octet < kOctets; ++octet) {
        const float scale = stream.scale(octet) / Words::kUnit, zero = stream.zero(octet);
        const float too_large = Words::kUnit * (Words::kSurplus + (kZerosFirst ? zero : 0));
        ARK_UNROLL for (int half = 0; half < kBlocks; ++half) ARK_UNROLL for (int i = 0; i < 2; ++i) {
          if (half * 8 + pair * 2 + i >= Rows) continue;
          float sum = sums[0][half][octet * 2 + i];
          if constexpr (kTooLarge) sum = fused(-too_large, of_rows[half][i], sum);
          if constexpr (Slices::kScales || Words::kUnit != 1) sum *= scale;
          if constexpr (kZeros && q.zero_after) sum = fused(zero, of_rows[half][i], sum);
          float* const mine = to + (half * 8 + i) * parts.line_words + octet * 8;
          *mine = pass == 0 ? sum : *mine + sum;
        }
      }
      to += Slices::kTogether;
      stream.advance_scales();
    }
    if (!kAhead && pass + 1 < split.passes) load_rows(pass + 1);
  }
}

}  // namespace ark::loop
