// Reduces within a node, then between nodes. Types that need a wider accumulator are converted in blocks that stay in
// the L1 cache. Partial results stay wide, so that the sum is rounded only once.
#include "collectives/cpu/staged_reduce.hpp"

#include <algorithm>
#include <vector>

namespace ark {

namespace {

constexpr size_t kStagedBlock = 1024;  // elements widened at a time

// The operations between nodes and within a node. AVG divides only in the second stage.
ReduceOp between_nodes(ReduceOp op) {
  return op == ReduceOp::premul_sum ? ReduceOp::sum : op;
}
ReduceOp within_node(ReduceOp op) {
  return op == ReduceOp::avg ? ReduceOp::sum : op;
}

const std::byte* bytes_from(const void* data, size_t bytes) {
  return static_cast<const std::byte*>(data) + bytes;
}

}  // namespace

StagedReduce::StagedReduce(DType dtype, ReduceOp op, int ranks, bool flat, bool wide)
    : dtype_(dtype), flat_(flat), ranks_(ranks), average_(op == ReduceOp::avg) {
  const bool exact = op == ReduceOp::min || op == ReduceOp::max;  // returns an input, so nothing is rounded
  widen_ = flat || exact || !wide ? nullptr : find_widen(dtype);
  narrow_ = widen_ ? find_narrow(dtype) : nullptr;
  scalars_ = dtype == DType::c32 ? 2 : 1;
  const DType partial = !widen_ ? dtype : dtype == DType::c32 ? DType::c64 : DType::f32;
  partial_size_ = size_of(partial);
  first_ = flat ? nullptr : find_reduce(partial, within_node(op));
  second_ = find_reduce(partial, flat ? op : between_nodes(op));
}

void StagedReduce::partial(void* out, const void* const* sources, int ranks, size_t count,
                           const double* factors) const {
  if (!widen_) return first_(out, nullptr, sources, ranks, count, factors);
  const size_t element = size_of(dtype_), most = std::min(kStagedBlock, count);
  std::vector<std::byte> wide(ranks * most * partial_size_);
  std::vector<const void*> blocks(ranks);
  for (int r = 0; r < ranks; ++r) blocks[r] = wide.data() + r * most * partial_size_;
  for (size_t begin = 0; begin < count; begin += most) {
    const size_t some = std::min(most, count - begin);
    for (int r = 0; r < ranks; ++r)
      widen_(const_cast<void*>(blocks[r]), bytes_from(sources[r], begin * element), some * scalars_);
    first_(static_cast<std::byte*>(out) + begin * partial_size_, nullptr, blocks.data(), ranks, some, factors);
  }
}

void StagedReduce::combine(void* out, const void* const* sources, int nodes, size_t count,
                           const double* factors) const {
  if (average_ && !flat_) factors = &ranks_;
  if (!narrow_) return second_(out, nullptr, sources, nodes, count, factors);
  const size_t element = size_of(dtype_), most = std::min(kStagedBlock, count);
  std::vector<std::byte> sum(most * partial_size_);
  std::vector<const void*> blocks(nodes);
  for (size_t begin = 0; begin < count; begin += most) {
    const size_t some = std::min(most, count - begin);
    for (int n = 0; n < nodes; ++n) blocks[n] = bytes_from(sources[n], begin * partial_size_);
    second_(sum.data(), nullptr, blocks.data(), nodes, some, factors);
    narrow_(static_cast<std::byte*>(out) + begin * element, sum.data(), some * scalars_);
  }
}

}  // namespace ark
