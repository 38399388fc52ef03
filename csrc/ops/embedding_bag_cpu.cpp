// On CPU tensors: bags are pooled into the memory that ranks share, piece by piece, and taken from there to their
// place.
//
// Rows travel in the order [sample, table], so that those of a sample lie side by side on both ends. A rank's own rows
// go to their place at once. A group that shares no memory, and rows longer than a piece, take a buffer and the
// communicator's all_to_all.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>

#include "collectives/shm_communicator.hpp"
#include "ops/bags_cpu.hpp"

namespace ark::ops {

namespace {

// Rows that ranks send each other: how many, what makes them, and where each belongs.
struct RowExchange {
  uint64_t row_bytes;
  std::vector<uint64_t> sent, received;                                            // rows, by rank
  std::function<void(int peer, int64_t first, int64_t rows, std::byte* to)> make;  // one behind the other
  std::function<std::byte*(int peer, int64_t row)> place;
};

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

void run(const RowExchange& rows, Communicator& communicator, const Operation& operation) {
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
  at::parallel_for(0, static_cast<int64_t>(rows.sent[rank]), kGrain, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) rows.make(rank, i, 1, rows.place(rank, i));
  });
}

template <class T, class I>
std::vector<Bags<T, I>> all_bags(const BagArguments& bags) {
  std::vector<Bags<T, I>> tables;
  for (size_t t = 0; t < bags.tables.size(); ++t) tables.push_back(typed_bags<T, I>(bags, t));
  return tables;
}

}  // namespace

at::Tensor forward_cpu(const BagArguments& bags, const Layout& layout, ProcessGroupArk& group) {
  const int size = group.getSize(), rank = group.getRank();
  const int64_t batch = layout.batch, all = layout.all(), mine = layout.tables[rank];
  at::Tensor out = at::empty({batch, all, layout.dim}, at::TensorOptions(layout.dtype));
  RowExchange rows;
  rows.row_bytes = static_cast<uint64_t>(layout.dim) * out.element_size();
  for (int r = 0; r < size; ++r) {
    rows.sent.push_back(static_cast<uint64_t>(batch * mine));
    rows.received.push_back(static_cast<uint64_t>(batch * layout.tables[r]));
  }
  auto* const data = static_cast<std::byte*>(out.data_ptr());
  rows.place = [&](int peer, int64_t row) {
    const int64_t sample = row / layout.tables[peer], table = row % layout.tables[peer] + layout.first(peer);
    return data + static_cast<uint64_t>(sample * all + table) * rows.row_bytes;
  };
  with_types(layout.dtype, bags, [&](auto element, auto index) {
    using T = decltype(element);
    using I = decltype(index);
    const std::vector<Bags<T, I>> tables = all_bags<T, I>(bags);
    rows.make = [&](int peer, int64_t first, int64_t count, std::byte* to) {
      at::parallel_for(0, count, kGrain, [&](int64_t from, int64_t until) {
        std::vector<Sum<T>> sums(static_cast<size_t>(layout.dim));
        for (int64_t i = from; i < until; ++i) {
          const int64_t sample = (first + i) / mine, table = (first + i) % mine;
          pool(tables[table], peer * batch + sample, reinterpret_cast<T*>(to + i * rows.row_bytes), sums.data());
        }
      });
    };
    group.run_fused("embedding_bag_all_to_all", out, layout.fingerprint(),
                    [&](Communicator& communicator, const Operation& op) { run(rows, communicator, op); });
  });
  return out;
}

at::Tensor gather_gradient_cpu(const BagArguments&, const Layout& layout, ProcessGroupArk& group,
                               const at::Tensor& gradient) {
  const int size = group.getSize(), rank = group.getRank();
  const int64_t batch = layout.batch, all = layout.all(), mine = layout.tables[rank];
  at::Tensor of_bags = at::empty({mine, size * batch, layout.dim}, gradient.options());
  RowExchange rows;
  rows.row_bytes = static_cast<uint64_t>(layout.dim) * gradient.element_size();
  for (int r = 0; r < size; ++r) {
    rows.sent.push_back(static_cast<uint64_t>(batch * layout.tables[r]));
    rows.received.push_back(static_cast<uint64_t>(batch * mine));
  }
  const auto* const from = static_cast<const std::byte*>(gradient.const_data_ptr());
  auto* const data = static_cast<std::byte*>(of_bags.data_ptr());
  rows.make = [&](int peer, int64_t first, int64_t count, std::byte* to) {
    const int64_t theirs = layout.tables[peer], begin = layout.first(peer);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t sample = (first + i) / theirs, table = begin + (first + i) % theirs;
      std::memcpy(to + i * rows.row_bytes, from + static_cast<uint64_t>(sample * all + table) * rows.row_bytes,
                  rows.row_bytes);
    }
  };
  rows.place = [&](int peer, int64_t row) {
    const int64_t sample = row / mine, table = row % mine;
    return data + static_cast<uint64_t>(table * size * batch + peer * batch + sample) * rows.row_bytes;
  };
  group.run_fused("embedding_bag_all_to_all_backward", gradient, layout.fingerprint() ^ 2,
                  [&](Communicator& communicator, const Operation& op) { run(rows, communicator, op); });
  return of_bags;
}

}  // namespace ark::ops
