// What of an all_to_all goes from one rank to another node in one message: pure arithmetic, alike on both ends.
//
// A rank has a block for every rank of the other node. Small blocks go together, in the order of that node's ranks, as
// one parcel: to the rank that stands for the sender there (node_plan.hpp), which spreads it in its node. Larger blocks
// go straight to the ranks that they are for. Both ends know all sizes, so both find the same places.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ark {

class NodeParcel {
 public:
  // sizes[j]: bytes for the node's j-th rank; limit: NodePlan::parcel_limit(). They stay where they are.
  NodeParcel(const uint64_t* sizes, int ranks, size_t limit) : sizes_(sizes), ranks_(ranks), limit_(limit) {}

  bool holds(int rank) const { return sizes_[rank] <= limit_; }
  size_t offset(int rank) const {  // of a block that it holds
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
