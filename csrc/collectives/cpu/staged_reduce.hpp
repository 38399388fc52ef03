// A reduction in two stages: over the ranks of a node, in rank order, and over the nodes, in node order.
//
// What the first stage hands on, a partial, is in the type of the additions: float32 where the 8- and 16-bit floats are
// added or multiplied (complex64 for complex32), so that only the second stage rounds, once. Factors belong to the
// first stage, the division of AVG to the second. A node of one rank has a partial, too, so that all of them look
// alike. Where every node has one rank, there is one stage (`flat`): partials are the inputs, and the order is that of
// ranks.
#pragma once

#include <cstddef>

#include "collectives/cpu/reduce/reduce.hpp"

namespace ark {

class StagedReduce {
 public:
  StagedReduce(DType dtype, ReduceOp op, int ranks, bool flat);

  size_t partial_size() const { return partial_size_; }  // bytes of an element's partial

  // sources[i]: the node's i-th rank's `count` elements; factors: likewise, for PREMUL_SUM. Not where flat.
  void partial(void* out, const void* const* sources, int ranks, size_t count, const double* factors) const;
  // sources[n]: node n's partial. factors: of every node's rank, for a flat PREMUL_SUM. out may be one of the sources
  // where a partial has the size of an element.
  void combine(void* out, const void* const* sources, int nodes, size_t count, const double* factors) const;

 private:
  const DType dtype_;
  const bool flat_;
  const double ranks_;
  ConvertFn widen_, narrow_;  // null: partials have the tensors' type
  ReduceFn first_, second_;
  bool average_;
  size_t scalars_;  // of an element, where it is widened
  size_t partial_size_;
};

}  // namespace ark
