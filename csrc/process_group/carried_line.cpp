// Large collectives of ranks that share machines, and their machine's link: along a line, from rank to rank.
//
// Sums go up the line: each rank adds its own elements to those that come from below, so that the order of additions is
// that of the ranks, and the last rank's results come down. Gathered blocks go both ways. Where the ranks of a machine
// stand next to each other, each byte crosses a link between machines once in each direction; a ring of w ranks takes
// 2 (w - 1) / w of that for a sum, and direct messages (carried_communicator.cpp) as many as ranks meet on the link.
#include <algorithm>

#include "process_group/carried_communicator.hpp"

namespace ark {

namespace {

constexpr size_t kLeastPiece = 128 << 10, kMostPiece = 512 << 10, kPieces = 32;
constexpr size_t kPiecesAhead = 4;  // pieces on their way from below while one is added up

// Whether sums are float32, and rounded to the type at their end.
bool is_widened(DType dtype) {
  return dtype == DType::f16 || dtype == DType::bf16 || dtype == DType::c32 ||
         (dtype >= DType::f8_e4m3fn && dtype <= DType::f8_e8m0fnu);
}

}  // namespace

// Several ranks on a machine, next to each other, and several machines.
bool CarriedCommunicator::is_line(const std::vector<int>& nodes) {
  const bool together = std::is_sorted(nodes.begin(), nodes.end());
  return together && !nodes.empty() && nodes.back() > 0 && nodes.back() + 1 < static_cast<int>(nodes.size());
}

// What comes from below travels in the tensor's own type, so it has to be that of the additions as well.
bool CarriedCommunicator::adds_in_line(const Descriptor& what) {
  if (what.op == ReduceOp::avg || what.op == ReduceOp::premul_sum) return false;
  return (what.op != ReduceOp::sum && what.op != ReduceOp::product) || !is_widened(what.dtype);
}

void CarriedCommunicator::reduce_in_line(CarriedMessages& messages, const Operation& operation, const void* in,
                                         void* out, size_t count) {
  using enum MessageChannel;
  const size_t element = size_of(operation.descriptor.dtype);
  const size_t piece = std::clamp(count * element / kPieces, kLeastPiece, kMostPiece) / element;
  const size_t pieces = (count + piece - 1) / piece;
  const bool first = rank_ == 0, last = rank_ + 1 == size_;
  const auto elements = [&](size_t k) { return std::min(piece, count - k * piece); };
  const auto of = [&](auto* data, size_t k) { return at_offset(data, k * piece * element); };
  scratch_.resize(std::max(scratch_.size(), kPiecesAhead * piece * element));
  const auto slot = [&](size_t k) { return scratch_.data() + k % kPiecesAhead * piece * element; };
  std::vector<size_t> from_below(pieces), from_above(pieces);
  const auto expect = [&](size_t k) {
    if (!first && k < pieces) from_below[k] = messages.receive(rank_ - 1, data, slot(k), elements(k) * element);
  };
  for (size_t k = 0; k < kPiecesAhead; ++k) expect(k);
  // Results of a piece come back when all ranks above have added to it; meanwhile the next ones go up.
  const size_t behind = last ? 0 : 2 * static_cast<size_t>(size_ - rank_);
  for (size_t step = 0; step < pieces + behind; ++step) {
    if (const size_t k = step; k < pieces) {
      if (!first) {
        messages.wait_for(from_below[k]);
        const void* sources[] = {slot(k), of(in, k)};
        add(operation, of(out, k), sources, 2, elements(k));
        expect(k + kPiecesAhead);
      }
      const void* result = first ? of(in, k) : of(out, k);
      if (last) {
        messages.send(rank_ - 1, results, result, elements(k) * element);
      } else {
        messages.send(rank_ + 1, data, result, elements(k) * element);
        from_above[k] = messages.receive(rank_ + 1, results, of(out, k), elements(k) * element);
      }
    }
    if (last || step < behind) continue;
    const size_t k = step - behind;
    messages.wait_for(from_above[k]);
    if (!first) messages.send(rank_ - 1, results, of(out, k), elements(k) * element);
  }
}

void CarriedCommunicator::gather_in_line(CarriedMessages& messages, const void* in, void* const* outs, size_t bytes) {
  using enum MessageChannel;
  const size_t pieces = (bytes + kMostPiece - 1) / kMostPiece;
  const auto size = [&](size_t k) { return std::min(kMostPiece, bytes - k * kMostPiece); };
  // Of rank `source`, towards one end of the line (-1 or 1): channels keep the two directions apart.
  struct Piece {
    int source, towards;
    size_t k, receive;
  };
  std::vector<Piece> coming;  // in the order in which neighbours send
  for (int distance = 1; distance < size_; ++distance) {
    for (size_t k = 0; k < pieces; ++k) {
      for (const int towards : {1, -1}) {
        const int source = rank_ - towards * distance;
        if (source < 0 || source >= size_) continue;
        const auto receive = messages.receive(rank_ - towards, data, at_offset(outs[source], k * kMostPiece), size(k));
        coming.push_back({source, towards, k, receive});
      }
    }
  }
  const auto pass = [&](const void* block, size_t k, int towards) {
    const int to = rank_ + towards;
    if (to >= 0 && to < size_) messages.send(to, data, at_offset(block, k * kMostPiece), size(k));
  };
  for (size_t k = 0; k < pieces; ++k)
    for (const int towards : {1, -1}) pass(in, k, towards);
  for (const Piece& piece : coming) {
    messages.wait_for(piece.receive);
    pass(outs[piece.source], piece.k, piece.towards);
  }
}

}  // namespace ark
