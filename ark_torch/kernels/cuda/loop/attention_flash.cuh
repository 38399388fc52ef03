// Attention of many query rows over any number of positions with warp groups (wgmma), as in prompts (FlashAttention-2;
// Dao, 2023).
//
// For heads of 64 or 128 numbers. A warp group has 64 rows and 64 value columns; with 128 columns two groups share
// rows, and both compute the scores. Blocks of 64 keys and values pass through a ring in shared memory. Scores, weights
// (rounded to the values' type for the second product) and sums stay in registers. Groups meet once per block, so that
// one exponentiates while others multiply.
//
// A mask is read ahead of its block, by rows, into one bit per position. Blocks that no row of a group attends to are
// not computed, and positions that no row attends to are not copied.
#pragma once

#include "cuda/loop/attention_tiles.cuh"
#include "cuda/loop/ptx_group.cuh"

namespace ark::loop {

template <int kColumns, Attention kShape, class T, class M>
class FlashAttention {
  static constexpr Attention s = kShape;
  static constexpr bool kScans = !kSame<M, NoMask>;
  static constexpr int kParts = kColumns / 64;  // of a row: lines of 128 bytes, whose chunks are at part_at()
  static constexpr int kBlock = 64, kTiles = kBlock / 8, kStages = 4, kSlots = kStages + 1;
  static constexpr int kLine = 128, kTile = kBlock * kLine, kStage = 2 * kParts * kTile;

 public:
  static constexpr int kRows = 64 * (kWarps / 4) / kParts;

 private:
  static constexpr int kWarpRows = kRows / kWarps;  // that a warp scans
  static constexpr int kGroupWarps = 64 / kWarpRows;
  // Rows that follow each other and have the same mask.
  static constexpr int kAlike = s.causal                                       ? 1
                                : s.mask_head == 0 && s.mask_row == 0          ? kWarpRows
                                : s.mask_head == 0 && kWarpRows % s.heads == 0 ? static_cast<int>(s.heads)
                                                                               : 1;
  static constexpr int kRing = kRows * kParts * kLine, kWords = kRing + kStages * kStage;
  static constexpr int kSeen = kWords + kSlots * kRows * 8, kEnd = kSeen + kSlots * kWarps * 8;
  static_assert(kColumns == kParts * 64 && kEnd <= kGroupWorkspaceBytes && kRing % 1024 == 0);
  static constexpr float kLog2E = 1.4426950408889634f, kScale = s.scale * kLog2E;

 public:
  ARK_LOOP FlashAttention(int first, int end) : first_(first), end_(end) {}

  template <class QAt, class KAt, class VAt>
  ARK_LOOP void attend(QAt q, KAt k, VAt v, const M* mask) {
    const int limit = limit_of(s, end_), blocks = (limit + kBlock - 1) / kBlock;
    copy_queries(now(q));
    if constexpr (kScans) {
      for (int i = 0; i < least(kStages, blocks); ++i) scan(mask, i, limit);
      sync();
    }
    for (int i = 0; i < kStages - 1; ++i) {
      if (i < blocks) copy(now(k), now(v), i, limit);
      end_copies();
    }
    _Pragma("unroll 1") for (int i = 0; i < blocks; ++i) {
      wait_copies<kStages - 2>();
      show_to_group_multiply();
      sync();  // block i has arrived for all, and all are done with the one before
      if (i + kStages - 1 < blocks) copy(now(k), now(v), i + kStages - 1, limit);
      end_copies();
      if (kScans && i + kStages < blocks) scan(mask, i + kStages, limit);
      if (sees(i)) attend_block(mask, i);
    }
    wait_copies<0>();
  }

  template <class Out>
  ARK_LOOP void store(Out* out) {
    ARK_UNROLL for (int r = 0; r < 2; ++r) {
      total_[r] += shuffle_xor(total_[r], 1);
      total_[r] += shuffle_xor(total_[r], 2);
      if (row(r) >= end_) continue;
      const AttentionRow to(s, row(r));
      const float factor = last_factor(total_[r]);
      Out* const at = out + to.g * s.out_head + to.t * s.out_row;
      const bool paired = sizeof(Out) == 2 && s.out_column == 1 && (reinterpret_cast<uint64>(at) & 3) == 0;
      ARK_UNROLL for (int n = 0; n < 8; ++n) {
        const int column = half() * 64 + n * 8 + lane() % 4 * 2;
        const float x = sums_[n][2 * r] * factor, y = sums_[n][2 * r + 1] * factor;
        if constexpr (sizeof(Out) == 2) {
          if (paired) {
            *reinterpret_cast<uint32*>(at + column) = pack_two(x, y, Out{});
            continue;
          }
        }
        store_one(at + column * s.out_column, x);
        store_one(at + (column + 1) * s.out_column, y);
      }
    }
  }

