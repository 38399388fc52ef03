// Which buckets belong to which rank, and where their records lie.
//
// A tensor is made of segments, one behind another; a segment of buckets, whose last may be short. A bucket is never
// split over ranks. An all-reduce cuts all segments' buckets together into parts of about as many bytes, so that a few
// large segments and many small ones cost every rank the same; a part may be empty (more ranks than buckets). In a
// reduce-scatter and an all-gather a part is a rank's share. Records of a part lie one behind another, each a multiple
// of 8 bytes. All of it follows from the arguments alone, so every rank knows every part without a word.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "protocol/quantize.hpp"

namespace ark::compressed {

struct Segment {
  uint64_t numel;
  uint32_t bits, bucket;
};

struct Part {
  std::vector<quantize::Piece> pieces;  // `at` counts from the part's first byte
  uint64_t bytes = 0;
  uint64_t buckets = 0;
};

// The segments cut into parts of about as many bytes.
std::vector<Part> cut(const std::vector<Segment>& segments, uint32_t element_bytes, int parts);
// The same segments once for every share, one behind another.
std::vector<Part> shares_of(const std::vector<Segment>& segments, uint32_t element_bytes, int shares);

// Buckets [from, to) of a part, whose records begin at 0.
Part slice(const Part& part, uint32_t element_bytes, uint64_t from, uint64_t to);

// One bucket of a piece.
struct Bucket {
  const quantize::Piece* piece;
  uint64_t element, at;
  uint32_t numel, number;
};

// Calls body(bucket) for buckets [from, to) of a part.
template <class Body>
void for_buckets(const Part& part, uint32_t element_bytes, uint64_t from, uint64_t to, Body&& body) {
  uint64_t first = 0;  // of the piece
  for (const quantize::Piece& piece : part.pieces) {
    const uint64_t count = quantize::buckets_of(piece);
    const uint64_t stride = quantize::record_bytes(piece.bucket, piece.bits, element_bytes);
    for (uint64_t i = from > first ? from - first : 0; i < count && first + i < to; ++i) {
      const uint64_t left = piece.numel - i * piece.bucket;
      body(Bucket{&piece, piece.element + i * piece.bucket, piece.at + i * stride,
                  static_cast<uint32_t>(left < piece.bucket ? left : piece.bucket),
                  static_cast<uint32_t>(piece.number + i)});
    }
    first += count;
    if (first >= to) return;
  }
}

}  // namespace ark::compressed
