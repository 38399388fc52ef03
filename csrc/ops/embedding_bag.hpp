// embedding_bag_all_to_all: pooled embeddings of tables that are distributed over a group's ranks. Each bag is stored
// where the all-to-all would deliver it. PyTorch knows it as ark::embedding_bag_all_to_all (registration.cpp); users
// call ark_torch.ops.
//
// A rank has some or no tables and their bags for all ranks' samples; it gets the bags of all tables for its own
// samples. Everything is checked before a byte moves. Ranks must agree on the result: they either exchange their
// arguments on the host (meet(), a collective), or the caller knows them and the operation compares them.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <string>
#include <vector>

#include "ops/meeting.hpp"

namespace ark::ops {

// How to use the gradient of the tables' rows.
struct RowUpdate {
  std::string kind = "dense";      // or "sparse", "sgd", "rowwise_adagrad"; the last two update tables in place
  std::vector<at::Tensor> state;   // rowwise_adagrad, per table: [rows], sums of mean squares so far
  std::optional<at::Tensor> rate;  // the learning rate: one element, on the tables' device
  double eps = 0;

  bool in_place() const { return kind != "dense" && kind != "sparse"; }
  bool adapts() const { return kind == "rowwise_adagrad"; }
};

struct BagArguments {
  std::vector<at::Tensor> tables, indices, offsets, weights;  // as many, or none
  std::optional<at::Tensor> like;                             // for a rank without tables: its dtype and device
  std::string group;
  std::string mode;  // "sum" or "mean"
  bool last_offset = false;
  std::vector<int64_t> tables_per_rank;  // empty: unknown
  int64_t batch = -1, dim = -1;          // for a rank without tables; -1: unknown
  bool met = false;                      // the ranks have exchanged their arguments
  RowUpdate update;
};

// What all ranks have.
struct Layout {
  std::vector<int64_t> tables;  // by rank
  int64_t batch = 0, dim = 0;   // samples per rank; columns
  at::ScalarType dtype = at::kFloat;
  c10::DeviceType device = c10::kCPU;
  bool trained = false;  // a rank's tables or weights require gradients

  int64_t all() const;
  int64_t first(int rank) const;  // index of the rank's first table in the result
  uint64_t fingerprint() const;
};

c10::Device device_of(const BagArguments& bags, const Layout& layout, ProcessGroupArk& group);

// Collective. Checks the arguments first, and tells the other ranks if they are invalid.
Layout meet(const BagArguments& bags, ProcessGroupArk& group, const char* operation, bool trained);
// Uses what the caller knows, or meet(). Checks the arguments.
Layout layout_of(const BagArguments& bags, ProcessGroupArk& group, const char* operation);

at::Tensor forward(const BagArguments& bags);
// Gradients of tables and weights; empty lists for a rank without any. No table gradients if the update is in place.
std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>> backward(const BagArguments& bags,
                                                                     const at::Tensor& gradient, bool of_weights);

// Makes the arguments contiguous and gives them one integer type, as launches require.
BagArguments prepared(const BagArguments& bags);

// On CPU tensors (embedding_bag_cpu.cpp) and CUDA tensors (embedding_bag_cuda.cpp). The arguments are checked and
// contiguous.
at::Tensor forward_cpu(const BagArguments& bags, const Layout& layout, ProcessGroupArk& group);
at::Tensor forward_cuda(const BagArguments& bags, const Layout& layout, ProcessGroupArk& group);
// [tables, ranks * batch, dim]: the gradient of every bag of this rank's tables.
at::Tensor gather_gradient_cpu(const BagArguments& bags, const Layout& layout, ProcessGroupArk& group,
                               const at::Tensor& gradient);
at::Tensor gather_gradient_cuda(const BagArguments& bags, const Layout& layout, ProcessGroupArk& group,
                                const at::Tensor& gradient);
// The tables' gradients, dense or sparse; none if the update is in place (embedding_gradient_cpu.cpp,
// embedding_gradient_cuda.cpp).
std::vector<at::Tensor> table_gradients_cpu(const BagArguments& bags, const at::Tensor& of_bags);
std::vector<at::Tensor> table_gradients_cuda(const BagArguments& bags, const at::Tensor& of_bags);
// Coalesced: rows in ascending order, each once.
at::Tensor sparse_gradient(const at::Tensor& rows, const at::Tensor& values, const at::Tensor& table);
std::vector<at::Tensor> weight_gradients(const BagArguments& bags, const at::Tensor& of_bags);
// The number of the bag that each index belongs to.
at::Tensor bag_numbers(const at::Tensor& offsets, int64_t entries, int64_t bags);

}  // namespace ark::ops
