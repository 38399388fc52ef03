// embedding_bag_all_to_all: pooled embeddings of tables that are spread over a group's ranks, each bag stored where the
// all-to-all would bring it. Registered with PyTorch as ark::embedding_bag_all_to_all (registration.cpp); what users
// call is ark_torch.ops.
//
// A rank has some tables, perhaps none, and their bags for the samples of all ranks; it gets the bags of all tables for
// its own samples. Everything is checked before a byte moves. Ranks must mean the same result: either they tell each
// other on the host (Layout::of, a collective), or the caller knows what all have, and the operation compares it.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <string>
#include <vector>

#include "ops/meeting.hpp"

namespace ark::ops {

// What becomes of the gradient of the tables' rows.
struct RowUpdate {
  std::string kind = "dense";      // or "sparse", "sgd", "rowwise_adagrad": the last two write the tables in place
  std::vector<at::Tensor> state;   // rowwise_adagrad, a table: [rows], the sum of the mean squares so far
  std::optional<at::Tensor> rate;  // the learning rate: one element, on the tables' device
  double eps = 0;

  bool in_place() const { return kind != "dense" && kind != "sparse"; }
  bool adapts() const { return kind == "rowwise_adagrad"; }
};

struct BagArguments {
  std::vector<at::Tensor> tables, indices, offsets, weights;  // weights: as many, or none
  std::optional<at::Tensor> like;                             // of a rank without tables: its dtype and device
  std::string group;
  std::string mode;  // "sum" or "mean"
  bool last_offset = false;
  std::vector<int64_t> tables_per_rank;  // empty: not known
  int64_t batch = -1, dim = -1;          // of a rank without tables; -1: not known
  bool met = false;                      // the ranks have told each other what they have
  RowUpdate update;
};

// What all ranks have.
struct Layout {
  std::vector<int64_t> tables;  // by rank
  int64_t batch = 0, dim = 0;   // samples of each rank; columns
  at::ScalarType dtype = at::kFloat;
  c10::DeviceType device = c10::kCPU;
  bool trained = false;  // a rank's tables, or its weights, take gradients

  int64_t all() const;
  int64_t first(int rank) const;  // table, in the result
  uint64_t fingerprint() const;
};

c10::Device device_of(const BagArguments& bags, const Layout& layout, ProcessGroupArk& group);

// Collective. Checks the arguments first, and tells the others when they will not do.
Layout meet(const BagArguments& bags, ProcessGroupArk& group, const char* operation, bool trained);
// What the caller knows, or meet(). The arguments are checked.
Layout layout_of(const BagArguments& bags, ProcessGroupArk& group, const char* operation);

at::Tensor forward(const BagArguments& bags);
// Gradients of tables and weights (those of a rank that has none are empty lists). In place: no gradients of tables.
std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>> backward(const BagArguments& bags,
                                                                     const at::Tensor& gradient, bool of_weights);

// As the launches want them: contiguous, and of one integer type.
BagArguments prepared(const BagArguments& bags);

// On CPU tensors (embedding_bag_cpu.cpp) and on CUDA tensors (embedding_bag_cuda.cpp). The arguments are checked and
// contiguous.
at::Tensor forward_cpu(const BagArguments& bags, const Layout& layout, ProcessGroupArk& group);
at::Tensor forward_cuda(const BagArguments& bags, const Layout& layout, ProcessGroupArk& group);
// [tables, ranks * batch, dim]: the gradient of every bag of this rank's tables.
at::Tensor gather_gradient_cpu(const BagArguments& bags, const Layout& layout, ProcessGroupArk& group,
                               const at::Tensor& gradient);
at::Tensor gather_gradient_cuda(const BagArguments& bags, const Layout& layout, ProcessGroupArk& group,
                                const at::Tensor& gradient);
// The tables' gradients, dense or sparse; none where the update is in place (embedding_gradient_cpu.cpp and
// embedding_gradient_cuda.cpp).
std::vector<at::Tensor> table_gradients_cpu(const BagArguments& bags, const at::Tensor& of_bags);
std::vector<at::Tensor> table_gradients_cuda(const BagArguments& bags, const at::Tensor& of_bags);
// Coalesced: rows in rising order, each once.
at::Tensor sparse_gradient(const at::Tensor& rows, const at::Tensor& values, const at::Tensor& table);
std::vector<at::Tensor> weight_gradients(const BagArguments& bags, const at::Tensor& of_bags);
// Of the bag that each index is in.
at::Tensor bag_numbers(const at::Tensor& offsets, int64_t entries, int64_t bags);

}  // namespace ark::ops
