// The part of an all_to_all that goes from one rank to another node in one message. Pure arithmetic, equal on both
// ends.
//
// A rank has a block for every rank of the other node. Small blocks go together, in rank order, as one parcel to the
// sender's representative there (node_plan.hpp), which spreads it in its node. Larger blocks go straight to their
// ranks. Both ends know all sizes, so they compute the same offsets.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ark {

class NodeParcel {
 public:
  // sizes[j]: bytes for the node's j-th rank, not copied; limit: NodePlan::parcel_limit().
  NodeParcel(const uint64_t* sizes, int ranks, size_t limit) : sizes_(sizes), ranks_(ranks), limit_(limit) {}

  bool holds(int rank) const { return sizes_[rank] <= limit_; }
  size_t offset(int rank) const {  // of a block in the parcel
    size_t bytes = 0;
    for (int before = 0; before < rank; ++before) bytes += holds(before) ? sizes_[before] : 0;
    return bytes;
  }
  size_t bytes() const { return offset(ranks_); }

 private:
  const uint64_t* sizes_;
  const int ranks_;
  const size_t limit_;
};

}  // namespace ark
