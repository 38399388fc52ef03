// Attention of many query rows over any number of positions with warp groups (wgmma), as in prompts (FlashAttention-2;
// Dao, 2023).
//
// For heads of 64 or 128 numbers. A warp group has 64 rows and 64 value columns; with 128 columns two groups share
// rows, and both compute the scores. Where a task has few rows, groups with the same ones take turns at the blocks, and
// their results are combined at the end. Blocks of 64 keys and values pass through a ring in shared memory. Scores,
// weights (rounded to the values' type for the second product) and sums stay in registers.
//
// Groups may be a block apart, so that one exponentiates while others multiply. Therefore a warp arrives at a barrier
// when it is done with a block and its copies for the one after the next are there, and waits for the others a block
// later. The barriers of even and odd turns are different, as a warp may arrive at the next before all have passed one.
//
// A mask is read ahead, for a window of blocks, into one bit per row and position. Blocks that no row of a group
// attends to are not computed, and positions that no row attends to are not copied.
#pragma once

#include "cuda/bulk_copy.cuh"
#include "cuda/loop/attention_tiles.cuh"
#include "cuda/loop/product.cuh"
#include "cuda/loop/ptx_group.cuh"

namespace ark::loop {

// kTurns: groups that share rows and take turns.
template <int kColumns, int kTurns, Attention kShape, class T, class M>
class FlashAttention {
  static constexpr Attention s = kShape;
  static constexpr bool kScans = !kSame<M, NoMask>;
  static constexpr int kParts = kColumns / 64;  // of a row: lines of 128 bytes, whose chunks are at part_at()
  static constexpr int kBlock = 64, kTiles = kBlock / 8, kStages = kParts == 1 ? 5 : 4, kWindow = kParts == 1 ? 32 : 16;
  static constexpr int kLine = 128, kTile = kBlock * kLine, kStage = 2 * kParts * kTile;

 public:
  static constexpr int kRows = 64 * (kWarps / 4) / kParts / kTurns;

 private:
  static constexpr int kWarpRows = kRows / kWarps;  // that a warp scans
  static constexpr int kGroupWarps = 64 / kWarpRows;
  // Rows that follow each other from a multiple on and have the same mask.
  static constexpr int kAlike = s.causal || s.mask_head != 0 ? 1
                                : s.mask_row == 0            ? 1 << 30
                                                             : static_cast<int>(s.heads);
  static constexpr int kRing = kRows * kParts * kLine, kBarriers = kRing + kStages * kStage, kWords = kBarriers + 16;
  static constexpr int kRowWords = kWindow + 1;  // of a row, and one that keeps rows in different banks
  static constexpr int kSeen = kWords + kRows * kRowWords * 8, kAny = kSeen + kWindow * kWarps * 8;
  static constexpr int kSeeing = kAny + kWindow * 8, kUnmasked = kSeeing + kWindow * 4,
                       kEnd = kScans ? kUnmasked + kWindow * 4 : kWords;
  static_assert(kColumns == kParts * 64 && kEnd <= kGroupWorkspaceBytes && kRing % 1024 == 0);
  static constexpr float kLog2E = 1.4426950408889634f, kScale = s.scale * kLog2E;
  // A score's factor is applied before the mask, where the mask has numbers, or with the exponentiation.
  static constexpr bool kScalesFirst = kIsFloat<M> || kScale <= 0;
  static constexpr float kFactor = kScalesFirst ? 1.0f : kScale;

 public:
  ARK_LOOP FlashAttention(int first, int end) : first_(first), end_(end) {}

