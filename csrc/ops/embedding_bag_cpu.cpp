// On CPU tensors: bags are pooled into the memory that ranks share, piece by piece, and taken from there to their
// place.
//
// Rows travel in the order [sample, table], so that those of a sample lie side by side on both ends (row_exchange.hpp).
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "ops/embedding_bag.hpp"
#include "ops/pooling.hpp"
#include "ops/row_exchange.hpp"

namespace ark::ops {

namespace {

constexpr int64_t kGrain = 16;  // rows

template <class T, class I>
Bags<T, I> typed_bags(const BagArguments& bags, size_t t) {
  const at::Tensor& offsets = bags.offsets[t];
  return {bags.tables[t].const_data_ptr<T>(),
          bags.indices[t].const_data_ptr<I>(),
          offsets.const_data_ptr<I>(),
          bags.weights.empty() ? nullptr : bags.weights[t].const_data_ptr<T>(),
          bags.tables[t].size(1),
          bags.indices[t].numel(),
          offsets.numel() - (bags.last_offset ? 1 : 0),
          bags.mode == "mean",
          bags.last_offset};
}

template <class T, class I>
std::vector<Bags<T, I>> all_bags(const BagArguments& bags) {
  std::vector<Bags<T, I>> tables;
  for (size_t t = 0; t < bags.tables.size(); ++t) tables.push_back(typed_bags<T, I>(bags, t));
  return tables;
}

// body(T{}, I{}) for the types of these tables and indices.
template <class Body>
void with_types(at::ScalarType type, const BagArguments& bags, Body&& body) {
  const bool narrow = !bags.indices.empty() && bags.indices[0].scalar_type() == at::kInt;
  const auto pick = [&](auto element) {
    if (narrow)
      body(element, int32_t{});
    else
      body(element, int64_t{});
  };
  switch (type) {
    case at::kDouble: return pick(double{});
    case at::kFloat: return pick(float{});
    case at::kHalf: return pick(c10::Half{});
    default: return pick(c10::BFloat16{});
  }
}

template <class T, class I>
void sum_rows(const BagArguments& bags, size_t t, const T* of_bags, T* out) {
  const Bags<T, I> table = typed_bags<T, I>(bags, t);
  std::vector<int64_t> order(static_cast<size_t>(table.entries)), bag_of(order.size(), -1);
  for (int64_t bag = 0; bag < table.bags; ++bag)
    std::fill(bag_of.begin() + table.begin(bag), bag_of.begin() + table.end(bag), bag);
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t one, int64_t other) { return table.indices[one] < table.indices[other]; });
  std::vector<int64_t> begins;  // of each row that is named
  for (int64_t i = 0; i < table.entries; ++i)
    if (i == 0 || table.indices[order[i]] != table.indices[order[i - 1]]) begins.push_back(i);
  const int64_t named = static_cast<int64_t>(begins.size());
  begins.push_back(table.entries);
  at::parallel_for(0, named, kGrain, [&](int64_t from, int64_t to) {
    std::vector<Sum<T>> sums(static_cast<size_t>(table.dim));
    for (int64_t n = from; n < to; ++n) {
      std::fill(sums.begin(), sums.end(), Sum<T>{0});
      for (int64_t i = begins[n]; i < begins[n + 1]; ++i) {
        const int64_t entry = order[i], bag = bag_of[entry];
        if (bag < 0) continue;  // behind the last offset
        add_gradient(table, entry, table.end(bag) - table.begin(bag), of_bags + bag * table.dim, sums.data());
      }
      T* const row = out + int64_t{table.indices[order[begins[n]]]} * table.dim;
      for (int64_t c = 0; c < table.dim; ++c) row[c] = rounded<T>(sums[c]);
    }
  });
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

std::vector<at::Tensor> table_gradients_cpu(const BagArguments& bags, const at::Tensor& of_bags) {
  std::vector<at::Tensor> made;
  for (size_t t = 0; t < bags.tables.size(); ++t) {
    made.push_back(at::zeros_like(bags.tables[t]));
    with_types(bags.tables[t].scalar_type(), bags, [&](auto element, auto index) {
      using T = decltype(element);
      using I = decltype(index);
      sum_rows<T, I>(bags, t, of_bags.select(0, static_cast<int64_t>(t)).const_data_ptr<T>(),
                     made.back().mutable_data_ptr<T>());
    });
  }
  return made;
}

// On a GPU by PyTorch's own operators: rows are read once more, and products summed in the order that it takes.
std::vector<at::Tensor> weight_gradients(const BagArguments& bags, const at::Tensor& of_bags) {
  std::vector<at::Tensor> made;
  for (size_t t = 0; t < bags.weights.size(); ++t) {
    const at::Tensor gradients = of_bags.select(0, static_cast<int64_t>(t));
    const int64_t entries = bags.indices[t].numel(), count = gradients.size(0);
    if (of_bags.is_cuda()) {
      const at::Tensor bag_of = bag_numbers(bags.offsets[t], entries, count);
      const at::Tensor in_bag = bag_of.lt(count);
      const at::Tensor rows = bags.tables[t].index_select(0, bags.indices[t]).to(at::kFloat);
      const at::Tensor theirs = gradients.index_select(0, bag_of.clamp_max(count - 1)).to(at::kFloat);
      made.push_back((rows * theirs).sum(1).mul_(in_bag).to(bags.weights[t].scalar_type()));
      continue;
    }
    made.push_back(at::zeros_like(bags.weights[t]));
    with_types(bags.tables[t].scalar_type(), bags, [&](auto element, auto index) {
      using T = decltype(element);
      using I = decltype(index);
      const Bags<T, I> table = typed_bags<T, I>(bags, t);
      const T* const from = gradients.const_data_ptr<T>();
      T* const to = made.back().mutable_data_ptr<T>();
      at::parallel_for(0, table.bags, kGrain, [&](int64_t begin, int64_t end) {
        for (int64_t bag = begin; bag < end; ++bag)
          for (int64_t i = table.begin(bag); i < table.end(bag); ++i)
            to[i] = weight_gradient(table, i, from + bag * table.dim);
      });
    });
  }
  return made;
}

}  // namespace ark::ops
