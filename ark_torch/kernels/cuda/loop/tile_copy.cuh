// Products of many rows: copies tiles of a and b to shared memory.
//
// A tile consists of lines of 128 bytes. Chunks of 16 bytes are swizzled (chunk number xor line number), so eight lines
// can be read, and eight chunks of a line written, without bank conflicts. A line is a part of one row of a (column of
// b) along the depth; or, if elements of different rows (columns) are contiguous and can be transposed on the way to
// the tensor cores, 64 of those at one depth (32 of float32 in TF32). Outside the matrix the depth reads as zero.
#pragma once

#include "cuda/loop/product.cuh"

namespace ark::loop {

inline constexpr int kLineBytes = 128;
template <class T>
inline constexpr int kTileDepth = kLineBytes / sizeof(T);

// kWordsAcross: of 32-bit elements whose lines run across. Threads load these one by one, two adjacent chunks of four
// adjacent lines at once, which pairs of chunks in turn keep in different banks.
template <bool kWordsAcross = false>
ARK_LOOP char* tile_chunk(char* tile, int line, int chunk) {
  return tile + line * kLineBytes + ((chunk ^ (kWordsAcross ? 2 * line : line)) & 7) * 16;
}
template <bool kWordsAcross = false>
ARK_LOOP const char* tile_chunk(const char* tile, int line, int chunk) {
  return tile_chunk<kWordsAcross>(const_cast<char*>(tile), line, chunk);
}

// One of the two matrices: `others` are the rows of a, or the columns of b.
template <class T, class At>
struct Side {
  const T* data;
  At at;  // at.a(o): position of the o-th other, in elements
  int64_t depth_stride;
  bool whole;  // chunks are aligned
};

// The lines of a tile are consecutive others of one matrix.
template <class At>
inline constexpr int kMatrices = 1;
template <class At>
ARK_LOOP int nth_other(const At&, int line) {
  return line;
}
template <class At>
ARK_LOOP int64_t nth_matrix(const At&, int) {
  return 0;
}

// Of a dual product (dual.cuh): kRun columns of the first matrix alternate with the same columns of the second one, so
// that one thread gets both sums of an element, as tiles are shared out.
template <int kRun>
struct DualColumns {
  int64_t column, apart;  // strides of a column, and from the first matrix to the second
  ARK_LOOP int64_t a(int c) const { return c * column; }
};
template <int kRun>
inline constexpr int kMatrices<DualColumns<kRun>> = 2;
template <int kRun>
ARK_LOOP int nth_other(const DualColumns<kRun>&, int line) {
  return line / (2 * kRun) * kRun + line % kRun;
}
template <int kRun>
ARK_LOOP int64_t nth_matrix(const DualColumns<kRun>& at, int line) {
  return line / kRun % 2 == 0 ? 0 : at.apart;
}

// For aligned chunks: a thread keeps the address of each of its chunks and advances it along the depth.
template <int kOthers, bool kAcross, class T, class At>
class ChunkCopy {
  static constexpr int kPer = kPerChunk<T>, kDepth = kTileDepth<T>;
  static constexpr int kLines = kAcross ? (kOthers + kDepth - 1) / kDepth * kDepth : kOthers;
  static constexpr int kChunks = kLines * 8, kTurns = (kChunks + kThreads - 1) / kThreads;

 public:
  static constexpr int kBytes = kLines * kLineBytes;

  ARK_LOOP ChunkCopy()
      : to_(pinned(shared_address(tile_chunk < kAcross && sizeof(T) == 4 > (workspace(), line_of(0), chunk())))) {}

  // The next tile has others from o0 and starts at depth 0; others end at o1.
  ARK_LOOP void start(const Side<T, At>& side, int o0, int o1) {
    ARK_UNROLL for (int turn = 0; turn < kTurns; ++turn) {
      const int line = line_of(turn);
      const int n = kAcross ? line / kDepth * kDepth + chunk() * kPer : line, o = o0 + nth_other(side.at, n);
      const T* const other = side.data + nth_matrix(side.at, n) + side.at.a(o < o1 ? o : o0);
      from_[turn] = kAcross ? other + line % kDepth * side.depth_stride : other + chunk() * kPer;
      count_[turn] = o >= o1 ? 0 : kAcross ? least(o1 - o, kPer) : kPer;
    }
  }

