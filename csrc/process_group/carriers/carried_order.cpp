// Sums over several nodes in the order of all ranks (Options::flat_order), with the same bits as on one node.
//
// Partials of nodes would be added and rounded in another order, so every input goes to the rank that adds it. Each
// rank adds one part of a chunk with the arithmetic of a single node (collectives/cpu/reduce) and sends it to the ranks
// that want it. Both steps are block exchanges. For a tensor of n bytes each rank sends about 2 n bytes; with rails,
// the ranks of a node share the 2 n.
#include <algorithm>

#include "collectives/cpu/algorithms.hpp"
#include "process_group/carriers/carried_communicator.hpp"

namespace ark {

namespace {

constexpr size_t kOrderedChunk = 4 << 20;  // of all ranks' additions per step

}  // namespace

bool CarriedCommunicator::in_flat_order(const Descriptor& descriptor) const {
  return sums_.flat && depends_on_order(descriptor);
}

// An operation makes several such exchanges. The memory may be reused as soon as one returns.
void CarriedCommunicator::exchange_any(Exchange& exchange, const std::vector<Bytes>& ins,
                                       const std::vector<MutableBytes>& outs) {
  if (plan_.parcel_limit() > 0) {
    exchange_parcels(exchange, ins.data(), outs.data());
  } else {
    exchange_blocks(exchange, ins.data(), outs.data());
  }
  exchange.messages.wait_for_all();
}

const double* CarriedCommunicator::factors_of_ranks(Exchange& exchange) {
  if (exchange.operation.descriptor.op != ReduceOp::premul_sum) return nullptr;
  const double own = exchange.operation.factor;
  factors_.resize(size_);
  std::vector<Bytes> ins(size_, Bytes{&own, sizeof own});
  std::vector<MutableBytes> outs;
  for (double& factor : factors_) outs.push_back({&factor, sizeof factor});
  exchange_any(exchange, ins, outs);
  return factors_.data();
}

void CarriedCommunicator::reduce_in_order(Exchange& exchange, const void* in, void* out, size_t count, int root) {
  const Descriptor& what = exchange.operation.descriptor;
  const size_t element = size_of(what.dtype), chunk = kOrderedChunk / element;
  const ReduceFn reduce = find_reduce(what.dtype, what.op);
  const double* factors = factors_of_ranks(exchange);
  std::vector<Bytes> ins(size_);
  std::vector<MutableBytes> outs(size_);
  std::vector<const void*> sources(size_);
  size_t begin = 0;
  do {  // runs once without elements too, so that ranks compare descriptors
    const size_t elements = std::min(chunk, count - begin);
    const auto part = [&](int rank) { return part_of(elements, size_, rank, std::max<size_t>(1, kAlign / element)); };
    const size_t own = part(rank_).count * element;
    ordered_.resize(std::max(ordered_.size(), own * (size_ + 1)));
    std::byte* result = ordered_.data() + own * size_;
    for (int rank = 0; rank < size_; ++rank) {
      std::byte* come = ordered_.data() + own * rank;
      ins[rank] = {at_offset(in, (begin + part(rank).begin) * element), part(rank).count * element};
      outs[rank] = {come, own};
      sources[rank] = come;
    }
    exchange_any(exchange, ins, outs);
    if (own > 0) reduce(result, nullptr, sources.data(), size_, part(rank_).count, factors);
    const bool wants = root < 0 || root == rank_;
    for (int rank = 0; rank < size_; ++rank) {
      ins[rank] = {result, root < 0 || root == rank ? own : 0};
      outs[rank] = wants
                       ? MutableBytes{at_offset(out, (begin + part(rank).begin) * element), part(rank).count * element}
                       : MutableBytes{nullptr, 0};
    }
    exchange_any(exchange, ins, outs);
    begin += elements;
  } while (begin < count);
}

void CarriedCommunicator::reduce_blocks_in_order(Exchange& exchange, const void* const* blocks, void* out,
                                                 size_t count) {
  const Descriptor& what = exchange.operation.descriptor;
  const size_t element = size_of(what.dtype), chunk = std::max<size_t>(1, kOrderedChunk / element / size_);
  const ReduceFn reduce = find_reduce(what.dtype, what.op);
  const double* factors = factors_of_ranks(exchange);
  std::vector<Bytes> ins(size_);
  std::vector<MutableBytes> outs(size_);
  std::vector<const void*> sources(size_);
  size_t begin = 0;
  do {
    const size_t elements = std::min(chunk, count - begin), bytes = elements * element;
    ordered_.resize(std::max(ordered_.size(), bytes * size_));
    for (int rank = 0; rank < size_; ++rank) {
      std::byte* come = ordered_.data() + bytes * rank;
      ins[rank] = {at_offset(blocks[rank], begin * element), bytes};
      outs[rank] = {come, bytes};
      sources[rank] = come;
    }
    exchange_any(exchange, ins, outs);
    if (bytes > 0) reduce(at_offset(out, begin * element), nullptr, sources.data(), size_, elements, factors);
    begin += elements;
  } while (begin < count);
}

}  // namespace ark
