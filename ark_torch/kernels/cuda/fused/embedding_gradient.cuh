// The way back of pooled embeddings: gradients of bags go to the rank that has the table, and are added up row by row.
//
// send_gradient stores each row of this rank's gradient at its place on the owner of the table, where the bags of all
// ranks' samples of a table lie one behind the other. Memory order, reuse and liveness: tiles.cuh.
//
// sum_rows adds what the bags that name a row bring it, in the order of the indices in float32, and rounds once: the
// same bits whatever the launch. It is given the indices of all tables in the order of (table, row, place). A group of
// kLanes threads that finds the first of a row goes on to its last; the others leave.
#pragma once

#include "cuda/fused/embedding_bag.cuh"

namespace ark::device {

struct GradientParams {
  TileLinks links;
  const void* gradient;  // [batch, tables of all ranks, row]
  uint32 first[kMaxRanks + 1];  // table of each rank
  uint32 ranks, batch;
  uint32 units, columns, row_bytes;  // as BagParams
};

struct RowTable {
  void* gradient;       // [rows, row_bytes], zero where no bag names a row
  const void* offsets;  // as BagTable
  const void* weights;
  uint64 first;    // of its indices, among those of all tables
  uint64 entries;  // of them
};

struct RowSumParams {
  const long long* keys;     // of each index, sorted: its table's first row, plus its row
  const long long* places;   // where it was among the indices of all tables
  const long long* bags;     // by place: which bag of its table it is in
  const long long* first_row;  // of each table, among those of all
  const void* of_bags;       // [tables, bags_each, row]
  uint64 entries;            // of all tables
  uint32 tables;             // those of this launch lie side by side
  uint32 bags_each;
  uint32 units, columns, row_bytes;
  bool mean, last_offset;
  RowTable table[kMostTables];
};

#if defined(__CUDACC__)

template <class Format, bool kWide, int kLanes>
__device__ __forceinline__ void send_gradient(const GradientParams& p) {
  using Access = BagAccess<Format, kWide>;
  begin_kernel();
  TileExchange exchange(p.links);
  __shared__ char* places[kMaxRanks];
  if (threadIdx.x < p.ranks) places[threadIdx.x] = exchange.place_of(static_cast<int>(threadIdx.x));
  __syncthreads();
  const uint32 lane = threadIdx.x % kLanes, groups = gridDim.x * (kBagThreads / kLanes);
  const uint32 all = p.first[p.ranks], me = static_cast<uint32>(p.links.rank);
  const uint64 items = uint64{p.batch} * all * p.columns;
  for (uint64 at = blockIdx.x * (kBagThreads / kLanes) + threadIdx.x / kLanes; at < items; at += groups) {
    const uint64 row = at / p.columns;
    const uint32 unit = static_cast<uint32>(at - row * p.columns) * kLanes + lane;
    const uint32 sample = static_cast<uint32>(row / all), table = static_cast<uint32>(row - uint64{sample} * all);
    uint32 owner = 0;
    while (table >= p.first[owner + 1]) ++owner;
    if (places[owner] == nullptr) break;
    if (unit >= p.units) continue;
    const char* const from = static_cast<const char*>(p.gradient) + row * p.row_bytes + uint64{unit} * Access::kBytes;
    const uint64 bag = (uint64{table - p.first[owner]} * p.ranks + me) * p.batch + sample;
    Access::copy(places[owner] + bag * p.row_bytes + uint64{unit} * Access::kBytes, Access::load(from));
  }
  exchange.finish();
}

template <class Format, class Index, bool kWide, int kLanes>
__device__ __forceinline__ void sum_rows(const RowSumParams& p) {
  using Access = BagAccess<Format, kWide>;
  constexpr int kValues = Access::kValues;
  const uint32 lane = threadIdx.x % kLanes;
  const uint64 at = blockIdx.x * uint64{kBagThreads / kLanes} + threadIdx.x / kLanes, first = at / p.columns;
  const uint32 unit = static_cast<uint32>(at - first * p.columns) * kLanes + lane;
  if (first >= p.entries || unit >= p.units) return;
  const long long key = p.keys[first];
  if (first != 0 && p.keys[first - 1] == key) return;
  uint32 t = 0;
  while (t + 1 < p.tables && first >= p.table[t + 1].first) ++t;
  const RowTable& table = p.table[t];
  const auto* const offsets = static_cast<const Index*>(table.offsets);
  const char* const column =
      static_cast<const char*>(p.of_bags) + (uint64{t} * p.bags_each * p.row_bytes + uint64{unit} * Access::kBytes);
  float total[kValues];
  ARK_UNROLL for (int v = 0; v < kValues; ++v) total[v] = 0.0f;
  for (uint64 i = first; i < p.entries && p.keys[i] == key; ++i) {
    const long long place = p.places[i], bag = p.bags[place];
    if (bag >= p.bags_each) continue;  // behind the last offset
    float values[kValues];
    Access::decode(Access::load(column + static_cast<uint64>(bag) * p.row_bytes), values);
    if (p.mean) {
      const bool ends = bag + 1 == p.bags_each && !p.last_offset;
      const long long end = ends ? static_cast<long long>(table.entries) : static_cast<long long>(offsets[bag + 1]);
      const float count = static_cast<float>(end - static_cast<long long>(offsets[bag]));
      ARK_UNROLL for (int v = 0; v < kValues; ++v) values[v] = divide(values[v], count);
    } else if (table.weights != nullptr) {
      const float weight = load_weight<Format>(table.weights, static_cast<uint64>(place) - table.first);
      ARK_UNROLL for (int v = 0; v < kValues; ++v) values[v] = multiply(values[v], weight);
    }
    ARK_UNROLL for (int v = 0; v < kValues; ++v) total[v] = add(total[v], values[v]);
  }
  const uint64 row = static_cast<uint64>(key - p.first_row[t]);
  Access::store(static_cast<char*>(table.gradient) + row * p.row_bytes + uint64{unit} * Access::kBytes, total);
}

#endif

}  // namespace ark::device
