// Gradients of the tables' rows on CPU tensors, returned as dense or sparse tensors or applied in place.
//
// In each case a row's gradient is the same float32 sum (float64 for float64): the contributions of its bags, in index
// order, in parts (pooling.hpp). Rows are independent, so threads share them.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "ops/bags_cpu.hpp"

namespace ark::ops {

namespace {

// The entries of a table's bags grouped by row, in index order within a row.
struct EntriesByRow {
  std::vector<int64_t> order, bag_of;
  std::vector<int64_t> begins;  // of each used row in `order`, and the end

  int64_t rows() const { return static_cast<int64_t>(begins.size()) - 1; }
};

template <class T, class I>
EntriesByRow entries_by_row(const Bags<T, I>& table) {
  EntriesByRow by_row;
  const int64_t count = table.bags > 0 ? table.end(table.bags - 1) : 0;  // later entries are in no bag
  by_row.bag_of.resize(static_cast<size_t>(count));
  for (int64_t bag = 0; bag < table.bags; ++bag)
    std::fill(by_row.bag_of.begin() + table.begin(bag), by_row.bag_of.begin() + table.end(bag), bag);
  by_row.order.resize(static_cast<size_t>(count));
  std::iota(by_row.order.begin(), by_row.order.end(), int64_t{0});
  std::stable_sort(by_row.order.begin(), by_row.order.end(),
                   [&](int64_t one, int64_t other) { return table.indices[one] < table.indices[other]; });
  for (int64_t i = 0; i < count; ++i)
    if (i == 0 || table.indices[by_row.order[i]] != table.indices[by_row.order[i - 1]]) by_row.begins.push_back(i);
  by_row.begins.push_back(count);
  return by_row;
}

// Calls finish(n, row, gradient) for the n-th row that bags use, in any order and from several threads.
template <class T, class I, class Finish>
void sum_rows(const Bags<T, I>& table, const EntriesByRow& by_row, const T* of_bags, const Finish& finish) {
  at::parallel_for(0, by_row.rows(), kGrain, [&](int64_t from, int64_t to) {
    std::vector<Sum<T>> sums(static_cast<size_t>(table.dim)), part(sums.size());
    for (int64_t n = from; n < to; ++n) {
      const int64_t begin = by_row.begins[n], end = by_row.begins[n + 1];
      for (int64_t first = begin; first < end; first += kRowPart) {
        std::fill(part.begin(), part.end(), Sum<T>{0});
        for (int64_t i = first; i < std::min(end, first + kRowPart); ++i) {
          const int64_t entry = by_row.order[i], bag = by_row.bag_of[entry];
          add_gradient(table, entry, table.end(bag) - table.begin(bag), of_bags + bag * table.dim, part.data());
        }
        if (first == begin) {
          sums.swap(part);
        } else {
          for (int64_t c = 0; c < table.dim; ++c) sums[c] += part[c];
        }
      }
      finish(n, int64_t{table.indices[by_row.order[begin]]}, sums.data());
    }
  });
}

template <class T>
void store(const Sum<T>* sums, int64_t dim, T* to) {
  for (int64_t c = 0; c < dim; ++c) to[c] = rounded<T>(sums[c]);
}

// row -= step * gradient. The product is rounded before it is subtracted.
template <class T>
void descend(const Sum<T>* gradient, int64_t dim, Sum<T> step, T* row) {
  for (int64_t c = 0; c < dim; ++c) row[c] = rounded<T>(static_cast<Sum<T>>(row[c]) - step * gradient[c]);
}

template <class T>
Sum<T> rate_of(const RowUpdate& update) {
  return update.rate->scalar_type() == at::kDouble ? static_cast<Sum<T>>(*update.rate->const_data_ptr<double>())
                                                   : static_cast<Sum<T>>(*update.rate->const_data_ptr<float>());
}

// The gradient of table t; undefined if it is applied in place.
template <class T, class I>
at::Tensor gradient_of(const BagArguments& bags, size_t t, const T* of_bags) {
  const Bags<T, I> table = typed_bags<T, I>(bags, t);
  const at::Tensor& rows = bags.tables[t];
  const EntriesByRow by_row = entries_by_row(table);
  const int64_t dim = table.dim;
  const auto each = [&](const auto& finish) { sum_rows(table, by_row, of_bags, finish); };
  if (bags.update.kind == "dense") {
    at::Tensor made = at::zeros_like(rows);
    T* const to = made.mutable_data_ptr<T>();
    each([&](int64_t, int64_t row, const Sum<T>* sums) { store(sums, dim, to + row * dim); });
    return made;
  }
  if (bags.update.kind == "sparse") {
    const at::Tensor named = at::empty({by_row.rows()}, at::kLong);
    const at::Tensor values = at::empty({by_row.rows(), dim}, rows.options());
    auto* const names = named.mutable_data_ptr<int64_t>();
    T* const to = values.mutable_data_ptr<T>();
    each([&](int64_t n, int64_t row, const Sum<T>* sums) {
      names[n] = row;
      store(sums, dim, to + n * dim);
    });
    return sparse_gradient(named, values, rows);
  }
  T* const data = rows.mutable_data_ptr<T>();
  const Sum<T> rate = rate_of<T>(bags.update);
  if (!bags.update.adapts()) {
    each([&](int64_t, int64_t row, const Sum<T>* sums) { descend(sums, dim, rate, data + row * dim); });
    return {};
  }
  auto* const state = bags.update.state[t].mutable_data_ptr<Sum<T>>();
  const auto eps = static_cast<Sum<T>>(bags.update.eps);
  each([&](int64_t, int64_t row, const Sum<T>* sums) {
    state[row] += mean_of_squares(sums, dim);
    descend(sums, dim, rate / (std::sqrt(state[row]) + eps), data + row * dim);
  });
  return {};
}

}  // namespace

std::vector<at::Tensor> table_gradients_cpu(const BagArguments& bags, const at::Tensor& of_bags) {
  std::vector<at::Tensor> made;
  for (size_t t = 0; t < bags.tables.size(); ++t) {
    with_types(bags.tables[t].scalar_type(), bags, [&](auto element, auto index) {
      using T = decltype(element);
      using I = decltype(index);
      at::Tensor gradient =
          gradient_of<T, I>(bags, t, of_bags.select(0, static_cast<int64_t>(t)).template const_data_ptr<T>());
      if (gradient.defined()) made.push_back(std::move(gradient));
    });
  }
  return made;
}
// On a GPU it uses PyTorch's operators: they read rows again and add products in an order of their own.
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
