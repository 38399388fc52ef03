// Gradients of the tables' rows on CUDA tensors: sorts the keys of all indices, adds up equal rows, and returns dense
// or sparse tensors or updates in place (cuda/fused/embedding_rows.cuh).
//
// Only sparse gradients need the number of rows on the host, so only they cannot be captured.
#include <c10/core/DeviceGuard.h>

#include <limits>

#include "collectives/cuda/fused_stubs.hpp"
#include "cuda/fused/embedding_rows.cuh"
#include "cuda/graph_owned.hpp"
#include "jit/kernel.hpp"
#include "ops/embedding_bag.hpp"
#include "ops/pooling.hpp"
#include "process_group/cuda/cuda_group.hpp"

namespace ark::ops {

namespace {

static_assert(kRowPart == device::kRowPart, "CPU and GPU give the same bits");
constexpr int64_t kMostKeys = std::numeric_limits<int32_t>::max() - 1;

[[noreturn]] void refuse_gradient(const std::string& what, const std::string& remedy) {
  throw Error(ErrorKind::invalid_argument, what, ErrorContext{-1, -1, "embedding_bag_all_to_all_backward", 0, remedy});
}

device::RowUse use_of(const RowUpdate& update) {
  return update.kind == "dense"    ? device::RowUse::dense
         : update.kind == "sparse" ? device::RowUse::sparse
         : update.kind == "sgd"    ? device::RowUse::sgd
                                   : device::RowUse::rowwise_adagrad;
}

// Adds as many tables from `from` on as fit into a launch. Returns where the next launch begins.
size_t gather_tables(const BagArguments& bags, const std::vector<at::Tensor>& made, size_t from,
                     device::RowSumParams& params) {
  int64_t rows = 0, entries = 0;
  size_t to = from;
  for (; to < bags.tables.size() && to - from < device::kMostTables; ++to) {
    const int64_t more_rows = bags.tables[to].size(0), more = bags.indices[to].numel();
    if (more_rows > kMostKeys || more > kMostKeys)
      refuse_gradient("tables[" + std::to_string(to) + "] or indices[" + std::to_string(to) +
                          "] has 2^31 - 1 elements of dimension 0, or more, too many for a gradient",
                      "Split the table.");
    if (rows + more_rows > kMostKeys || entries + more > kMostKeys) break;
    device::RowTable& table = params.table[to - from];
    table.rows = params.use == device::RowUse::dense ? made[to].mutable_data_ptr()
                 : bags.update.in_place()            ? bags.tables[to].mutable_data_ptr()
                                                     : nullptr;
    table.state = bags.update.adapts() ? bags.update.state[to].mutable_data_ptr<float>() : nullptr;
    table.indices = bags.indices[to].const_data_ptr();
    table.offsets = bags.offsets[to].const_data_ptr();
    table.weights = bags.weights.empty() ? nullptr : bags.weights[to].const_data_ptr();
    table.first = static_cast<uint32_t>(entries), table.entries = static_cast<uint32_t>(more);
    table.first_row = static_cast<uint32_t>(rows), table.count = static_cast<uint32_t>(more_rows);
    rows += more_rows, entries += more;
  }
  params.tables = static_cast<uint32_t>(to - from);
  params.rows = static_cast<uint32_t>(rows), params.entries = static_cast<uint32_t>(entries);
  return to;
}

// The rows that a launch's bags use, over all its tables, and each key's position among them.
struct NamedRows {
  at::Tensor keys, slots;
  std::vector<int64_t> begins;  // of each table's rows, and the end

