// Sends bags of each rank's own samples to the ranks that have the tables: the input of embedding_bag_all_to_all if
// each rank reads its own mini-batch. PyTorch knows it as ark::exchange_bags; ark_torch.nn.ShardedEmbeddingBags calls
// it.
//
// A rank has lengths and values of all tables' bags, table by table (like a KeyedJaggedTensor). Table-wise, a rank has
// whole tables. Row-wise, ranks share each table's rows in blocks as torch.chunk makes them; an index goes to its row's
// rank and becomes relative to that rank's first row. Bags keep their order. Collective: arguments are checked before a
// byte moves, and ranks exchange sizes on the host.
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
  std::vector<int64_t> rows;    // per table, over all ranks
  std::vector<int64_t> owners;  // table-wise: the owner of each table; row-wise: empty
  std::vector<std::string> names;
  bool trained = false;  // this rank's tables require gradients or are updated in place
};

// For each of this rank's tables (row-wise: all tables): the bags of all ranks' samples, in rank order.
struct ReceivedBags {
  std::vector<at::Tensor> indices, offsets, weights;
  bool trained = false;  // for any rank
};

ReceivedBags exchange_bags(const BagBatch& batch);

}  // namespace ark::ops
