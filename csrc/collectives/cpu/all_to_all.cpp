// all_to_all with any split sizes, from buffers or computed while sent, and barrier.
//
// A rank only knows its own sizes, but all ranks must take the same number of rounds. So the first slot begins with the
// sizes that the writer sends to and expects from every rank, followed by the first piece for every peer. Every rank
// reads all of them. So a mismatch between any two ranks is an error on all, and every rank knows the longest exchange.
#include <algorithm>

#include "collectives/agreement.hpp"
#include "collectives/cpu/algorithms.hpp"

namespace ark {

void exchange(Rounds& rounds, const Operation& operation, const uint64_t* sent_bytes, const uint64_t* received_bytes,
              uint64_t unit, Produce produce, Consume consume, size_t chunk) {
  const int size = rounds.size(), rank = rounds.rank();
  const size_t row = align_up(2 * size * sizeof(uint64_t));
  const size_t most_piece = std::max<size_t>(kAlign, align_down(chunk / size));
  const size_t piece = most_piece / unit * unit;  // the caller ensures that a unit fits
  size_t longest = 0;
  for (int peer = 0; peer < size; ++peer) longest = std::max<size_t>(longest, peer == rank ? 0 : sent_bytes[peer]);
  rounds.begin(operation, row + std::min(align_up(longest), align_up(piece)) * size + piece);
  const uint64_t first = rounds.next();
  // Pieces are packed; the sizes tell where each peer's begins.
  auto length = [&](uint64_t total, size_t k) -> size_t {
    return k * piece >= total ? 0 : std::min<uint64_t>(piece, total - k * piece);
  };
  auto publish = [&](size_t k) {
    std::byte* slot = rounds.open(first + k);
    if (k == 0) {
      for (int peer = 0; peer < size; ++peer) {
        const uint64_t sent = peer == rank ? 0 : sent_bytes[peer];
        const uint64_t expected = peer == rank ? 0 : received_bytes[peer];
        copy_bytes(slot + peer * sizeof sent, &sent, sizeof sent);
        copy_bytes(slot + (size + peer) * sizeof expected, &expected, sizeof expected);
      }
    }
    std::byte* cursor = slot + row;
    for (int peer = 0; peer < size; ++peer) {
      const size_t bytes = peer == rank ? 0 : length(sent_bytes[peer], k);
      if (bytes > 0) produce(peer, k * piece, bytes, cursor);
      cursor += align_up(bytes);
    }
    rounds.publish(first + k);
  };

  publish(0);
  const size_t cells = static_cast<size_t>(size) * size;
  std::vector<uint64_t> matrix(cells, 0), expectations(cells, 0);
  for (int peer = 0; peer < size; ++peer) {
    uint64_t* sends = &matrix[static_cast<size_t>(peer) * size];
    uint64_t* expects = &expectations[static_cast<size_t>(peer) * size];
    if (peer != rank) {
      const std::byte* slot = rounds.read(first, peer);
      copy_bytes(sends, slot, size * sizeof(uint64_t));
      copy_bytes(expects, slot + size * sizeof(uint64_t), size * sizeof(uint64_t));
      continue;
    }
    for (int other = 0; other < size; ++other) {
      sends[other] = other == rank ? 0 : sent_bytes[other];
      expects[other] = other == rank ? 0 : received_bytes[other];
    }
  }
  for (int from = 0; from < size; ++from) {
    for (int to = 0; to < size; ++to) {
      const uint64_t sent = matrix[static_cast<size_t>(from) * size + to];
      const uint64_t expected = expectations[static_cast<size_t>(to) * size + from];
      if (const auto error =
              broken_promise(operation, rounds.name(rank), rounds.name(from), rounds.name(to), sent, expected))
        rounds.fail(*error);
    }
  }
  const uint64_t most = *std::max_element(matrix.begin(), matrix.end());
  const size_t pieces = std::max<size_t>(1, (most + piece - 1) / piece);
  for (size_t k = 0; k < pieces; ++k) {
    if (k + 1 < pieces) publish(k + 1);
    for (int step = 1; step < size; ++step) {
      const int peer = (rank + step) % size;
      const std::byte* cursor = rounds.read(first + k, peer) + row;
      for (int before = 0; before < rank; ++before) cursor += align_up(length(matrix[peer * size + before], k));
      const size_t bytes = length(matrix[peer * size + rank], k);
      if (bytes > 0) consume(peer, k * piece, bytes, cursor);
    }
    rounds.release(first + k);
  }
}

void all_to_all(Rounds& rounds, const Operation& operation, const Bytes* ins, const MutableBytes* outs, size_t chunk) {
  const int size = rounds.size(), rank = rounds.rank();
  std::vector<uint64_t> sent(size), received(size);
  uint64_t most = 0;
  for (int peer = 0; peer < size; ++peer) {
    sent[peer] = ins[peer].size, received[peer] = outs[peer].size;
    if (peer != rank) most = std::max({most, sent[peer], received[peer]});
  }
  const bool stream = most * size >= kStreamBytes;
  const auto produce = [&](int peer, uint64_t at, size_t bytes, std::byte* slot) {
    copy_bytes(slot, static_cast<const std::byte*>(ins[peer].data) + at, bytes);
  };
  const auto consume = [&](int peer, uint64_t at, size_t bytes, const std::byte* slot) {
    copy_out(static_cast<std::byte*>(outs[peer].data) + at, slot, bytes, stream);
  };
  exchange(rounds, operation, sent.data(), received.data(), 1, produce, consume, chunk);
  if (ins[rank].size > 0 && ins[rank].data != outs[rank].data)
    copy_bytes(outs[rank].data, ins[rank].data, std::min(ins[rank].size, outs[rank].size));
}

void barrier(Rounds& rounds, const Operation& operation) {
  rounds.begin(operation, 0);
  const uint64_t round = rounds.next();
  rounds.pass(round);
  for (int peer = 0; peer < rounds.size(); ++peer) {
    if (peer != rounds.rank()) rounds.read(round, peer);
  }
  rounds.release(round);
}

}  // namespace ark
