// Assigns buckets to ranks and places their records.
//
// A tensor consists of consecutive segments, and a segment of buckets, whose last may be short. A bucket is never split
// between ranks. all_reduce cuts the buckets of all segments into parts of nearly equal bytes, so every rank has the
// same work; with more ranks than buckets some parts are empty. In reduce_scatter and all_gather a part is one rank's
// share. A part's records are contiguous, each a multiple of 8 bytes. Every rank computes all parts from the arguments
// alone.
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
  std::vector<quantize::Piece> pieces;  // `at` is relative to the part's first byte
  uint64_t bytes = 0;
  uint64_t buckets = 0;
};

// Cuts the segments into parts of nearly equal bytes.
std::vector<Part> cut(const std::vector<Segment>& segments, uint32_t element_bytes, int parts);
// Repeats the segments once per share, one share after the other.
std::vector<Part> shares_of(const std::vector<Segment>& segments, uint32_t element_bytes, int shares);

// Returns buckets [from, to) of a part; their records begin at 0.
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
  uint64_t first = 0;  // first bucket of the piece
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