  // Copies one line's depth, from depth d, to offset `at` of the workspace. Depths must be consecutive.
  ARK_LOOP void copy(int at, const Side<T, At>& side, int d, int depth) {
    ARK_UNROLL for (int turn = 0; turn < kTurns; ++turn) {
      const int line = line_of(turn);
      if (kChunks % kThreads != 0 && line >= kLines) break;
      const uint32 to = to_ + at + turn * (kThreads / 8 * kLineBytes);
      if (!kAcross && depth % kDepth == 0) {
        // Missing others do not affect the present ones: their memory may contain anything.
        if (count_[turn] != 0) copy_16(to, from_[turn]);
      } else {
        const int left = depth - d - (kAcross ? line % kDepth : chunk() * kPer);
        const int count = left <= 0 ? 0 : kAcross ? count_[turn] : least(left, count_[turn]);
        copy_16(to, from_[turn], count * static_cast<int>(sizeof(T)));
      }
      from_[turn] += kDepth * side.depth_stride;
    }
  }

 private:
  // Eight threads copy a line.
  ARK_LOOP int line_of(int turn) const { return turn * (kThreads / 8) + self_ / 8; }
  ARK_LOOP int chunk() const { return self_ % 8; }

  const int self_ = thread_anew();  // re-read: no register keeps anything of it across tiles
  uint32 to_;
  const T* from_[kTurns] = {};
  int count_[kTurns] = {};  // elements present: of others (lines across), else all or none
};

// Anything else: element by element.
template <int kOthers, bool kAcross, class T, class At>
class ElementCopy {
  static constexpr int kPer = kPerChunk<T>, kDepth = kTileDepth<T>;
  static constexpr int kLines = kAcross ? (kOthers + kDepth - 1) / kDepth * kDepth : kOthers;

 public:
  static constexpr int kBytes = kLines * kLineBytes;

  ARK_LOOP void start(const Side<T, At>&, int o0, int o1) {
    o0_ = o0;
    o1_ = o1;
  }

  ARK_LOOP void copy(int tile, const Side<T, At>& side, int d0, int depth) const {
    const bool depth_first = kAcross || side.depth_stride == 1;  // whether adjacent lanes differ in depth
    const int64_t step = kAcross ? 1 : side.depth_stride;
    _Pragma("unroll 1") for (int i = thread_anew(); i < kLines * 8; i += kThreads) {
      const int line = depth_first ? i / 8 : i % kLines, chunk = depth_first ? i % 8 : i / kLines;
      const int n = kAcross ? line / kDepth * kDepth + chunk * kPer : line, o = o0_ + nth_other(side.at, n);
      const int d = d0 + (kAcross ? line % kDepth : chunk * kPer);
      const int left = kAcross ? (d < depth ? o1_ - o : 0) : (o < o1_ ? depth - d : 0);
      const T* const from =
          left <= 0 ? side.data : side.data + nth_matrix(side.at, n) + side.at.a(o) + d * side.depth_stride;
      const int count = left <= 0 ? 0 : least(left, kPer);
      char* const to = tile_chunk < kAcross && sizeof(T) == 4 > (workspace() + tile, line, chunk);
      if constexpr (sizeof(T) == 4) {
        ARK_UNROLL for (int e = 0; e < kPer; ++e)
            copy_4(to + e * 4, e < count ? from + e * step : side.data, e < count ? 4 : 0);
      } else {
        Chunk elements{};
        ARK_UNROLL for (int e = 0; e < kPer; ++e) if (e < count) set_element(elements, e, from[e * step]);
        *reinterpret_cast<Chunk*>(to) = elements;
      }
    }
  }

 private:
  int o0_ = 0, o1_ = 0;
};

}  // namespace ark::loop
