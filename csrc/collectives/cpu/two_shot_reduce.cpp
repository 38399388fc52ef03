// Two-shot all_reduce and reduce: reduce-scatter, then all-gather, in chunks that stay in cache.
//
// A chunk has one part per rank. In input round a(k) every rank publishes chunk k except its own part. It then adds all
// ranks' copies of its part, in rank order, straight into the result, publishes the sum in round b(k), and collects the
// other parts' sums. Every element crosses shared memory twice, for any number of ranks.
#include <algorithm>

#include "collectives/cpu/algorithms.hpp"

namespace ark {

namespace {

struct Part {
  size_t offset;  // in elements, from the chunk's start
  size_t count;
};

// To keep all ranks busy, chunk k+1 is published before chunk k is added, and chunk k-1 is collected after it:
//   publish  a0 a1 b0 a2 b1 ...  a(n-1) b(n-2) b(n-1)      numbered 0, 1, 2, ... from the operation's first round
//   read        a0 | a1 b0 | a2 b1 | ... | b(n-1)           in the same order, so `released` only grows
// With four slots a rank waits only for peers that lag behind, never for slots of peers in step.
class TwoShot {
 public:
  TwoShot(Rounds& rounds, const Operation& operation, const void* in, void* out, size_t count, int root, size_t chunk)
      : rounds_(rounds),
        operation_(operation),
        in_(static_cast<const std::byte*>(in)),
        out_(static_cast<std::byte*>(out)),
        count_(count),
        root_(root),
        element_(size_of(operation.descriptor.dtype)),
        chunk_(chunk / element_),
        chunks_(std::max<size_t>(1, (count + chunk_ - 1) / chunk_)),
        sources_(rounds.size()) {}

  void run() {
    rounds_.begin(operation_, std::min(count_, chunk_) * element_ + kAlign);
    first_ = rounds_.next();
    publish_input(0);
    reduce_ = find_reduce(operation_.descriptor.dtype, operation_.descriptor.op);
    for (size_t k = 0; k < chunks_; ++k) {
      if (k + 1 < chunks_) publish_input(k + 1);
      reduce_own_part(k);
      if (k > 0) collect(k - 1);
    }
    collect(chunks_ - 1);
  }

 private:
  uint64_t input_round(size_t k) const { return k == 0 ? first_ : first_ + 2 * k - 1; }
  uint64_t result_round(size_t k) const { return k + 1 == chunks_ ? first_ + 2 * k + 1 : first_ + 2 * k + 2; }
  size_t elements(size_t k) const { return std::min(chunk_, count_ - k * chunk_); }
  bool wants_result() const { return root_ < 0 || root_ == rounds_.rank(); }

  // Parts start on cache lines of the chunk; the last parts of a short chunk may be empty.
  Part part(size_t k, int rank) const {
    const size_t total = elements(k);
    const size_t each = align_up((total + rounds_.size() - 1) / rounds_.size() * element_) / element_;
    const size_t begin = std::min(total, each * rank);
    return {begin, std::min(total, begin + each) - begin};
  }

  void publish_input(size_t k) {
    const uint64_t round = input_round(k);
    std::byte* slot = rounds_.open(round);
    const std::byte* chunk = in_ + k * chunk_ * element_;
    const Part own = part(k, rounds_.rank());
    const size_t before = own.offset * element_, after = (own.offset + own.count) * element_;
    copy_bytes(slot, chunk, before);
    copy_bytes(slot + after, chunk + after, elements(k) * element_ - after);
    rounds_.publish(round);
  }

  void reduce_own_part(size_t k) {
    const uint64_t inputs = input_round(k), results = result_round(k);
    const Part own = part(k, rounds_.rank());
    const size_t offset = own.offset * element_;
    for (int peer = 0; peer < rounds_.size(); ++peer) {
      sources_[peer] =
          peer == rounds_.rank() ? in_ + k * chunk_ * element_ + offset : rounds_.read(inputs, peer) + offset;
    }
    if (k == 0) factors_ = gather_factors(rounds_, operation_, first_, factor_storage_);
    std::byte* slot = rounds_.open(results);
    if (wants_result()) {
      std::byte* result = out_ + k * chunk_ * element_ + offset;
      reduce_(result, slot, sources_.data(), rounds_.size(), own.count, factors_);
    } else {
      reduce_(slot, nullptr, sources_.data(), rounds_.size(), own.count, factors_);
    }
    rounds_.publish(results);
    rounds_.release(inputs);
  }

  void collect(size_t k) {
    const uint64_t results = result_round(k);
    if (wants_result()) {
      for (int peer = 0; peer < rounds_.size(); ++peer) {
        if (peer == rounds_.rank()) continue;
        const Part theirs = part(k, peer);
        const std::byte* slot = rounds_.read(results, peer);
        copy_bytes(out_ + (k * chunk_ + theirs.offset) * element_, slot, theirs.count * element_);
      }
    }
    rounds_.release(results);
  }

  Rounds& rounds_;
  const Operation& operation_;
  const std::byte* in_;
  std::byte* out_;
  size_t count_;
  int root_;
  size_t element_;
  size_t chunk_;  // in elements
  size_t chunks_;
  uint64_t first_ = 0;
  ReduceFn reduce_ = nullptr;
  std::vector<const void*> sources_;
  std::vector<double> factor_storage_;
  const double* factors_ = nullptr;
};

}  // namespace

void two_shot_reduce(Rounds& rounds, const Operation& operation, const void* in, void* out, size_t count, int root,
                     size_t chunk) {
  TwoShot(rounds, operation, in, out, count, root, chunk).run();
}

}  // namespace ark
