// Attention of many query rows over few positions with warp groups (wgmma, tile_group.cuh), as in encoders.
//
// For heads of 64 numbers, at most 512 positions, and no mask or one that is the same for all rows. 64 rows at a time;
// all keys and values are loaded at once, and each of four warp groups has a quarter of the positions. Groups exchange
// each row's maximum score before they exponentiate, so their sums are simply added at the end, in order. Scores and
// weights stay in registers.
#pragma once

#include "cuda/loop/attention_tiles.cuh"
#include "cuda/loop/ptx_group.cuh"
#include "cuda/loop/runs.cuh"

namespace ark::loop {

template <int64_t kKeys>
struct GroupShape {
  static constexpr int kRows = 64, kGroups = kWarps / 4;
  static constexpr int kRun = static_cast<int>((kKeys + 32 * kGroups - 1) / (32 * kGroups)) * 32;  // per group
  static constexpr int kPositions = kGroups * kRun;
  // Lines of 128 bytes whose chunks are at part_at(); then the mask, each group's maximum scores and totals, and its
  // sums.
  static constexpr int kLine = 128, kQueryBytes = kRows * kLine, kKeyBytes = kPositions * kLine;
  static constexpr int kValues = kQueryBytes + kKeyBytes, kBiases = kValues + kKeyBytes;
  static constexpr int kStates = kBiases + kPositions * 4, kStatesEnd = kStates + 2 * kGroups * kRows * 4;
  static constexpr int kSumRow = 64 + 8;  // eight rows' columns are in different banks
  static constexpr int kSumBytes = kGroups * kRows * kSumRow * 4;
  // If there is no room, the sums overwrite queries and keys, which are no longer needed by then.
  static constexpr int kSums = kStatesEnd + kSumBytes <= kGroupWorkspaceBytes ? kStatesEnd : 0;
  static_assert(kPositions <= kThreads && kStatesEnd <= kGroupWorkspaceBytes);
  static_assert(kSums > 0 || kSumBytes <= kValues);
};

template <Attention kShape, class T, class M>
class GroupAttention {
  static constexpr Attention s = kShape;
  using Shape = GroupShape<s.keys>;
  static constexpr int kTurns = Shape::kPositions * 8 / kThreads, kTiles = Shape::kRun / 8;

 public:
  // Rows [first, end).
  ARK_LOOP GroupAttention(const T* q, const T* k, const T* v, const M* mask, int first, int end) {
    bool seen[kTurns];
    ARK_UNROLL for (int turn = 0; turn < kTurns; ++turn) seen[turn] = bias_at(mask, line(turn)) != -kInfinity;
    const float bias = bias_at(mask, self);
    const AttentionRow row(s, first + line(0) < end ? first + line(0) : first);
    copy_line(0, line(0), q + row.g * s.q_head + row.t * s.q_row, first + line(0) < end);
    copy_lines(Shape::kQueryBytes, k, s.k_row, [](int, int position) { return position < s.keys; });
    end_copies();
    // Masked values are arbitrary, and a weight of zero does not make a NaN zero: do not copy them.
    copy_lines(Shape::kValues, v, s.v_row, [&](int turn, int) { return seen[turn]; });
    end_copies();
    if (self < Shape::kPositions) biases()[self] = bias;
    wait_copies<1>();
    show_to_group_multiply();
    sync();
  }

  // Leaves this group's sums over its values, and each row's total, for result().
  ARK_LOOP void attend() {
    float scores[kTiles][4] = {}, greatest[2];
    multiply_keys(scores);
    mask_scores(scores, greatest);
    if (lane() % 4 == 0) ARK_UNROLL for (int r = 0; r < 2; ++r) * state(0, group(), row(r)) = greatest[r];
    wait_copies<0>();
    show_to_group_multiply();
    sync();
    ARK_UNROLL for (int r = 0; r < 2; ++r) ARK_UNROLL for (int g = 0; g < Shape::kGroups; ++g) greatest[r] =
        fmaxf(greatest[r], *state(0, g, row(r)));
    uint32 weights[kTiles][2];
    ARK_UNROLL for (int r = 0; r < 2; ++r) {
      const float base = base_of(greatest[r]);
      float total = 0;
      ARK_UNROLL for (int n = 0; n < kTiles; ++n) {
        const float x = fast_exp(scores[n][2 * r] - base), y = fast_exp(scores[n][2 * r + 1] - base);
        total += x + y;
        weights[n][r] = pack_two(x, y, T{});
      }
      total += shuffle_xor(total, 1);
      total += shuffle_xor(total, 2);
      if (lane() % 4 == 0) *state(1, group(), row(r)) = total;
    }
    float sums[8][4] = {};
    const uint32 values = pinned(shared_matrix(
        shared_address(workspace()) + Shape::kValues + group() * Shape::kRun * Shape::kLine, 64 * Shape::kLine));
    begin_group_multiply();
    ARK_UNROLL for (int n = 0; n < kTiles; n += 2) {
      const uint32 rows[4] = {weights[n][0], weights[n][1], weights[n + 1][0], weights[n + 1][1]};
      group_multiply_add<T, true>(sums, rows, moved_matrix(values, n * 8 * Shape::kLine));
    }
    end_group_multiply();
    wait_group_multiply(sums);
    ARK_UNROLL for (int r = 0; r < 2; ++r) {
      float* const to = sum(group(), row(r)) + lane() % 4 * 2;
      ARK_UNROLL for (int n = 0; n < 8; ++n) *
          reinterpret_cast<Together<float, 2>*>(to + n * 8) = {sums[n][2 * r], sums[n][2 * r + 1]};
    }
    sync();
  }

