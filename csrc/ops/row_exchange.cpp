// Sends rows through the shared-memory exchange where that is possible, otherwise through buffers and all_to_all. This
// rank's own rows are computed in place, in parallel, after the exchange.
#include "ops/row_exchange.hpp"

#include <ATen/Parallel.h>

#include <cstring>

namespace ark::ops {

namespace {

constexpr int64_t kRowGrain = 16;

void through_buffers(const RowExchange& rows, Communicator& communicator, const Operation& operation) {
  const int size = communicator.size(), rank = communicator.rank();
  std::vector<std::vector<std::byte>> out(size), in(size);
  std::vector<Bytes> from;
  std::vector<MutableBytes> to;
  for (int r = 0; r < size; ++r) {
    out[r].resize(r == rank ? 0 : rows.sent[r] * rows.row_bytes);
    in[r].resize(r == rank ? 0 : rows.received[r] * rows.row_bytes);
    if (!out[r].empty()) rows.make(r, 0, static_cast<int64_t>(rows.sent[r]), out[r].data());
    from.push_back({out[r].data(), out[r].size()});
    to.push_back({in[r].data(), in[r].size()});
  }
  communicator.all_to_all(operation, from.data(), to.data());
  for (int r = 0; r < size; ++r) {
    const int64_t count = static_cast<int64_t>(in[r].size() / rows.row_bytes);
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(rows.place(r, i), in[r].data() + i * rows.row_bytes, rows.row_bytes);
  }
}

}  // namespace

void exchange_rows(const RowExchange& rows, Communicator& communicator, const Operation& operation) {
  const int rank = communicator.rank();
  const int64_t each = static_cast<int64_t>(rows.row_bytes);
  std::vector<uint64_t> sent, received;
  for (const uint64_t count : rows.sent) sent.push_back(count * rows.row_bytes);
  for (const uint64_t count : rows.received) received.push_back(count * rows.row_bytes);
  const auto produce = [&](int peer, uint64_t at, size_t bytes, std::byte* slot) {
    rows.make(peer, static_cast<int64_t>(at) / each, static_cast<int64_t>(bytes) / each, slot);
  };
  const auto consume = [&](int peer, uint64_t at, size_t bytes, const std::byte* slot) {
    const int64_t first = static_cast<int64_t>(at) / each, count = static_cast<int64_t>(bytes) / each;
    for (int64_t i = 0; i < count; ++i) std::memcpy(rows.place(peer, first + i), slot + i * each, rows.row_bytes);
  };
  auto* const shm = dynamic_cast<ShmCommunicator*>(&communicator);
  if (shm == nullptr || !shm->exchange(operation, sent.data(), received.data(), rows.row_bytes, produce, consume))
    through_buffers(rows, communicator, operation);
  at::parallel_for(0, static_cast<int64_t>(rows.sent[rank]), kRowGrain, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) rows.make(rank, i, 1, rows.place(rank, i));
  });
}

}  // namespace ark::ops
