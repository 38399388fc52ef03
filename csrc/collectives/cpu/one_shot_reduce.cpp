// One-shot all_reduce and reduce: every rank publishes its input in chunks, and ranks that want the result add all of
// them in rank order. There is one hand-over per chunk, but every reader reads every input, so it suits small tensors,
// or two ranks at any size. Chunk k+1 is published before chunk k is added. That also allows in-place results, because
// a chunk is overwritten only after it was published.
#include <algorithm>

#include "collectives/cpu/algorithms.hpp"

namespace ark {

const double* gather_factors(const Rounds& rounds, const Operation& operation, uint64_t first_round,
                             std::vector<double>& storage) {
  if (operation.descriptor.op != ReduceOp::premul_sum) return nullptr;
  storage.resize(rounds.size());
  for (int peer = 0; peer < rounds.size(); ++peer) {
    storage[peer] = peer == rounds.rank() ? operation.factor : rounds.factor_of(first_round, peer);
  }
  return storage.data();
}

void one_shot_reduce(Rounds& rounds, const Operation& operation, const void* in, void* out, size_t count, int root,
                     size_t chunk) {
  const size_t element = size_of(operation.descriptor.dtype);
  const size_t step = chunk / element;
  const size_t chunks = std::max<size_t>(1, (count + step - 1) / step);
  const int size = rounds.size();
  const bool wants_result = root < 0 || root == rounds.rank();
  rounds.begin(operation, std::min(count, step) * element);
  const uint64_t first = rounds.next();
  auto elements = [&](size_t k) { return std::min(step, count - k * step); };
  auto publish = [&](size_t k) {
    copy_bytes(rounds.open(first + k), static_cast<const std::byte*>(in) + k * step * element, elements(k) * element);
    rounds.publish(first + k);
  };
  publish(0);
  const ReduceFn reduce = find_reduce(operation.descriptor.dtype, operation.descriptor.op);
  std::vector<double> storage;
  std::vector<const void*> sources(size);
  const double* factors = nullptr;
  for (size_t k = 0; k < chunks; ++k) {
    if (k + 1 < chunks) publish(k + 1);
    if (wants_result) {
      const size_t offset = k * step * element;
      for (int peer = 0; peer < size; ++peer) {
        sources[peer] =
            peer == rounds.rank() ? static_cast<const std::byte*>(in) + offset : rounds.read(first + k, peer);
      }
      if (k == 0) factors = gather_factors(rounds, operation, first, storage);
      reduce(static_cast<std::byte*>(out) + offset, nullptr, sources.data(), size, elements(k), factors);
    } else if (k == 0) {
      rounds.check_all(first);
    }
    rounds.release(first + k);
  }
}

}  // namespace ark
