// Many rows: tiles of both matrices pass through a ring in shared memory.
//
// The ring's stages are filled ahead of the multiplications, without a break where one tile of the result ends and the
// next begins; one barrier a stage.
#pragma once

#include "cuda/loop/tile_plain.cuh"
#include "cuda/loop/tile_tensor.cuh"

namespace ark::loop {

template <class Tile, int kRows, int kColumns, bool kAAcross, bool kBAcross, class T, class At, class BAt, class Out,
          class Bias>
ARK_LOOP void tiled_product(const Product& s, const Side<T, At>& a, const Side<T, BAt>& b, Out* out, const Bias* bias,
                            int r0, int r1, int c0, int c1) {
  constexpr int kABytes = Tile::kALines * kLineBytes, kBytes = kABytes + Tile::kBLines * kLineBytes;
  constexpr int kStages = least(kWorkspaceBytes / kBytes, 8);
  constexpr int kDepth = kTileDepth<T>;
  const int steps = s.depth > 0 ? static_cast<int>(in_wholes(s.depth, kDepth)) : 1;
  const bool paired =
      !kSame<Out, float> && s.out_column == 1 && s.out_row % 2 == 0 && c0 % 2 == 0 && At::kEven && is_aligned(out, 4);

  // Where a stage is: of which tile of the result, which depth.
  struct Place {
    int r, c, step;
  };
  auto advance = [&](Place& place) {
    if (++place.step < steps) return;
    place.step = 0;
    place.c += kColumns;
    if (place.c < c1) return;
    place.c = c0;
    place.r += kRows;
  };
  Place next{r0, c0, 0}, now{r0, c0, 0};
  auto fill = [&](int stage) {
    if (next.r < r1) {
      char* const to = workspace() + stage * kBytes;
      copy_tile<kRows, kAAcross>(to, a, next.r, r1, next.step * kDepth, s.depth);
      copy_tile<kColumns, kBAcross>(to + kABytes, b, next.c, c1, next.step * kDepth, s.depth);
      advance(next);
    }
    end_copies();
  };

  sync();
  for (int i = 0; i < kStages - 1; ++i) fill(i);
  int stage = 0;
  Tile tile;
  tile.clear();
  while (now.r < r1) {
    wait_copies<kStages - 2>();
    sync();  // all have it, and are done with the stage before
    fill(stage == 0 ? kStages - 1 : stage - 1);
    const char* const from = workspace() + stage * kBytes;
    tile.add(from, from + kABytes);
    stage = stage + 1 == kStages ? 0 : stage + 1;
    if (now.step + 1 == steps) {
      tile.finish(s, a.at, out, bias, now.r, r1, now.c, c1, paired);
      tile.clear();
    }
    advance(now);
  }
}

}  // namespace ark::loop
