// A reduction in two stages: over the ranks of a node in rank order, then over the nodes in node order.
//
// The first stage produces a partial in the accumulation type: float32 for sums and products of 8- and 16-bit floats
// (complex64 for complex32), so only the second stage rounds, once; unless `wide` is false, which makes partials of the
// tensors' type. Factors apply in the first stage, AVG's division in
// the second. Nodes with one rank produce partials too. If every node has one rank (`flat`), there is a single stage:
// partials are the inputs, and the order is rank order.
#pragma once

#include <cstddef>

#include "collectives/cpu/reduce/reduce.hpp"

namespace ark {

class StagedReduce {
 public:
  StagedReduce(DType dtype, ReduceOp op, int ranks, bool flat, bool wide = true);

  size_t partial_size() const { return partial_size_; }  // bytes of an element's partial

  // sources[i]: `count` elements of the node's i-th rank; factors: per rank, for PREMUL_SUM. Not used if flat.
  void partial(void* out, const void* const* sources, int ranks, size_t count, const double* factors) const;
  // sources[n]: node n's partial. factors: per node, for a flat PREMUL_SUM. out may be one of the sources if a partial
  // is as large as an element.
  void combine(void* out, const void* const* sources, int nodes, size_t count, const double* factors) const;

 private:
  const DType dtype_;
  const bool flat_;
  const double ranks_;
  ConvertFn widen_, narrow_;  // null: partials have the tensors' type
  ReduceFn first_, second_;
  bool average_;
  size_t scalars_;  // scalars per element, if widened
  size_t partial_size_;
};

}  // namespace ark
