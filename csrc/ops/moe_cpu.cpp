// Mixtures of experts on CPU tensors: rows go from the token's tensor to the expert's block and back through shared
// memory (row_exchange.hpp), in slot order (moe_routing.hpp).
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>

#include "ops/moe.hpp"
#include "ops/pooling.hpp"
#include "ops/row_exchange.hpp"

namespace ark::ops {

namespace {

constexpr int64_t kTokenGrain = 16;

template <class Body>
void with_type(at::ScalarType type, Body&& body) {
  switch (type) {
    case at::kDouble: return body(double{});
    case at::kFloat: return body(float{});
    case at::kHalf: return body(c10::Half{});
    default: return body(c10::BFloat16{});
  }
}

uint64_t fingerprint(const MoeRouting& routing, uint64_t row_bytes, uint64_t salt) {
  uint64_t hash = salt;
  const auto add = [&](int64_t value) {
    hash = (hash ^ static_cast<uint64_t>(value)) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 29;
  };
  for (int r = 0; r < routing.ranks(); ++r)
    for (int64_t e = 0; e < routing.experts(); ++e) add(routing.count(r, e));
  add(static_cast<int64_t>(row_bytes));
  return hash | 1;
}

RowExchange exchange_of(const MoeRouting& routing, int rank, uint64_t row_bytes, bool returns) {
  RowExchange rows;
  rows.row_bytes = row_bytes;
  for (int r = 0; r < routing.ranks(); ++r) {
    const auto to = static_cast<uint64_t>(routing.sent(rank, r)), from = static_cast<uint64_t>(routing.sent(r, rank));
    rows.sent.push_back(returns ? from : to), rows.received.push_back(returns ? to : from);
  }
  return rows;
}

std::vector<std::vector<int64_t>> rows_by_source(const MoeRouting& routing, int rank) {
  std::vector<std::vector<int64_t>> rows;
  for (int r = 0; r < routing.ranks(); ++r) rows.push_back(routing.rows_of(r, rank));
  return rows;
}

// Sends rows of x, one per token or one per choice, to the blocks of their experts.
at::Tensor send_rows(const char* name, const at::Tensor& x, const at::Tensor& places, const MoeRouting& routing,
                     const std::optional<at::Tensor>& weights, int64_t max_rows, ProcessGroupArk& group) {
  const int rank = group.getRank();
  const int64_t dim = x.size(-1), k = places.size(2);
  const std::vector<int64_t> choices = choices_of(places, routing, {rank, name});
  const auto theirs = rows_by_source(routing, rank);
  at::Tensor out = at::empty({max_rows, dim}, x.options());
  const int64_t used = routing.rows(rank);
  out.narrow(0, used, max_rows - used).zero_();
  if (dim == 0) return out;
  RowExchange rows = exchange_of(routing, rank, static_cast<uint64_t>(dim) * x.element_size(), false);
  auto* const data = static_cast<std::byte*>(out.mutable_data_ptr());
  rows.place = [&](int peer, int64_t row) { return data + static_cast<uint64_t>(theirs[peer][row]) * rows.row_bytes; };
  with_type(x.scalar_type(), [&](auto element) {
    using T = decltype(element);
    const T* const from = x.const_data_ptr<T>();
    const Sum<T>* const weight = weights ? weights->const_data_ptr<Sum<T>>() : nullptr;
    const bool each = x.dim() == 3;
    rows.make = [&, from, weight, each](int peer, int64_t first, int64_t count, std::byte* to) {
      const int64_t slot = routing.first_slot_of(rank, peer) + first;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t choice = choices[slot + i];
        const T* const row = from + (each ? choice : choice / k) * dim;
        T* const made = reinterpret_cast<T*>(to + i * rows.row_bytes);
        if (weight == nullptr) {
          std::memcpy(made, row, rows.row_bytes);
        } else {
          for (int64_t c = 0; c < dim; ++c) made[c] = rounded<T>(static_cast<Sum<T>>(row[c]) * weight[choice]);
        }
      }
    };
    group.run_fused(name, out, fingerprint(routing, rows.row_bytes, 7),
                    [&](Communicator& communicator, const Operation& op) { exchange_rows(rows, communicator, op); });
  });
  return out;
}

}  // namespace

std::vector<int64_t> choices_of(const at::Tensor& places, const MoeRouting& routing, const CallSite& site) {
  const at::Tensor slots = places.select(0, 1);
  const int32_t* const slot = slots.const_data_ptr<int32_t>();
  std::vector<int64_t> choices(static_cast<size_t>(routing.choices(site.rank)), -1);
  int64_t found = 0;
  for (int64_t i = 0; i < slots.numel(); ++i) {
    if (slot[i] < 0) continue;
    if (slot[i] < static_cast<int64_t>(choices.size()) && choices[slot[i]] < 0) choices[slot[i]] = i, ++found;
  }
  if (found != static_cast<int64_t>(choices.size()))
    refuse(site, ErrorKind::invalid_argument, "the handle's places and rank_counts are not of one dispatch",
           "Pass what moe_dispatch returned.");
  return choices;
}