 private:
  // Re-read, since this is inlined in the kernel's loop: registers would keep what is derived from it across tasks.
  const int self = thread_anew();
  const int first_, end_;  // rows
  float greatest_[2] = {-kInfinity, -kInfinity}, total_[2] = {}, sums_[8][4] = {};

  ARK_LOOP int lane() const { return self % 32; }
  ARK_LOOP int half() const { return self / 128 % kParts; }
  ARK_LOOP int group_row() const { return self / 128 / kParts * 64; }  // the first of this group
  // Lane 4 i + j has rows i and i + 8 of its warp's 16.
  ARK_LOOP int row_in_pass(int r) const { return group_row() + self / 32 % 4 * 16 + lane() / 4 + r * 8; }
  ARK_LOOP int row(int r) const { return first_ + row_in_pass(r); }

  // A bit per position of a block: whether a row attends to it; whether any row that a warp scans does.
  static ARK_LOOP uint64* words(int block) {
    return reinterpret_cast<uint64*>(workspace() + kWords) + block % kSlots * kRows;
  }
  static ARK_LOOP uint64* seen(int block) {
    return reinterpret_cast<uint64*>(workspace() + kSeen) + block % kSlots * kWarps;
  }

  // Eight threads copy a line.
  ARK_LOOP void copy_line(int at, int line, const T* from, bool there) const {
    copy_16(shared_address(workspace() + at + part_at<8>(line, self % 8)), from + self % 8 * 8, there ? 16 : 0);
  }
  ARK_LOOP void copy_queries(const T* q) const {
    ARK_UNROLL for (int line = 0; line < kRows; line += kThreads / 8) {
      const int mine = line + self / 8;
      const bool there = first_ + mine < end_;
      const AttentionRow from(s, there ? first_ + mine : first_);
      ARK_UNROLL for (int part = 0; part < kParts; ++part)
          copy_line(part * kRows * kLine, mine, q + from.g * s.q_head + from.t * s.q_row + part * 64, there);
    }
  }
  ARK_LOOP void copy(const T* k, const T* v, int block, int limit) const {
    const int line = self / 8, position = block * kBlock + line, at = kRing + block % kStages * kStage;
    bool there = position < limit;
    if constexpr (kScans) there = (any_of(block) >> line & 1) != 0;
    const int64_t from = there ? position : 0;
    ARK_UNROLL for (int part = 0; part < kParts; ++part) {
      copy_line(at + part * kTile, line, k + from * s.k_row + part * 64, there);
      copy_line(at + (kParts + part) * kTile, line, v + from * s.v_row + part * 64, there);
    }
  }

  ARK_LOOP uint64 any_of(int block) const {
    const uint64 mine = lane() < kWarps ? seen(block)[lane()] : 0;
    const uint32 low = __reduce_or_sync(~0u, static_cast<uint32>(mine)),
                 high = __reduce_or_sync(~0u, static_cast<uint32>(mine >> 32));
    return static_cast<uint64>(high) << 32 | low;
  }
  ARK_LOOP void scan(const M* mask, int block, int limit) const {
    const int mine = self / 32 * kWarpRows;
    uint64 any = 0;
    _Pragma("unroll 2") for (int r = 0; r < kWarpRows; r += kAlike) {
      const int row = first_ + mine + r;
      uint64 word = 0;
      ARK_UNROLL for (int part = 0; part < 2; ++part) {
        const int position = block * kBlock + part * 32 + lane();
        const bool sees = row < end_ && position < limit &&
                          bias_of(s, mask, AttentionRow(s, row < end_ ? row : first_), position) != -kInfinity;
        word |= static_cast<uint64>(ballot(sees)) << part * 32;
      }
      any |= word;
      if (lane() < kAlike) words(block)[mine + r + lane()] = word;
    }
    if (lane() == 0) seen(block)[self / 32] = any;
  }
  // Whether any row of this group attends to the block.
  ARK_LOOP bool sees(int block) const {
    const int from = first_ + group_row(), past = least(end_, from + 64);
    if (from >= past) return false;
    if constexpr (kScans) {
      uint64 any = 0;
      ARK_UNROLL for (int w = 0; w < kGroupWarps; ++w) any |= seen(block)[group_row() / kWarpRows + w];
      return any != 0;
    } else {
      return block * kBlock < limit_of(s, past);
    }
  }

