// Bags of each rank's own samples, sent to the ranks that have the tables: what embedding_bag_all_to_all is given,
// where each rank reads a mini-batch of its own. Registered as ark::exchange_bags; ark_torch.nn.ShardedEmbeddingBags
// calls it.
//
// A rank has lengths and values of all tables' bags, table by table (as a KeyedJaggedTensor). Either a rank has whole
// tables (table-wise), or each table's rows are split over the ranks, in blocks as torch.chunk makes them (row-wise):
// then an index goes to the rank of its row, and is counted from that rank's first row. Bags keep their order.
//
// Collective. Everything is checked before a byte moves, and ranks tell each other on the host how much they send.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <string>
#include <vector>

namespace ark::ops {

struct BagBatch {
  at::Tensor values, lengths;  // [entries]; [tables, batch]
  std::optional<at::Tensor> weights;
  std::string group;
  std::vector<int64_t> rows;    // of each table, on all ranks together
  std::vector<int64_t> owners;  // table-wise: whose each table is; row-wise: empty
  std::vector<std::string> names;
  bool trained = false;  // this rank's tables take gradients, or are updated in place
};

// For each of this rank's tables (row-wise: of all): the bags of rank 0's samples, then of rank 1's and so on.
struct ReceivedBags {
  std::vector<at::Tensor> indices, offsets, weights;
  bool trained = false;  // some rank's
};

ReceivedBags exchange_bags(const BagBatch& batch);

}  // namespace ark::ops