  template <class QAt, class KAt, class VAt>
  ARK_LOOP void attend(QAt q, KAt k, VAt v, const M* mask) {
    const int limit = limit_of(s, end_), blocks = (limit + kBlock - 1) / kBlock;
    copy_queries(now(q));
    if (self < 2) device::barrier_init(barrier(self), kWarps);
    sync();
    if constexpr (kScans) {
      _Pragma("unroll 1") for (int first = 0; first < blocks; first += kWindow) {
        const int past = least(blocks, first + kWindow);
        if (first > 0) sync();  // all are done with the window before
        scan(mask, first, past, limit);
        attend_blocks(k, v, mask, first, past, limit);
      }
    } else {
      attend_blocks(k, v, mask, 0, blocks, limit);
    }
    sync();
    if (self < 2) device::barrier_end(barrier(self));
  }

  template <class Out>
  ARK_LOOP void store(Out* out) {
    if constexpr (kTurns > 1) {
      combine();
      if (turn() != 0) return;
    }
    ARK_UNROLL for (int r = 0; r < 2; ++r) {
      total_[r] += shuffle_xor(total_[r], 1);
      total_[r] += shuffle_xor(total_[r], 2);
      if (row(r) >= end_) continue;
      const AttentionRow to(s, row(r));
      const float factor = last_factor(total_[r], s.nan_rows);
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
  uint32 turn_ = 0;
  float greatest_[2] = {-kInfinity, -kInfinity}, total_[2] = {}, sums_[8][4] = {};

  ARK_LOOP int lane() const { return self % 32; }
  ARK_LOOP int half() const { return self / 128 % kParts; }
  ARK_LOOP int group_row() const { return self / 128 / kParts * 64 % kRows; }  // the first of this group
  ARK_LOOP int turn() const { return self / 128 / kParts * 64 / kRows; }
  // Lane 4 i + j has rows i and i + 8 of its warp's 16.
  ARK_LOOP int row_in_pass(int r) const { return group_row() + self / 32 % 4 * 16 + lane() / 4 + r * 8; }
  ARK_LOOP int row(int r) const { return first_ + row_in_pass(r); }

  static ARK_LOOP uint64* barrier(uint32 turn) { return reinterpret_cast<uint64*>(workspace() + kBarriers) + turn % 2; }
  static ARK_LOOP uint32 in_window(int block) { return static_cast<uint32>(block) % kWindow; }
  // A bit per position of a block: whether a row attends to it; whether any row that a warp scans does; whether any
  // does. A bit per warp: whether any of the rows that it scans attends to the block.
  static ARK_LOOP uint64& word(int row, int block) {
    return reinterpret_cast<uint64*>(workspace() + kWords)[row * kRowWords + in_window(block)];
  }
  static ARK_LOOP uint64* seen(int block) {
    return reinterpret_cast<uint64*>(workspace() + kSeen) + in_window(block) * kWarps;
  }
  static ARK_LOOP uint64& any(int block) { return reinterpret_cast<uint64*>(workspace() + kAny)[in_window(block)]; }
  static ARK_LOOP uint32& seeing(int block) {
    return reinterpret_cast<uint32*>(workspace() + kSeeing)[in_window(block)];
  }
  // A bit per warp: whether the mask leaves all scores of the rows that it scans as they are.
  static ARK_LOOP uint32& unmasked(int block) {
    return reinterpret_cast<uint32*>(workspace() + kUnmasked)[in_window(block)];
  }
  // The next block of which anything is attended to.
  static ARK_LOOP int following(int block, int past) {
    ++block;
    if constexpr (kScans)
      while (block < past && any(block) == 0) ++block;
    return block;
  }

  // Tells the others that this warp is done with the block before, and that its copies are there but for the last
  // kLeft.
  template <int kLeft>
  ARK_LOOP void arrive() {
    wait_copies<kLeft>();
    show_to_group_multiply();
    sync_warp();
    if (lane() == 0) device::barrier_arrive(barrier(turn_));
    ++turn_;
  }
  // Waits until all have arrived for the last time but `back`.
  ARK_LOOP void await(uint32 back) const {
    const uint32 turn = turn_ - 1 - back;
    while (!device::barrier_passed(barrier(turn), turn / 2 % 2)) {
    }
  }

  template <class KAt, class VAt>
  ARK_LOOP void attend_blocks(KAt k, VAt v, const M* mask, int first, int past, int limit) {
    constexpr int kAhead = kStages - 2;  // a slot is filled again when all are done with the block before the last
    int block = following(first - 1, past), ahead = block, filled = 0, slot = 0;
    const auto fill = [&] {
      if (ahead < past) copy(now(k), now(v), ahead, filled, limit), ahead = following(ahead, past);
      end_copies();
      filled = filled + 1 == kStages ? 0 : filled + 1;
    };
    ARK_ROLLED for (int i = 0; i < kAhead; ++i) fill();
    arrive<kAhead - 1>();
    _Pragma("unroll 1") while (block < past) {
      arrive<kAhead - 2>();
      await(1);
      fill();
      if (turn_ % kTurns == turn() && sees(block)) attend_block(mask, block, slot);
      block = following(block, past);
      slot = slot + 1 == kStages ? 0 : slot + 1;
    }
    wait_copies<0>();
  }

  // Adds the other groups' sums to those of the groups with the first turn. They pass through the ring.
  ARK_LOOP void combine() {
    constexpr int kValues = 36;  // of a thread
    constexpr int kGroup = 128 * kParts * (kRows / 64);
    static_assert((kTurns - 1) * kGroup * kValues * 4 <= kStages * kStage);
    float* const shared = reinterpret_cast<float*>(workspace() + kRing) + self % kGroup;
    if (turn() != 0) {
      float* const to = shared + (turn() - 1) * kGroup * kValues;
      ARK_UNROLL for (int n = 0; n < 8; ++n) ARK_UNROLL for (int e = 0; e < 4; ++e) to[(n * 4 + e) * kGroup] =
          sums_[n][e];
      ARK_UNROLL for (int r = 0; r < 2; ++r) to[(32 + r) * kGroup] = greatest_[r], to[(34 + r) * kGroup] = total_[r];
    }
    sync();
    if (turn() != 0) return;
    _Pragma("unroll 1") for (int other = 0; other < kTurns - 1; ++other) {
      const float* const from = shared + other * kGroup * kValues;
      ARK_UNROLL for (int r = 0; r < 2; ++r) {
        const float theirs = from[(32 + r) * kGroup], now = fmaxf(greatest_[r], theirs), base = base_of(now) * kFactor;
        const float mine = fast_exp2(fused(greatest_[r], kFactor, -base)),
                    factor = fast_exp2(fused(theirs, kFactor, -base));
        greatest_[r] = now;
        total_[r] = fused(total_[r], mine, from[(34 + r) * kGroup] * factor);
        ARK_UNROLL for (int n = 0; n < 8; ++n) ARK_UNROLL for (int e = 2 * r; e < 2 * r + 2; ++e) sums_[n][e] =
            fused(sums_[n][e], mine, from[(n * 4 + e) * kGroup] * factor);
      }
    }
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
  ARK_LOOP void copy(const T* k, const T* v, int block, int slot, int limit) const {
    const int line = self / 8, position = block * kBlock + line, at = kRing + slot * kStage;
    bool there = position < limit;
    if constexpr (kScans) there = (any(block) >> line & 1) != 0;
    const int64_t from = there ? position : 0;
    ARK_UNROLL for (int part = 0; part < kParts; ++part) {
      copy_line(at + part * kTile, line, k + from * s.k_row + part * 64, there);
      copy_line(at + (kParts + part) * kTile, line, v + from * s.v_row + part * 64, there);
    }
  }

  // Fills the bits of blocks [first, past). A lane has a block; so a warp reads whole lines of a row.
  ARK_LOOP void scan(const M* mask, int first, int past, int limit) const {
    constexpr int kAtOnce = 32 / kWindow;  // masks
    constexpr bool kLines =
        s.mask_column == 1 && !s.causal && s.mask_row * sizeof(M) % 16 == 0 && s.mask_head * sizeof(M) % 16 == 0;
    const int mine = self / 32 * kWarpRows, block = first + lane() % kWindow;
    // A warp's rows have the masks [from, from + count).
    const int from = (first_ + mine) / kAlike, count = (first_ + mine + kWarpRows - 1) / kAlike - from + 1;
    const auto row_of = [&](int number) { return number * kAlike > first_ + mine ? number * kAlike : first_ + mine; };
    uint64 all = 0;
    bool unmasked_rows = true;
    const auto keep = [&](int number, uint64 bits, bool zeros) {
      const int row = row_of(number), end = least(kAlike - row % kAlike, first_ + mine + kWarpRows - row);
      all |= bits;
      unmasked_rows = unmasked_rows && (row >= end_ || (zeros && bits == ~uint64{0}));
      ARK_ROLLED for (int i = 0; i < end; ++i) word(row - first_ + i, block) = bits;
    };
    if (kLines && is_aligned(mask, 16) && past * kBlock <= limit) {
      constexpr int kChunks = kBlock * sizeof(M) / 16, kTogether = kChunks <= 4 ? 2 : 1;
      ARK_ROLLED for (int i = lane() / kWindow; i < count; i += kAtOnce * kTogether) {
        uint64 bits[kTogether];
        bool zeros[kTogether];
        int rows[kTogether];
        ARK_UNROLL for (int n = 0; n < kTogether; ++n) rows[n] = row_of(from + least(i + n * kAtOnce, count - 1));
        bits_by_chunks<kTogether, kChunks>(bits, zeros, mask, rows, block < past ? block : first);
        ARK_UNROLL for (int n = 0; n < kTogether; ++n) if (i + n * kAtOnce < count)
            keep(from + i + n * kAtOnce, rows[n] < end_ && block < past ? bits[n] : 0, zeros[n]);
      }
    } else {
      ARK_ROLLED for (int i = lane() / kWindow; i < count; i += kAtOnce) {
        const int row = row_of(from + i), position = block * kBlock;
        const AttentionRow at(s, row);
        uint64 bits = 0;
        bool zeros = true;
        ARK_ROLLED for (int n = 0; row < end_ && n < least(kBlock, limit - position); ++n) {
          const float bias = bias_of(s, mask, at, position + n);
          bits |= static_cast<uint64>(bias != -kInfinity) << n;
          zeros = zeros && bias == 0;
        }
        keep(from + i, bits, zeros);
      }
    }
    if constexpr (kAtOnce == 2) all |= static_cast<uint64>(shuffle_xor(static_cast<int64_t>(all), 16));
    constexpr uint32 kLanes = kAtOnce == 2 ? 0x10001 : 1;  // of a block
    const uint32 lanes = kLanes << lane() % kWindow;
    const bool all_unmasked = (ballot(unmasked_rows) & lanes) == lanes;
    if (self < kWindow) unmasked(first + self) = ~0u;
    if (block < past) seen(block)[self / 32] = all;
    sync();
    if (lane() < kWindow && !all_unmasked) atomicAnd(&unmasked(block), ~(1u << self / 32));
    ARK_ROLLED for (int other = first + self / 32; other < past; other += kWarps) {
      const uint64 one = lane() < kWarps ? seen(other)[lane()] : 0;
      const uint32 low = __reduce_or_sync(~0u, static_cast<uint32>(one)),
                   high = __reduce_or_sync(~0u, static_cast<uint32>(one >> 32));
      const uint32 by = ballot(one != 0);
      if (lane() == 0) any(other) = static_cast<uint64>(high) << 32 | low, seeing(other) = by;
    }
    sync();
  }
  // For each of some rows, a bit for each position of a block that the row attends to.
  template <int kCount, int kChunks>
  ARK_LOOP void bits_by_chunks(uint64 (&bits)[kCount], bool (&zeros)[kCount], const M* mask, const int (&rows)[kCount],
                               int block) const {
    constexpr int kPer = 16 / sizeof(M), kBatch = least(kChunks, 8);
    ARK_UNROLL for (int i = 0; i < kCount; ++i) bits[i] = 0, zeros[i] = true;
    ARK_ROLLED for (int c = 0; c < kChunks; c += kBatch) {
      Chunk chunks[kCount][kBatch];
      ARK_UNROLL for (int i = 0; i < kCount; ++i) {
        const AttentionRow from(s, least(rows[i], end_ - 1));
        const auto* const at =
            reinterpret_cast<const Chunk*>(mask + from.g * s.mask_head + from.t * s.mask_row + block * kBlock);
        ARK_UNROLL for (int n = 0; n < kBatch; ++n) chunks[i][n] = at[c + n];
      }
      ARK_UNROLL for (int i = 0; i < kCount; ++i) {
        uint64 there = 0;
        ARK_UNROLL for (int n = 0; n < kBatch; ++n) there |= static_cast<uint64>(attended(chunks[i][n])) << n * kPer;
        bits[i] |= there << c * kPer;
        if constexpr (!kSame<M, bool>)
          ARK_UNROLL for (int n = 0; n < kBatch; ++n) ARK_UNROLL for (int w = 0; w < 4; ++w) zeros[i] =
              zeros[i] && chunks[i][n].words[w] == 0;
      }
    }
  }
  // A bit for each element of a mask that is not excluded.
  static ARK_LOOP uint32 attended(const Chunk& chunk) {
    if constexpr (kSame<M, bool>) {  // bytes that are 0 or 1
      const auto eight = [](uint32 low, uint32 high) {
        return static_cast<uint32>((static_cast<uint64>(high) << 32 | low) * 0x0102040810204080ull >> 56);
      };
      return eight(chunk.words[0], chunk.words[1]) | eight(chunk.words[2], chunk.words[3]) << 8;
    } else {
      uint32 bits = 0;
      ARK_UNROLL for (int e = 0; e < static_cast<int>(16 / sizeof(M)); ++e) bits |=
          static_cast<uint32>(chunk_element<M>(chunk, e) != -kInfinity) << e;
      return bits;
    }
  }
  // Whether any row of this group attends to the block.
  ARK_LOOP bool sees(int block) const {
    if constexpr (kScans) {
      return (seeing(block) >> group_row() / kWarpRows & ((1u << kGroupWarps) - 1)) != 0;
    } else {
      const int from = first_ + group_row(), past = least(end_, from + 64);
      return from < past && block * kBlock < limit_of(s, past);
    }
  }

  ARK_LOOP void attend_block(const M* mask, int block, int slot) {
    float scores[kTiles][4] = {};
    multiply_keys(scores, slot);
    mask_scores(scores, mask, block);
    uint32 weights[kTiles][2];
    ARK_UNROLL for (int r = 0; r < 2; ++r) {
      float now = greatest_[r];
      ARK_UNROLL for (int n = 0; n < kTiles; ++n) now = fmaxf(now, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
      now = fmaxf(now, shuffle_xor(now, 1));
      now = fmaxf(now, shuffle_xor(now, 2));
      const float base = base_of(now) * kFactor;
      if (ballot(now != greatest_[r]) != 0) {
        const float before = fast_exp2(fused(greatest_[r], kFactor, -base));
        total_[r] *= before;
        ARK_UNROLL for (int n = 0; n < 8; ++n) {
          sums_[n][2 * r] *= before;
          sums_[n][2 * r + 1] *= before;
        }
        greatest_[r] = now;
      }
      ARK_UNROLL for (int n = 0; n < kTiles; ++n) {
        const float x = fast_exp2(fused(scores[n][2 * r], kFactor, -base));
        const float y = fast_exp2(fused(scores[n][2 * r + 1], kFactor, -base));
        total_[r] += x + y;
        weights[n][r] = pack_two(x, y, T{});
      }
    }
    multiply_values(weights, slot);
  }

  ARK_LOOP void multiply_keys(float (&scores)[kTiles][4], int slot) const {
    const uint32 shared = shared_address(workspace());
    const uint32 queries = shared_matrix(shared + group_row() * kLine, 64 * kLine);
    const uint32 keys = shared_matrix(shared + kRing + slot * kStage, 64 * kLine);
    begin_group_multiply();
    ARK_UNROLL for (int part = 0; part < kParts; ++part) ARK_UNROLL for (int step = 0; step < 4; ++step)
        group_multiply_add<T, false, false>(scores, moved_matrix(queries, part * kRows * kLine + step * 32),
                                            moved_matrix(keys, part * kTile + step * 32));
    end_group_multiply();
    wait_group_multiply(scores);
  }

  ARK_LOOP void multiply_values(const uint32 (&weights)[kTiles][2], int slot) {
    const uint32 values =
        shared_matrix(shared_address(workspace()) + kRing + slot * kStage + (kParts + half()) * kTile, 64 * kLine);
    begin_group_multiply();
    ARK_UNROLL for (int n = 0; n < kTiles; n += 2) {
      const uint32 rows[4] = {weights[n][0], weights[n][1], weights[n + 1][0], weights[n + 1][1]};
      group_multiply_add<T, true>(sums_, rows, moved_matrix(values, n * 8 * kLine));
    }
    end_group_multiply();
    wait_group_multiply(sums_);
  }

  // Makes a score -inf in its register. A selection on one side of a branch made the compiler move all scores.
  static ARK_LOOP void exclude_unless(float& score, uint32 there) {
    asm("{ .reg .pred p; setp.eq.u32 p, %1, 0; @p mov.b32 %0, 0Fff800000; }" : "+f"(score) : "r"(there));
  }
  // Applies the mask, and where it has numbers the scores' factor.
  ARK_LOOP void mask_scores(float (&scores)[kTiles][4], const M* mask, int block) const {
    const int place = block * kBlock + lane() % 4 * 2;
    if constexpr (kScalesFirst)
      ARK_UNROLL for (int n = 0; n < kTiles; ++n) ARK_UNROLL for (int e = 0; e < 4; ++e) scores[n][e] *= kScale;
    if constexpr (kScans) {
      constexpr uint32 kScanners = (1u << 16 / kWarpRows) - 1;  // of a warp's rows
      const int scanner = (group_row() + self / 32 % 4 * 16) / kWarpRows;
      if ((unmasked(block) >> scanner & kScanners) == kScanners) return;
      const uint64 rows[2] = {word(row_in_pass(0), block), word(row_in_pass(1), block)};
      ARK_UNROLL for (int r = 0; r < 2; ++r) {
        const uint64 word = rows[r] >> lane() % 4 * 2;
        const uint32 bits[2] = {static_cast<uint32>(word), static_cast<uint32>(word >> 32)};
        const AttentionRow from(s, row(r));
        ARK_UNROLL for (int n = 0; n < kTiles; ++n) ARK_UNROLL for (int e = 0; e < 2; ++e) {
          float& score = scores[n][2 * r + e];
          const uint32 there = bits[n / 4] >> (n % 4 * 8 + e) & 1;
          if constexpr (kIsFloat<M>)
            if (there != 0) score = fused(kLog2E, bias_of(s, mask, from, place + n * 8 + e), score);
          exclude_unless(score, there);
        }
      }
    } else {
      ARK_UNROLL for (int r = 0; r < 2; ++r) {
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
    constexpr int kAll = static_cast<int>(s.heads * s.queries),
                  kSets = kWarps / 4 / (kColumns / 64);  // groups, by rows
    constexpr int kUsed = least((kAll + 63) / 64, kSets), kTurns = kSets / kUsed;
    using Pass = FlashAttention<kColumns, kTurns, s, T, M>;
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
