// Many rows: tiles of a and b on their way into shared memory.
//
// A tile consists of lines of 128 bytes. Chunks of 16 bytes stand in a line where their number xor the line's says, so
// eight lines are read, and eight chunks of a line written, without bank conflicts. A line is a part of one row of a
// (column of b) along the depth; or, where elements of different rows (columns) are adjacent and can be transposed on
// the way to the tensor cores, 64 of those at one depth. What lies outside of the matrix is zero.
#pragma once

#include "cuda/loop/product.cuh"

namespace ark::loop {

inline constexpr int kLineBytes = 128;
template <class T>
inline constexpr int kTileDepth = kLineBytes / sizeof(T);

ARK_LOOP char* tile_chunk(char* tile, int line, int chunk) {
  return tile + line * kLineBytes + ((chunk ^ line) & 7) * 16;
}
ARK_LOOP const char* tile_chunk(const char* tile, int line, int chunk) {
  return tile + line * kLineBytes + ((chunk ^ line) & 7) * 16;
}

// One of the two matrices: `others` are its rows where it is a, its columns where it is b.
template <class T, class At>
struct Side {
  const T* data;
  At at;  // at.a(o): where the o-th other begins, in elements
  int64_t depth_stride;
  bool whole;  // chunks are aligned
};

// The tile of others o0 to o0 + kOthers (lines across: rounded up to whole lines) and of a line's depth from d0 on.
template <int kOthers, bool kAcross, class T, class At>
ARK_LOOP void copy_tile(char* tile, const Side<T, At>& side, int o0, int o1, int d0, int depth) {
  constexpr int kPer = kPerChunk<T>, kDepth = kTileDepth<T>;
  constexpr int kLines = kAcross ? (kOthers + kDepth - 1) / kDepth * kDepth : kOthers;
  constexpr int kChunks = kLines * 8, kTurns = (kChunks + kThreads - 1) / kThreads;
  struct Piece {
    const T* from;
    int count;  // of elements that are there
    char* to;
  };
  auto piece = [&](int i) -> Piece {
    const bool depth_first = kAcross || side.depth_stride == 1;  // which of a warp's lanes are neighbours
    const int line = depth_first ? i / 8 : i % kLines, chunk = depth_first ? i % 8 : i / kLines;
    const int o = o0 + (kAcross ? line / kDepth * kDepth + chunk * kPer : line);
    const int d = d0 + (kAcross ? line % kDepth : chunk * kPer);
    const int left = kAcross ? (d < depth ? o1 - o : 0) : (o < o1 ? depth - d : 0);
    return {left <= 0 ? side.data : side.data + side.at.a(o) + d * side.depth_stride, left <= 0 ? 0 : least(left, kPer),
            tile_chunk(tile, line, chunk)};
  };
  if (side.whole) {
    ARK_UNROLL for (int turn = 0; turn < kTurns; ++turn) {
      const int i = turn * kThreads + thread();
      if (kChunks % kThreads != 0 && i >= kChunks) break;
      const Piece one = piece(i);
      copy_16(one.to, one.from, one.count * static_cast<int>(sizeof(T)));
    }
    return;
  }
  const int64_t step = kAcross ? 1 : side.depth_stride;
  _Pragma("unroll 1") for (int i = thread(); i < kChunks; i += kThreads) {
    const Piece one = piece(i);
    if constexpr (sizeof(T) == 4) {
      ARK_UNROLL for (int e = 0; e < kPer; ++e)
          copy_4(one.to + e * 4, e < one.count ? one.from + e * step : side.data, e < one.count ? 4 : 0);
    } else {
      Chunk elements{};
      ARK_UNROLL for (int e = 0; e < kPer; ++e) if (e < one.count) set_element(elements, e, one.from[e * step]);
      *reinterpret_cast<Chunk*>(one.to) = elements;
    }
  }
}

}  // namespace ark::loop
