// Products of many rows: tiles of both matrices pass through a ring in shared memory.
//
// The ring's stages are filled ahead of the multiplications, without a break between one tile of the result and the
// next, unless finishing a tile needs their memory. There is one barrier per stage.
#pragma once

#include "cuda/loop/tile_group.cuh"
#include "cuda/loop/tile_plain.cuh"
#include "cuda/loop/tile_tensor.cuh"

namespace ark::loop {

// Whether two columns of the result may be stored as one.
template <class At, class Out>
ARK_LOOP bool stored_in_pairs(const Product& s, const Out* out, int c0) {
  return s.out_column == 1 && s.out_row % 2 == 0 && c0 % 2 == 0 && At::kEven &&
         is_aligned(out, 2 * static_cast<int>(sizeof(Out)));
}

// An asynchronous tile is not finished here; the caller does that.
// `b`: a Side, or what BCopy reads columns from.
template <class ACopy, class BCopy, int kRows, int kColumns, class Tile, class T, class At, class B, class Out,
          class Bias>
ARK_LOOP void ring_product(Tile& tile, const Product& s, const Side<T, At>& a, const B& b, Out* out, const Bias* bias,
                           int r0, int r1, int c0, int c1) {
  constexpr int kABytes = ACopy::kBytes, kBytes = kABytes + BCopy::kBytes;
  constexpr int kStages = least((Tile::kAsync ? kGroupWorkspaceBytes : kWorkspaceBytes) / kBytes, 8);
  // A stage is refilled kBehind stages after its use. With many stages, a multiplication may run until then.
  constexpr int kBehind = Tile::kAsync && kStages >= 4 ? 2 : 1;
  constexpr int kDepth = kTileDepth<T>;
  const int steps = s.depth > 0 ? static_cast<int>(in_wholes(s.depth, kDepth)) : 1;
  const bool paired = stored_in_pairs<At>(s, out, c0);

  // The position of a stage: tile of the result, and depth.
  struct Place {
    int r, c, step;
  };
  auto advance = [&](Place& place) {
    if (++place.step < steps) return;
    if constexpr (Tile::kAsync) {  // one tile
      place.r = r1;
      return;
    }
    place.step = 0;
    place.c += kColumns;
    if (place.c < c1) return;
    place.c = c0;
    place.r += kRows;
  };
  Place next{r0, c0, 0}, now{r0, c0, 0};
  ACopy a_copy;
  BCopy b_copy;
  auto fill = [&](int stage) {
    if (next.r < r1) {
      if (next.step == 0) {
        a_copy.start(a, next.r, r1);
        b_copy.start(b, next.c, c1);
      }
      a_copy.copy(stage * kBytes, a, next.step * kDepth, s.depth);
      b_copy.copy(stage * kBytes + kABytes, b, next.step * kDepth, s.depth);
      advance(next);
    }
    end_copies();
  };

  sync();
  for (int i = 0; i < kStages - kBehind; ++i) fill(i);
  int stage = 0;
  tile.clear();
  _Pragma("unroll 1") while (now.r < r1) {
    wait_copies<kStages - kBehind - 1>();
    if constexpr (Tile::kAsync) {
      tile.template wait<kBehind - 1>();
      show_to_group_multiply();
    }
    sync();  // the stage has arrived for all, and all are done with the one to be refilled
    const int filled = stage < kBehind ? stage + kStages - kBehind : stage - kBehind;
    if constexpr (!Tile::kAsync) fill(filled);
    tile.add(stage * kBytes, stage * kBytes + kABytes);
    if constexpr (Tile::kAsync) fill(filled);  // while that multiplies
    stage = stage + 1 == kStages ? 0 : stage + 1;
    if (!Tile::kAsync && now.step + 1 == steps) {
      tile.finish(s, a.at, out, bias, now.r, r1, now.c, c1, paired);
      tile.clear();
    }
    advance(now);
  }
}

template <class Tile, int kRows, int kColumns, bool kAAcross, bool kBAcross, class T, class At, class BAt, class Out,
          class Bias>
ARK_LOOP void tiled_product(const Product& s, const Side<T, At>& a, const Side<T, BAt>& b, Out* out, const Bias* bias,
                            int r0, int r1, int c0, int c1) {
  constexpr int kLines = kColumns * kMatrices<BAt>;
  const int rows = Tile::kAsync ? kRows : r1 - r0, columns = Tile::kAsync ? kColumns : c1 - c0;
  for (int r = r0; r < r1; r += rows) {
    for (int c = c0; c < c1; c += columns) {
      const int r_end = least(r + rows, r1), c_end = least(c + columns, c1);
      Tile tile;
      if (a.whole && b.whole)
        ring_product<ChunkCopy<kRows, kAAcross, T, At>, ChunkCopy<kLines, kBAcross, T, BAt>, kRows, kColumns>(
            tile, s, a, b, out, bias, r, r_end, c, c_end);
      else
        ring_product<ElementCopy<kRows, kAAcross, T, At>, ElementCopy<kLines, kBAcross, T, BAt>, kRows, kColumns>(
            tile, s, a, b, out, bias, r, r_end, c, c_end);
      if constexpr (Tile::kAsync) tile.finish(s, a.at, out, bias, r, r_end, c, c_end, stored_in_pairs<At>(s, out, c));
    }
  }
}

}  // namespace ark::loop
