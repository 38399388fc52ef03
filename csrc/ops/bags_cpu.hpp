// Converts the arguments of embedding_bag_all_to_all on CPU tensors for the loops of pooling.hpp.
#pragma once

#include "ops/embedding_bag.hpp"
#include "ops/pooling.hpp"

namespace ark::ops {

inline constexpr int64_t kGrain = 16;  // fewest rows per thread

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

// Calls body(T{}, I{}) with the types of these tables and indices.
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

}  // namespace ark::ops
