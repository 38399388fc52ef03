// Computes the parts of layout.hpp. A bucket belongs to the part in whose equal share of all bytes its record begins.
// So parts differ by about one bucket at most, and every rank finds the same limits without communication.
#include "collectives/compressed/layout.hpp"

#include <algorithm>

namespace ark::compressed {

namespace {

using quantize::Piece;
using quantize::record_bytes;

uint64_t bytes_of(const Segment& segment, uint32_t element_bytes) {
  const uint64_t whole = segment.numel / segment.bucket, rest = segment.numel % segment.bucket;
  return whole * record_bytes(segment.bucket, segment.bits, element_bytes) +
         (rest != 0 ? record_bytes(rest, segment.bits, element_bytes) : 0);
}

void append(Part& part, const Segment& segment, uint64_t element, uint64_t numel, uint64_t number,
            uint32_t element_bytes) {
  const Piece piece{element, part.bytes, numel, static_cast<uint32_t>(number), segment.bucket, segment.bits};
  part.bytes += bytes_of({numel, segment.bits, segment.bucket}, element_bytes);
  part.buckets += quantize::buckets_of(piece);
  part.pieces.push_back(piece);
}

}  // namespace

std::vector<Part> cut(const std::vector<Segment>& segments, uint32_t element_bytes, int parts) {
  uint64_t total = 0;
  for (const Segment& segment : segments) total += bytes_of(segment, element_bytes);
  const uint64_t count = static_cast<uint64_t>(parts);
  // Part r has the buckets whose first byte is in [bound(r), bound(r + 1)).
  const auto bound = [&](uint64_t r) { return total / count * r + total % count * r / count; };
  std::vector<Part> made(static_cast<size_t>(parts));
  uint64_t element = 0, at = 0, number = 0, r = 0;
  for (const Segment& segment : segments) {
    const uint64_t stride = record_bytes(segment.bucket, segment.bits, element_bytes);
    const uint64_t buckets = (segment.numel + segment.bucket - 1) / segment.bucket;
    for (uint64_t first = 0; first < buckets;) {
      while (r + 1 < count && bound(r + 1) <= at + first * stride) ++r;
      const uint64_t until =
          r + 1 < count ? std::min(buckets, (bound(r + 1) - at + stride - 1) / stride) : buckets;  // the end
      const uint64_t begin = first * segment.bucket, end = std::min(until * segment.bucket, segment.numel);
      append(made[r], segment, element + begin, end - begin, number + first, element_bytes);
      first = until;
    }
    element += segment.numel, at += bytes_of(segment, element_bytes), number += buckets;
  }
  return made;
}

std::vector<Part> shares_of(const std::vector<Segment>& segments, uint32_t element_bytes, int shares) {
  std::vector<Part> made(static_cast<size_t>(shares));
  uint64_t element = 0, number = 0;
  for (Part& part : made) {
    for (const Segment& segment : segments) {
      if (segment.numel != 0) append(part, segment, element, segment.numel, number, element_bytes);
      element += segment.numel;
      number += (segment.numel + segment.bucket - 1) / segment.bucket;
    }
  }
  return made;
}

Part slice(const Part& part, uint32_t element_bytes, uint64_t from, uint64_t to) {
  Part made;
  uint64_t first = 0;  // first bucket of the piece
  for (const Piece& piece : part.pieces) {
    const uint64_t count = quantize::buckets_of(piece);
    const uint64_t begin = std::max(from, first) - first, end = std::min(to, first + count) - std::min(to, first);
    if (begin < end) {
      const uint64_t element = begin * piece.bucket, numel = std::min(end * piece.bucket, piece.numel) - element;
      append(made, {numel, piece.bits, piece.bucket}, piece.element + element, numel, piece.number + begin,
             element_bytes);
    }
    first += count;
  }
  return made;
}

}  // namespace ark::compressed