MoeRoute moe_route(const MoeDispatch& call, ProcessGroupArk& group) {
  const int rank = group.getRank(), size = group.getSize();
  const at::Tensor ids = call.topk_ids.to(at::kLong);
  const int64_t* const id = ids.const_data_ptr<int64_t>();
  check_ids({rank, call.name()}, ids, call.experts);
  std::vector<int64_t> mine(static_cast<size_t>(call.experts));
  for (int64_t i = 0; i < ids.numel(); ++i)
    if (id[i] >= 0) ++mine[static_cast<size_t>(id[i])];
  std::vector<int64_t> all;
  for (const auto& counts : tell_all(group, mine)) all.insert(all.end(), counts.begin(), counts.end());
  MoeRouting routing(size, call.experts, std::move(all));
  check_rows(routing, call.max_rows, rank);

  const auto integers = at::TensorOptions(at::kInt);
  at::Tensor rank_counts = at::empty({size, call.experts}, integers);
  for (int r = 0; r < size; ++r)
    for (int64_t e = 0; e < call.experts; ++e)
      rank_counts.mutable_data_ptr<int32_t>()[r * call.experts + e] = static_cast<int32_t>(routing.count(r, e));
  at::Tensor places = at::empty({2, ids.size(0), ids.size(1)}, integers);
  int32_t* const row = places.mutable_data_ptr<int32_t>();
  routing.place(rank, id, ids.numel(), row, row + ids.numel());
  at::Tensor counts = rank_counts.narrow(1, rank * routing.local(), routing.local()).sum(0, false, at::kLong);
  return {std::move(routing), counts, places, rank_counts};
}

MoeDispatched moe_dispatch_cpu(const MoeDispatch& call, ProcessGroupArk& group) {
  const auto [routing, counts, places, rank_counts] = moe_route(call, group);
  at::Tensor rows = send_rows("moe_dispatch", call.x, places, routing, std::nullopt, call.max_rows, group);
  return {rows, counts, places, rank_counts};
}

at::Tensor moe_scatter_cpu(const MoeRows& call, ProcessGroupArk& group) {
  const MoeRouting routing = routing_of(call.rank_counts);
  check_rows(routing, call.max_rows, group.getRank());
  return send_rows("moe_scatter", call.rows, call.places, routing, call.weights, call.max_rows, group);
}

at::Tensor moe_gather_cpu(const MoeRows& call, ProcessGroupArk& group) {
  constexpr const char* kName = "moe_combine";
  const int rank = group.getRank();
  const MoeRouting routing = routing_of(call.rank_counts);
  check_rows(routing, call.rows.size(0), rank);
  const int64_t dim = call.dim(), tokens = call.tokens(), k = call.k();
  const auto theirs = rows_by_source(routing, rank);
  std::vector<int64_t> sizes{tokens, dim};
  if (!call.summed) sizes.insert(sizes.begin() + 1, k);
  at::Tensor out = at::zeros(sizes, call.rows.options());
  if (dim == 0) return out;
  at::Tensor slots = at::empty({routing.choices(rank), dim}, call.rows.options());
  RowExchange rows = exchange_of(routing, rank, static_cast<uint64_t>(dim) * call.rows.element_size(), true);
  const auto* const from = static_cast<const std::byte*>(call.rows.const_data_ptr());
  auto* const data = static_cast<std::byte*>(slots.mutable_data_ptr());
  rows.make = [&](int peer, int64_t first, int64_t count, std::byte* to) {
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(to + i * rows.row_bytes, from + static_cast<uint64_t>(theirs[peer][first + i]) * rows.row_bytes,
                  rows.row_bytes);
  };
  rows.place = [&](int peer, int64_t row) {
    return data + static_cast<uint64_t>(routing.first_slot_of(rank, peer) + row) * rows.row_bytes;
  };
  group.run_fused(kName, out, fingerprint(routing, rows.row_bytes, 9),
                  [&](Communicator& communicator, const Operation& op) { exchange_rows(rows, communicator, op); });
  const at::Tensor slot_of = call.places.select(0, 1);
  const int32_t* const slot = slot_of.const_data_ptr<int32_t>();
  with_type(call.rows.scalar_type(), [&](auto element) {
    using T = decltype(element);
    const T* const brought = slots.const_data_ptr<T>();
    const Sum<T>* const weight = call.weights ? call.weights->const_data_ptr<Sum<T>>() : nullptr;
    T* const to = out.mutable_data_ptr<T>();
    at::parallel_for(0, tokens, kTokenGrain, [&](int64_t begin, int64_t end) {
      std::vector<Sum<T>> sums(static_cast<size_t>(dim));
      for (int64_t t = begin; t < end; ++t) {
        std::fill(sums.begin(), sums.end(), Sum<T>{0});
        for (int64_t i = t * k; i < (t + 1) * k; ++i) {
          if (slot[i] < 0) continue;
          const T* const row = brought + slot[i] * dim;
          const auto value = [&](int64_t c) {
            return weight == nullptr ? static_cast<Sum<T>>(row[c]) : static_cast<Sum<T>>(row[c]) * weight[i];
          };
          if (call.summed)
            for (int64_t c = 0; c < dim; ++c) sums[c] += value(c);
          else
            for (int64_t c = 0; c < dim; ++c) to[i * dim + c] = rounded<T>(value(c));
        }
        if (!call.summed) continue;
        for (int64_t c = 0; c < dim; ++c) to[t * dim + c] = rounded<T>(sums[c]);
      }
    });
  });
  return out;
}

}  // namespace ark::ops
