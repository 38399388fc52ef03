// Up to 16 half-type rows times columns of codes, on tensor cores: codes stream, and are decoded between a load and its
// multiplications.
//
// As in matvec_tensor.cuh, a warp keeps up to 16 rows x 128 depths of a in registers while columns pass. Here columns
// are the tensor core's 16 lines, so that few rows leave no line empty. Four lanes load 64 8-bit codes (or 128 4-bit
// ones) of a column, in order. A slice of 128 depths is within one group, whose scale multiplies their sum: tensor
// cores multiply exact integers, or float8. A group's zero, and what 4-bit weights are too large by (decode.cuh),
// multiply the sum of the rows, which tensor cores compute once for all columns. So an infinite element of a row gives
// NaN there. Scales and zeros are staged in shared memory, all groups of a column at once.
#pragma once

#include "cuda/loop/coded_columns.cuh"
#include "cuda/loop/decode.cuh"
#include "cuda/loop/matvec_tensor.cuh"

namespace ark::loop {

inline constexpr int kDequantSlice = 128;  // depths per warp
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
// Columns whose sums and scales fit into the workspace, in whole batches of all warps; 0 if not even one batch does.
template <int Rows, class First>
ARK_LOOP constexpr int most_coded_columns() {
  constexpr Product s = First::kProduct;
  constexpr Codes q = First::q;
  using Zero = typename First::ZeroElement;
  constexpr DepthSplit split = split_k(s.depth, kDequantSlice);
  int bytes = Rows * split.slices * 4;  // of a column
  if (!kScaledLast<s, q, Zero>)
    bytes += static_cast<int>(in_wholes(s.depth, q.group)) *
             (kStagedBytes<typename First::ScaleElement> + kStagedBytes<Zero>);
  const int batch = split.groups * kDequantColumns;
  return (kWorkspaceBytes - Rows * 32) / bytes / batch * batch;
}
// What this kernel supports: whole chunks of codes, and groups of whole slices.
template <Product s, Codes q>
inline constexpr bool kDequantsByTensor = s.b_aligned&& s.b_depth == 1 && s.depth* q.bits % 128 == 0 &&
                                          (q.group == s.depth || q.group % kDequantSlice == 0);

// A warp's codes, batch by batch of columns: those of the next batch load as soon as a register is free.
template <class Columns>
class CodeStream {
  static constexpr Product s = Columns::s;
  static constexpr Codes q = Columns::q;
  using B = typename Columns::Element;
  static constexpr DepthSplit split = split_k(s.depth, kDequantSlice);
  static constexpr int kStride = split.slices * kDequantSlice;  // depths per pass
  static constexpr bool kWhole = split.passes * kStride == s.depth;
  static constexpr int kPerLoad = 128 / q.bits;  // codes per chunk

 public:
  static constexpr int kOctets = kDequantColumns / 8;
  static constexpr int kChunks = kDequantSlice * q.bits / 8 / 64;  // chunks of codes per lane and column
  Chunk codes[kOctets][kChunks] = {};

  // Batches of columns from c on.
  ARK_LOOP CodeStream(const Columns& columns, int self, int c, int batches)
      : columns_(columns),
        line_(self % 32 / 4),
        depth_(self / 32 % split.slices * kDequantSlice + self % 4 * kPerLoad),
        column_(c + self / 32 / split.slices * kDequantColumns),
        batches_(batches) {
    place();
    first_from_ = from_;
    first_left_ = batches > 0 ? left_ : 0;
    begin_pass();
    ARK_UNROLL for (int o = 0; o < kOctets; ++o) ARK_UNROLL for (int i = 0; i < kChunks; ++i) load(o, i);
  }

  // The loads that follow are of the next batch.
  ARK_LOOP void advance() {
    left_ -= split.groups * kDequantColumns;
    from_ += split.groups * kDequantColumns * s.b_column;
    if (++batch_ == batches_) {
      batch_ = 0;
      ++pass_;
      begin_pass();
    } else if (!Columns::kLast && left_ <= 0) {
      place();
    }
  }
  ARK_LOOP void load(int octet, int chunk) {
    if (!there_[chunk]) codes[octet][chunk] = {};
    loads_.load(codes[octet][chunk], from_ + octet * 8 * s.b_column + chunk * 64,
                line_ + octet * 8 < left_ && there_[chunk]);
  }

