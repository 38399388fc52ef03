// One-shot all_reduce and reduce, for small tensors: everyone publishes its whole input in one round and whoever
// wants the result adds all of them in rank order. One hand-over; every reader reads every input.
#include "collectives/algorithms.hpp"

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

void one_shot_reduce(Rounds& rounds, const Operation& operation, const void* in, void* out, size_t count, int root) {
  const size_t bytes = count * size_of(operation.descriptor.dtype);
  rounds.begin(operation, bytes);
  const uint64_t round = rounds.next();
  copy_bytes(rounds.open(round), in, bytes);
  rounds.publish(round);
  if (root >= 0 && root != rounds.rank()) {
    rounds.check_all(round);
    rounds.release(round);
    return;
  }
  const int size = rounds.size();
  std::vector<const void*> sources(size);
  for (int peer = 0; peer < size; ++peer) {
    sources[peer] = peer == rounds.rank() ? in : static_cast<const void*>(rounds.read(round, peer));
  }
  std::vector<double> storage;
  const double* factors = gather_factors(rounds, operation, round, storage);
  find_reduce(operation.descriptor.dtype, operation.descriptor.op)(out, nullptr, sources.data(), size, count, factors);
  rounds.release(round);
}

}  // namespace ark