  ARK_LOOP void attend_block(const M* mask, int block) {
    float scores[kTiles][4] = {};
    multiply_keys(scores, block);
    mask_scores(scores, mask, block);
    uint32 weights[kTiles][2];
    ARK_UNROLL for (int r = 0; r < 2; ++r) {
      float now = greatest_[r];
      ARK_UNROLL for (int n = 0; n < kTiles; ++n) now = fmaxf(now, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
      now = fmaxf(now, shuffle_xor(now, 1));
      now = fmaxf(now, shuffle_xor(now, 2));
      const float base = base_of(now);
      if (ballot(now != greatest_[r]) != 0) {
        const float before = fast_exp2(greatest_[r] - base);
        total_[r] *= before;
        ARK_UNROLL for (int n = 0; n < 8; ++n) {
          sums_[n][2 * r] *= before;
          sums_[n][2 * r + 1] *= before;
        }
        greatest_[r] = now;
      }
      ARK_UNROLL for (int n = 0; n < kTiles; ++n) {
        const float x = fast_exp2(scores[n][2 * r] - base), y = fast_exp2(scores[n][2 * r + 1] - base);
        total_[r] += x + y;
        weights[n][r] = pack_two(x, y, T{});
      }
    }
    multiply_values(weights, block);
  }

  ARK_LOOP void multiply_keys(float (&scores)[kTiles][4], int block) const {
    const uint32 shared = shared_address(workspace());
    const uint32 queries = shared_matrix(shared + group_row() * kLine, 64 * kLine);
    const uint32 keys = shared_matrix(shared + kRing + block % kStages * kStage, 64 * kLine);
    begin_group_multiply();
    ARK_UNROLL for (int part = 0; part < kParts; ++part) ARK_UNROLL for (int step = 0; step < 4; ++step)
        group_multiply_add<T, false, false>(scores, moved_matrix(queries, part * kRows * kLine + step * 32),
                                            moved_matrix(keys, part * kTile + step * 32));
    end_group_multiply();
    wait_group_multiply(scores);
  }

  ARK_LOOP void multiply_values(const uint32 (&weights)[kTiles][2], int block) {
    const uint32 values = shared_matrix(
        shared_address(workspace()) + kRing + block % kStages * kStage + (kParts + half()) * kTile, 64 * kLine);
    begin_group_multiply();
    ARK_UNROLL for (int n = 0; n < kTiles; n += 2) {
      const uint32 rows[4] = {weights[n][0], weights[n][1], weights[n + 1][0], weights[n + 1][1]};
      group_multiply_add<T, true>(sums_, rows, moved_matrix(values, n * 8 * kLine));
    }
    end_group_multiply();
    wait_group_multiply(sums_);
  }

  // Scales scores to powers of two and applies the mask.
  ARK_LOOP void mask_scores(float (&scores)[kTiles][4], const M* mask, int block) const {
    const int place = block * kBlock + lane() % 4 * 2;
    ARK_UNROLL for (int n = 0; n < kTiles; ++n) ARK_UNROLL for (int e = 0; e < 4; ++e) scores[n][e] *= kScale;
    ARK_UNROLL for (int r = 0; r < 2; ++r) {
      if constexpr (kScans) {
        const uint64 word = words(block)[row_in_pass(r)] >> lane() % 4 * 2;
        const uint32 bits[2] = {static_cast<uint32>(word), static_cast<uint32>(word >> 32)};
        const AttentionRow from(s, row(r));
        ARK_UNROLL for (int n = 0; n < kTiles; ++n) ARK_UNROLL for (int e = 0; e < 2; ++e) {
          float& score = scores[n][2 * r + e];
          const bool there = (bits[n / 4] >> (n % 4 * 8 + e) & 1) != 0;
          if constexpr (kIsFloat<M>)
            if (there) score = fused(kLog2E, bias_of(s, mask, from, place + n * 8 + e), score);
          score = there ? score : -kInfinity;
        }
      } else {
        const int limit = limit_of(s, row(r) + 1);
        if (limit >= (block + 1) * kBlock) continue;
        ARK_UNROLL for (int n = 0; n < kTiles; ++n) ARK_UNROLL for (int e = 0; e < 2; ++e) {
          float& score = scores[n][2 * r + e];
          score = place + n * 8 + e < limit ? score : -kInfinity;
        }
      }
    }
  }
};

template <int kColumns, Attention s, class QAt, class KAt, class VAt, class M, class OutAt>
ARK_LOOP void attend_flash(const Context&, QAt q, KAt k, VAt v, const M* mask, OutAt out) {
  using T = typename Pointee<QAt>::Type;
  static_assert(!s.part);
  if constexpr (!kHasGroupMultiply || !s.aligned) {
    attend_tiles<kColumns, kColumns, s, T>(q, k, v, mask, out);
  } else {
    using Pass = FlashAttention<kColumns, s, T, M>;
    constexpr int kAll = static_cast<int>(s.heads * s.queries);
    _Pragma("unroll 1") for (int first = 0; first < kAll; first += Pass::kRows) {
      sync();
      Pass pass(first, least(kAll, first + Pass::kRows));
      pass.attend(q, k, v, mask);
      pass.store(now(out));
    }
    sync();
  }
}

}  // namespace ark::loop