  NamedRows(const at::Tensor& sorted, const device::RowSumParams& params) {
    at::Tensor heads = sorted.lt(static_cast<int64_t>(params.rows));
    if (sorted.numel() > 1) {
      const at::Tensor differs = sorted.slice(0, 1).ne(sorted.slice(0, 0, -1));
      heads.slice(0, 1).logical_and_(differs);
    }
    slots = heads.cumsum(0, at::kInt).sub_(1);
    keys = sorted.masked_select(heads);
    std::vector<int32_t> firsts;
    for (uint32_t t = 0; t < params.tables; ++t) firsts.push_back(static_cast<int32_t>(params.table[t].first_row));
    const at::Tensor from = at::tensor(firsts, at::kInt).to(sorted.device());
    const at::Tensor at = at::searchsorted(keys, from).to(at::kCPU, at::kLong);
    begins.assign(at.const_data_ptr<int64_t>(), at.const_data_ptr<int64_t>() + at.numel());
    begins.push_back(keys.numel());
  }
};

}  // namespace

std::vector<at::Tensor> table_gradients_cuda(const BagArguments& bags, const at::Tensor& of_bags) {
  const bool dense = bags.update.kind == "dense", sparse = bags.update.kind == "sparse";
  std::vector<at::Tensor> made;
  for (const at::Tensor& table : bags.tables) {
    if (dense) made.push_back(at::zeros_like(table));
    if (sparse)
      made.push_back(sparse_gradient(at::empty({0}, table.options().dtype(at::kLong)),
                                     at::empty({0, table.size(1)}, table.options()), table));
  }
  if (bags.tables.empty() || of_bags.numel() == 0) return made;
  const c10::Device device = of_bags.device();
  if (sparse && is_capturing(device))
    refuse_gradient("a sparse gradient cannot be captured in a CUDA graph: its size is the host's to know",
                    "Update the tables in place (optimizer=), or take dense gradients.");
  const c10::OptionalDeviceGuard guard(device);
  const CurrentContext context(device.index());
  const CUstream stream = static_cast<CUstream>(native_stream(current_stream(device)));
  const uint64_t row_bytes = static_cast<uint64_t>(of_bags.size(2)) * of_bags.element_size();
  const RowShape shape = RowShape::of(row_bytes, of_bags.element_size());
  auto& library = jit::KernelLibrary::of(device.index());
  const bool narrow = bags.indices[0].scalar_type() == at::kInt;
  const std::string stub = embedding_gradient_stub(ark::dtype_of(of_bags.scalar_type()), narrow, shape.wide,
                                                   shape.lanes, bags.mode == "mean");
  size_t to = 0;
  for (size_t from = 0; from < bags.tables.size(); from = to) {
    device::RowSumParams params{};
    params.use = use_of(bags.update);
    to = gather_tables(bags, made, from, params);
    if (params.entries == 0) continue;
    const int64_t entries = params.entries;
    at::Tensor keys = at::empty({entries}, of_bags.options().dtype(at::kInt)), numbers = at::empty_like(keys);
    at::Tensor crowded = at::zeros({entries / device::kRowPart + 2}, keys.options());
    params.keys = keys.mutable_data_ptr<int32_t>();
    params.bags = numbers.mutable_data_ptr<int32_t>();
    params.crowded = reinterpret_cast<uint32_t*>(crowded.mutable_data_ptr<int32_t>());
    params.rate = bags.update.in_place() ? bags.update.rate->const_data_ptr<float>() : nullptr;
    params.eps = static_cast<float>(bags.update.eps);
    params.of_bags = of_bags.select(0, static_cast<int64_t>(from)).const_data_ptr();
    params.bags_each = static_cast<uint32_t>(of_bags.size(1));
    params.dim = static_cast<uint32_t>(of_bags.size(2));
    params.units = shape.units, params.columns = shape.columns, params.row_bytes = static_cast<uint32_t>(row_bytes);
    params.last_offset = bags.last_offset;
    const auto launch = [&](const char* name, uint64_t blocks) {
      jit::launch(library.get(stub, name), {static_cast<unsigned>(blocks)}, {device::kBagThreads}, 0, stream, params);
    };
    const auto blocks_of = [](uint64_t groups, uint64_t lanes) {
      const uint64_t each = device::kBagThreads / lanes;
      return (groups + each - 1) / each;
    };
    launch("name_rows", blocks_of(uint64_t{params.tables} * params.bags_each, 32));
    const auto [sorted, places] = at::sort(keys, /*stable=*/true, 0, false);
    params.keys = sorted.mutable_data_ptr<int32_t>();
    params.places = reinterpret_cast<const long long*>(places.const_data_ptr<int64_t>());
    std::optional<NamedRows> named;
    at::Tensor values;
    if (sparse) {
      named.emplace(sorted, params);
      values = at::empty({named->keys.numel(), of_bags.size(2)}, of_bags.options());
      params.slots = named->slots.const_data_ptr<int32_t>();
      params.values = values.mutable_data_ptr();
    }
    launch("sum_rows", blocks_of(static_cast<uint64_t>(entries), static_cast<uint64_t>(shape.lanes)));
    if (entries > device::kRowPart)
      launch("sum_crowded_rows", std::min<uint64_t>(static_cast<uint64_t>(entries) / device::kRowPart, 264));
    for (size_t t = from; sparse && t < to; ++t) {
      const int64_t begin = named->begins[t - from], count = named->begins[t - from + 1] - begin;
      const at::Tensor rows = named->keys.narrow(0, begin, count).to(at::kLong);
      made[t] = sparse_gradient(rows.sub_(static_cast<int64_t>(params.table[t - from].first_row)),
                                values.narrow(0, begin, count), bags.tables[t]);
    }
  }
  return made;
}

}  // namespace ark::ops
