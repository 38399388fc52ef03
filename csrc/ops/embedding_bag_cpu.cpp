// embedding_bag_all_to_all on CPU tensors: bags are pooled piece by piece into shared memory and copied from there.
//
// Rows travel in the order [sample, table], so those of a sample are adjacent on both ends (row_exchange.hpp).
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>

#include "ops/bags_cpu.hpp"
#include "ops/row_exchange.hpp"

namespace ark::ops {

namespace {

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
                    [&](Communicator& communicator, const Operation& op) { exchange_rows(rows, communicator, op); });
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
                  [&](Communicator& communicator, const Operation& op) { exchange_rows(rows, communicator, op); });
  return of_bags;
}

}  // namespace ark::ops