 private:
  ARK_LOOP void place() {
    const int column = column_ + batch_ * split.groups * kDequantColumns;
    left_ = pass_ < split.passes ? columns_.left(column) : 0;
    from_ = columns_.from(column + line_) + (depth_ + pass_ * kStride) * q.bits / 8;
  }
  ARK_LOOP void begin_pass() {
    from_ = first_from_ + pass_ * (kStride * q.bits / 8);
    left_ = pass_ < split.passes ? first_left_ : 0;
    ARK_UNROLL for (int i = 0; i < kChunks; ++i) there_[i] =
        kWhole || static_cast<int>(depth_) + pass_ * kStride + i * 4 * kPerLoad < s.depth;
  }

  const Columns& columns_;
  const ChunkLoads<s.b_cache> loads_;
  const int line_;
  const uint32 depth_;
  const int column_, batches_;
  int batch_ = 0, pass_ = 0, left_;  // of the next batch, which belongs to one product
  const B* from_;
  const B* first_from_;  // of a pass, and what is left then
  int first_left_;
  bool there_[kChunks];
};

// As tensor_parts of matvec_tensor.cuh.
template <int Rows, class AAt, class Columns>
ARK_LOOP void dequant_parts(AAt a, const Columns& columns, int r0, int rows, int c, int batches, Parts parts) {
  constexpr Product s = Columns::s;
  constexpr Codes q = Columns::q;
  using T = typename Pointee<AAt>::Type;
  using Scale = Plain<typename Columns::ScaleElement>;
  using Zero = Plain<typename Columns::ZeroElement>;
  using Words = Coding<q, typename Columns::Element, T>;
  constexpr int kBlocks = Rows > 8 ? 2 : 1;  // of eight rows
  constexpr bool kAhead = kDequantRoom<Rows> && split_k(s.depth, kDequantSlice).passes > 1;
  constexpr int kSums = kDequantRoom<Rows> ? 2 : 1;  // partial sums per column, which halve the dependency chain
  constexpr int kOctets = CodeStream<Columns>::kOctets, kChunks = CodeStream<Columns>::kChunks;
  constexpr int kPerLoad = 128 / q.bits;              // codes per chunk
  constexpr bool kStages = !kScaledLast<s, q, Zero>;  // else a column has one scale, for its whole sum
  constexpr bool kScales = kStages && !kSame<Scale, NoScale>, kZeros = !kSame<Zero, NoScale>;
  constexpr bool kRowSums = kZeros || Words::kRaised != 0;
  constexpr int kGroups = in_wholes(s.depth, q.group);  // of a column
  constexpr DepthSplit split = split_k(s.depth, kDequantSlice);
  constexpr int kStride = split.slices * kDequantSlice;  // depths per pass
  const int self = thread_anew(), lane = self % 32;      // re-read: no register keeps anything of it across runs
  const int slice = self / 32 % split.slices, group = self / 32 / split.slices;
  const int my_line = lane / 4;  // column of b, row of a
  const int my_depth = slice * kDequantSlice + lane % 4 * kPerLoad;
  const uint32 power = Words::joined();

  CodeStream<Columns> stream(columns, self, c, group < split.groups ? batches : 0);
  // Behind the sums.
  char* const staged = reinterpret_cast<char*>(parts.at(Rows, 0, 0));
  const StagedScales<Scale> scales{reinterpret_cast<Scale*>(staged)};
  const StagedScales<Zero> zeros{
      reinterpret_cast<Zero*>(staged + parts.width * kGroups * kStagedBytes<typename Columns::ScaleElement>)};
  if constexpr (kStages) {
    if constexpr (kScales)
      scales.template copy<kGroups, q.scale.group, q.scale.column>(
          columns, c, parts.width, [&](int g, int column) { return columns.scale_at(g, column); });
    if constexpr (kZeros)
      zeros.template copy<kGroups, q.zero.group, q.zero.column>(
          columns, c, parts.width, [&](int g, int column) { return columns.zero_at(g, column); });
    end_copies();
  }
  // Eight elements each of a's rows my_line and my_line + 8; with 4 bits, word i of a chunk of codes meets chunk i. The
  // next pass's rows load while columns are multiplied.
  Chunk x[4][kBlocks], ahead[4][kBlocks];
  auto load_rows = [&](int pass) {
    const T* const from = now(a);
    ARK_UNROLL for (int i = 0; i < 4; ++i) {
      const int d = my_depth + pass * kStride + (q.bits == 4 ? i * 8 : i / 2 * 4 * kPerLoad + i % 2 * 8);
      ARK_UNROLL for (int half = 0; half < kBlocks; ++half) {
        const int row = half * 8 + my_line;
        ahead[i][half] = load_row_chunk(s, from + (r0 + (row < rows ? row : 0)) * s.a_row, d, row < rows);
      }
    }
  };
  // A raised weight is kUnit * (weight + kRaised). The surplus and a zero are multiples of the row's sum.
  constexpr float kUnit = Words::kRaisedUnit, kRaised = Words::kRaised;
  if (kAhead) load_rows(0);
  if constexpr (kStages) {
    wait_copies<0>();
    sync();
  }
  if (group >= split.groups) return;
  ARK_ROLLED for (int pass = 0; pass < split.passes; ++pass) {
    float of_rows[kBlocks][4] = {};
    if (!kAhead) load_rows(pass);
    ARK_UNROLL for (int i = 0; i < 4; ++i) {
      ARK_UNROLL for (int half = 0; half < kBlocks; ++half) {
        x[i][half] = ahead[i][half];
        Words::deal(x[i][half]);
        if constexpr (kRowSums) {
          const uint32 one = pair_of<T>(1), ones[4] = {one, one, one, one};
          ARK_UNROLL for (int w = 0; w < 4; w += 2)
              multiply_add<T>(of_rows[half], ones, x[i][half].words[w], x[i][half].words[w + 1]);
        }
      }
    }
    if (kAhead && pass + 1 < split.passes) load_rows(pass + 1);
    float* to = parts.at(lane % 4 * 2, slice, group * kDequantColumns + my_line);
    // Slices behind the depth, whose sums are 0, take the last group's.
    const int of = least((slice * kDequantSlice + pass * kStride) / static_cast<int>(q.group), kGroups - 1);
    int scale_at = (group * kDequantColumns + my_line) * kGroups + of;
    ARK_ROLLED for (int batch = 0; batch < batches; ++batch) {
      stream.advance();
      float sums[kSums][kBlocks][4] = {};
      ARK_UNROLL for (int chunk = 0; chunk < kChunks; ++chunk) {
        ARK_UNROLL for (int word = 0; word < 4; ++word) {
          uint32 one[Words::kPairs], other[Words::kPairs];
          Words::raised(stream.codes[0][chunk].words[word], power, one);
          Words::raised(stream.codes[1][chunk].words[word], power, other);
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
        float scale = 1 / kUnit, zero = 0;
        if constexpr (kScales) scale = load_one(scales.data + scale_at + octet * 8 * kGroups) / kUnit;
        if constexpr (kZeros) zero = static_cast<float>(load_one(zeros.data + scale_at + octet * 8 * kGroups));
        const float too_much = kUnit * (kRaised + (q.zero_after ? 0 : zero));
        ARK_UNROLL for (int half = 0; half < kBlocks; ++half) ARK_UNROLL for (int i = 0; i < 2; ++i) {
          if (half * 8 + lane % 4 * 2 + i >= Rows) continue;
          float sum = sums[0][half][octet * 2 + i];
          if constexpr (kRowSums) sum = fused(-too_much, of_rows[half][i], sum);
          if constexpr (kScales || Words::kRaisedUnit != 1) sum *= scale;
          if constexpr (kZeros && q.zero_after) sum = fused(zero, of_rows[half][i], sum);
          float* const mine = to + (half * 8 + i) * parts.line_words + octet * 8;
          *mine = pass == 0 ? sum : *mine + sum;
        }
      }
      to += split.groups * kDequantColumns;
      scale_at += split.groups * kDequantColumns * kGroups;
    }
  }
}

}  // namespace ark::loop