  // A thread has eight columns of a row.
  template <class Out>
  ARK_LOOP void result(Out* out, int first, int end) {
    const int at = self / 8, column = self % 8 * 8;
    float total = 0, all[8] = {};
    ARK_UNROLL for (int g = 0; g < Shape::kGroups; ++g) {
      total += *state(1, g, at);
      ARK_UNROLL for (int e = 0; e < 8; ++e) all[e] += sum(g, at)[column + e];
    }
    const float factor = last_factor(total, s.nan_rows);
    ARK_UNROLL for (int e = 0; e < 8; ++e) all[e] *= factor;
    if (first + at >= end) return;
    const AttentionRow to(s, first + at);
    Out* const row = out + to.g * s.out_head + to.t * s.out_row + column * s.out_column;
    if constexpr (s.out_column == 1) {
      store_pieces(row, all);
    } else {
      ARK_UNROLL for (int e = 0; e < 8; ++e) store_one(row + e * s.out_column, all[e]);
    }
  }

 private:
  // Re-read, since this is inlined in the kernel's loop: registers would keep what is derived from it across tasks.
  const int self = thread_anew();

  ARK_LOOP int group() const { return self / 128; }
  ARK_LOOP int lane() const { return self % 32; }
  // Lane 4 i + j has rows i and i + 8 of its warp's 16.
  ARK_LOOP int row(int r) const { return self / 32 % 4 * 16 + lane() / 4 + r * 8; }
  static ARK_LOOP float* biases() { return reinterpret_cast<float*>(workspace() + Shape::kBiases); }
  static ARK_LOOP float* state(int which, int group, int row) {
    return reinterpret_cast<float*>(workspace() + Shape::kStates) + (which * Shape::kGroups + group) * Shape::kRows +
           row;
  }
  static ARK_LOOP float* sum(int group, int row) {
    return reinterpret_cast<float*>(workspace() + Shape::kSums) + (group * Shape::kRows + row) * Shape::kSumRow;
  }
  static ARK_LOOP float bias_at(const M* mask, int position) {
    return position < s.keys ? bias_of(s, mask, AttentionRow(s, 0), position) : -kInfinity;
  }

  // Eight threads copy a line.
  ARK_LOOP int line(int turn) const { return turn * (kThreads / 8) + self / 8; }
  ARK_LOOP void copy_line(int at, int line, const T* from, bool there) const {
    copy_16(shared_address(workspace() + at + part_at<8>(line, self % 8)), from + self % 8 * 8, there ? 16 : 0);
  }
  template <class Wanted>
  ARK_LOOP void copy_lines(int at, const T* from, int64_t stride, Wanted wanted) const {
    ARK_UNROLL for (int turn = 0; turn < kTurns; ++turn) {
      const bool there = wanted(turn, line(turn));
      copy_line(at, line(turn), from + (there ? line(turn) : 0) * stride, there);
    }
  }

  ARK_LOOP void multiply_keys(float (&scores)[kTiles][4]) {
    const uint32 shared = shared_address(workspace());
    const uint32 queries = pinned(shared_matrix(shared, 64 * Shape::kLine));
    const uint32 keys =
        pinned(shared_matrix(shared + Shape::kQueryBytes + group() * Shape::kRun * Shape::kLine, 64 * Shape::kLine));
    begin_group_multiply();
    ARK_UNROLL for (int step = 0; step < 4; ++step)
        group_multiply_add<T, false, false>(scores, moved_matrix(queries, step * 32), moved_matrix(keys, step * 32));
    end_group_multiply();
    wait_group_multiply(scores);
  }

  // Applies the mask to scores, and computes each row's maximum over this group's positions.
  ARK_LOOP void mask_scores(float (&scores)[kTiles][4], float (&greatest)[2]) {
    greatest[0] = greatest[1] = -kInfinity;
    const float* const from = biases() + group() * Shape::kRun + lane() % 4 * 2;
    ARK_UNROLL for (int n = 0; n < kTiles; ++n) {
      const auto two = *reinterpret_cast<const Together<float, 2>*>(from + n * 8);
      ARK_UNROLL for (int e = 0; e < 4; ++e) {
        scores[n][e] = masked<M>(scores[n][e], s.scale, two.at[e % 2]);
        greatest[e / 2] = fmaxf(greatest[e / 2], scores[n][e]);
      }
    }
    ARK_UNROLL for (int r = 0; r < 2; ++r) {
      greatest[r] = fmaxf(greatest[r], shuffle_xor(greatest[r], 1));
      greatest[r] = fmaxf(greatest[r], shuffle_xor(greatest[r], 2));
    }
  }
};

template <Attention s, class QAt, class KAt, class VAt, class M, class OutAt>
ARK_LOOP void attend_by_groups(const Context&, QAt q, KAt k, VAt v, const M* mask, OutAt out) {
  using T = typename Pointee<QAt>::Type;
  static_assert((kSame<M, NoMask> || kOneMask<s, M>)&&!s.causal && !s.part);
  if constexpr (!kHasGroupMultiply || !s.aligned) {
    attend_tiles<64, 64, s, T>(q, k, v, mask, out);
  } else {
    constexpr int kAll = static_cast<int>(s.heads * s.queries);
    _Pragma("unroll 1") for (int first = 0; first < kAll; first += 64) {
      const int end = least(kAll, first + 64);
      sync();
      GroupAttention<s, T, M> rows(now(q), now(k), now(v), mask, first, end);
      rows.attend();
      rows.result(now(out), first, end);
    }
    sync();
  }
}

}  // namespace ark::loop
