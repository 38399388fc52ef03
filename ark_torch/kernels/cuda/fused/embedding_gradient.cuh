// The backward pass of embedding bags: gradients of bags go to the rank that has the table, and are added up per row.
//
// send_gradient stores each row of this rank's gradient at its place on the table's owner, where a table's bags of all
// ranks' samples are consecutive. Memory order, reuse and progress: tiles.cuh. name_rows gives each index of all tables
// a key, which encodes table and row, and its bag. Once the keys are sorted, the kernels of embedding_rows.cuh add up
// the rows.
#pragma once

#include "cuda/fused/embedding_bag.cuh"

namespace ark::device {

struct GradientParams {
  TileLinks links;
  const void* gradient;         // [batch, tables of all ranks, row]
  uint32 first[kMaxRanks + 1];  // first table of each rank
  uint32 ranks, batch;
  uint32 units, columns, row_bytes;  // as in BagParams
};

struct RowTable {
  void* rows;           // dense: of the gradient, with zeros for rows that no bag names; in place: the table's
  float* state;         // rowwise_adagrad: per row, the sum of mean squares
  const void* indices;  // as in BagTable
  const void* offsets;
  const void* weights;
  uint32 first;      // position of its indices among those of all tables of the launch
  uint32 entries;    // number of its indices
  uint32 first_row;  // its first row's number among all tables' rows
  uint32 count;      // number of its rows
};

enum class RowUse : uint32 { dense, sparse, sgd, rowwise_adagrad };

struct RowSumParams {
  int* keys;                // per index: its row, counted over all tables, or `rows` if it is in no bag; later sorted
  int* bags;                // per index: its bag in the table
  const long long* places;  // per sorted key: its index
  const int* slots;         // sparse, per sorted key: its row's position among the named rows
  void* values;             // sparse: [named rows, row]
  uint32* crowded;          // the number of rows with more than a part, then the position of each one's first key
  const float* rate;
  float eps;
  RowUse use;
  const void* of_bags;   // [tables, bags_each, row]
  uint32 entries, rows;  // of all tables
  uint32 tables, bags_each;
  uint32 dim, units, columns, row_bytes;
  bool last_offset;
  RowTable table[kMostTables];
};
static_assert(sizeof(RowSumParams) <= 4096, "a kernel's parameters");

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

template <class Index>
__device__ __forceinline__ long long end_of_bag(const RowSumParams& p, const RowTable& table, uint32 bag) {
  if (bag + 1 == p.bags_each && !p.last_offset) return table.entries;
  return static_cast<const Index*>(table.offsets)[bag + 1];
}

// One warp per bag.
template <class Index>
__device__ __forceinline__ void name_rows(const RowSumParams& p) {
  const uint64 warp = blockIdx.x * uint64{kBagThreads / 32} + threadIdx.x / 32;
  const uint32 t = static_cast<uint32>(warp / p.bags_each), bag = static_cast<uint32>(warp - uint64{t} * p.bags_each);
  if (t >= p.tables) return;
  const RowTable& table = p.table[t];
  const uint32 begin = static_cast<uint32>(static_cast<const Index*>(table.offsets)[bag]);
  const uint32 end = static_cast<uint32>(end_of_bag<Index>(p, table, bag));
  const uint32 last = bag + 1 == p.bags_each ? table.entries : end;  // indices after the last offset are in no bag
  for (uint32 i = begin + threadIdx.x % 32; i < last; i += 32) {
    const uint32 key =
        i < end ? table.first_row + static_cast<uint32>(static_cast<const Index*>(table.indices)[i]) : p.rows;
    p.keys[table.first + i] = static_cast<int>(key);
    p.bags[table.first + i] = static_cast<int>(bag);
  }
}

#endif

}  // namespace ark::device
