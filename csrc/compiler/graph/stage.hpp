// A stage: one operator, or several fused ones, with a one-dimensional tile space. The tiler cuts that axis into tasks;
// the accesses say which part of which value a tile touches.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "compiler/graph/graph.hpp"

namespace ark::compiler {

// The cache policy of an access, chosen in cache_policy.hpp. No policy changes a bit of a result.
enum class CachePolicy : uint8_t {
  normal,
  evict_first,  // evicted before all else; bypasses the first-level cache
  evict_last,   // evicted last
  no_allocate,  // bypasses the first-level cache; on a CPU bypasses all caches
};

// How a CPU's kernel asks for an operand ahead of its loads, chosen in cache_policy.hpp.
enum class Prefetch : uint8_t {
  usual,  // as the kernel does without a plan: a product's next columns, none of a table's rows
  none,
  ahead,  // further on in a product's column; rows of the indices to come
};

// The part of a value that a tile touches. One axis is enough because stages view buffers through merged dimensions
// (all sequences' heads, all batches' rows). For a value whose dimension `axis` has length L, tile [begin, end) of
// extent E touches indices [begin*L/E, end*L/E). L is a multiple of E, or E is a multiple of L and tiles respect it
// (`grain`). With axis -1 every tile touches the whole value.
struct Access {
  int value = -1;
  int axis = -1;
  bool write = false;
  bool sparse = false;  // touches a part known only at run time: a gather's table, a scatter's base
  CachePolicy cache = CachePolicy::normal;
  Prefetch prefetch = Prefetch::usual;
};

// Pointwise operators and reductions fused into one pass over the rows of an index space: norms, softmax, residuals,
// rotary embeddings, activations, masks. The last `inner` dimensions of `shape` are a row's columns; a reduction turns
// a register with one element per column into one number per row. Registers are numbered by instruction. A bfloat16 or
// float16 register is held as float32 but rounded to its type; values used only inside the stage are float32. No load
// sees what a store of the program writes, except a store to the element that the same row and column loaded, in a
// program without reductions. Emitters may therefore repeat loads.
struct RowProgram {
  struct Instruction {
    enum class Kind : uint8_t {
      load,     // a value, broadcast over `shape`
      literal,  // the value is a literal
      index,    // the position along dimension args[0] of `shape` (i64)
      op,       // pointwise operator `name` of registers args
      reduce,   // `name` (sum, mean, amax, amin, argmax, any) over the row's columns of register args[0]
      store,    // stores register args[0] into value, which has `shape`, or length 1 (or no dimension) where reduced;
                // with args[1]: indexed by that register along value's last dimension, see `through`
    };
    Kind kind = Kind::op;
    std::string name;
    std::vector<int> args;
    int value = -1;
    ScalarType type = ScalarType::f32;  // of the result, which is rounded to it
    bool scalar = false;                // one number per row
    Shape strides;                      // load, store: the value's strides over `shape` (0: broadcast or reduced)
    // A load of split results: the in-order sum of `count` elements, `apart` elements apart. Set by split_k() only.
    struct Parts {
      int64_t count = 1, apart = 0;
    } parts = {};
    // Advances the address by register args[1] times `stride`, after checking it against `size`. `dim`: the dimension
    // as the user numbers it. `wrap`: negative indices count from the end.
    struct Through {
      int64_t stride = 0, size = 0;
      int dim = 0;
      bool wrap = false;
    } through;
  };
  Shape shape;
  int inner = 0;
  int axis = -1;  // the dimension of `shape` that tiles cut, with indices as in Access: an outer one, or any if nothing
                  // is reduced; -1: extent is 1
  std::vector<Instruction> code;
};

// An all_reduce without its own stage: the producer of a rank's part sends it to all ranks, and each reader of the
// sum adds the parts. Only fuse_all_reduce() makes these. `ranks` 0: none.
struct Push {
  int node = -1;                           // the all_reduce's node
  int ranks = 0, number = 0;               // this and the places: as in CollectiveStage
  int64_t place = 0, half = 0, apart = 0;  // `apart`: bytes between the packets of consecutive ranks
  int64_t elements = 0;
};

// The encoding of weights: element [d, c] of `b` is (code[d, c] - offset) * scale[d / group, c]. `zero`, if present, is
// also subtracted from the code, or, with `zero_after`, added to the result.
struct Codes {
  int bits = 0;             // 8, or 4 (two codes per byte, of adjacent depths); 0: b is not quantized
  bool is_signed = false;   // 4-bit codes are signed
  bool high_first = false;  // the first of a byte's two codes is in the high bits
  int64_t offset = 0;
  int scale = -1, zero = -1;  // values [k / group, n]; -1: none
  bool zero_after = false;
  int64_t group = 0;
  // For 4 bits on a CPU: the number of columns in a block. Byte j of a depth then holds columns j and j + block / 2,
  // and `b` is [n / block, k, block / 2]. 0: plain columns of bytes.
  int64_t block = 0;
};

struct MatmulStage {
  int a = -1, b = -1, out = -1, bias = -1;  // values; bias -1: none
  int64_t batch = 1, m = 1, n = 1, k = 1;
  // The dimension that tiles cut: the last of `out`, the last but one, or the outer one that the Access of `out` names.
  enum class Axis : uint8_t { columns, rows, batch } axis = Axis::columns;
  // The tile of a GPU's kernel; 0: the kernel chooses. See matmul_tiling.hpp.
  int64_t tile_rows = 0, tile_columns = 0;
  // Columns of other products of the same rows, which run at the same time. Set by split_k().
  int64_t beside = 0;
  // The epilogue, applied to each element before it is stored: its load stands for the element, rounded to its type;
  // its store replaces that to `out`. Empty: none. See epilogue_fusion.hpp.
  std::vector<RowProgram::Instruction> finish = {};
  // Set for dual products, whose epilogue also takes the same element of a second product of `a`, with a matrix and a
  // bias of the same layout. Its loads of `sum` stand for that element; no one stores it. See dual_product_fusion.hpp.
  struct Second {
    int b = -1, bias = -1, sum = -1;
  } second = {};
  // Set if the value at `out` is the sum over ranks.
  Push push = {};
  // Set for products of float8 rows with float8 weights: values [m, 1] and [1, n], which multiply each sum before the
  // bias is added. `fast_accum`: see graph.hpp.
  int scale_a = -1, scale_b = -1;
  bool fast_accum = false;
  // On a GPU, float32 operands are multiplied on tensor cores, in TF32. Only products of many rows and columns do so.
  bool tf32 = false;
  // Set for quantized weights. Such products have one batch and are cut by columns, or on a CPU by rows.
  Codes codes = {};
};

// Several products that share `a`, each cut along columns. Only fuse_horizontally() makes these. A tile takes its part
// of each, so products of equal width have the same columns in a tile.
struct ProductsStage {
  std::vector<MatmulStage> products;
};

struct AttentionStage {
  int q = -1, k = -1, v = -1, mask = -1, out = -1;
  double scale = 1;
  bool causal = false;
  bool nan_rows = false;    // rows without any position give NaN, not zeros
  int64_t first_query = 0;  // position of the first query row, for `causal`; only split_queries() sets it
  // If set, `out` receives unnormalized sums, and this value each row's maximum score and total. Set by split_kv().
  int states = -1;
  // If set, the task first appends a position: its key and value (dense rows by head, computed by the same task) become
  // row `position` of the cache, if k and v contain that row. `cache`: k from the cache's first row on, `size` rows
  // long; `dim`: that dimension as the user numbers it. Only fuse_kv_append() makes these.
  struct Added {
    int k = -1, v = -1, position = -1, cache = -1;
    int64_t size = 0;
    int dim = 0;
    bool wrap = false;  // negative indices count from the end
  } added = {};
  // Tiles cut KV heads (their query heads stay together) or, if the Access of `out` names dimension 0, the batch.
  // Blocks of positions that the mask excludes entirely are not read, so work follows the actual length.
};

// Combines the partial results of a split attention: the first dimension of `sums` and `states` counts the parts. Tiles
// cut query heads or, if the Access of `out` names dimension 0, the batch.
struct CombineStage {
  int sums = -1, states = -1, out = -1;
  bool nan_rows = false;
};

// Tiles cut the dimension of `out` that its Access names. Several indices apply to as many dimensions, starting at
// `dim`. `wrap`: negative indices count from the end. `along`: there is one index per element of `out`.
struct GatherStage {
  int table = -1;
  std::vector<int> indices;
  int out = -1, dim = 0;
  bool wrap = false, along = false;
};
// Tiles cut the dimension of `source` that its Access names (if that is dim itself, positions; base's axis is then -1).
// `along`: there is one index per element of `source`. `accumulate`: adds, in order of position.
struct ScatterStage {
  int base = -1, index = -1, source = -1, dim = 0;
  bool wrap = false, along = false, accumulate = false;
};
// Indices of the largest (smallest) elements of each row along `dim`, as many as the length of `out` there. Tiles cut
// another dimension. `stable`: ties are in index order; otherwise as std::nth_element leaves them, as in PyTorch.
struct SelectStage {
  int input = -1, out = -1, dim = 0;
  bool largest = true, stable = false;
};
// Running sums or products along `dim`. Tiles cut another dimension.
struct ScanStage {
  int input = -1, out = -1, dim = 0;
  bool product = false;
};
// Embedding bags: rows of `table`, pooled per bag. Tiles cut `out` by bags or by columns.
struct BagStage {
  int table = -1, index = -1, offsets = -1, weights = -1, out = -1;  // weights -1: none
  enum class Mode : uint8_t { sum, mean, max } mode = Mode::sum;
  int64_t padding = -1;      // the index that is ignored; -1: none
  bool last_offset = false;  // `offsets` includes the end of the last bag
};
// out[p] = a[p] times the matrix of `table` selected for row p at run time: index[p], or with `runs` the first e with
// p < index[e]. Tiles cut the columns of `out`, so queues are static whatever is selected, and each selected matrix is
// read once.
struct ExpertsStage {
  int a = -1, table = -1, index = -1, out = -1;
  bool runs = false;
};

// Fails the step with the node's message if the condition is false; `out` copies the condition.
struct CheckStage {
  int condition = -1, out = -1;
};

// A collective run by the host has one tile, on worker 0: the calling thread, on which an eager collective would run
// too. On a GPU lower_collectives() cuts the elements that each rank has into tiles, no two on one worker; input and
// output are then flat, or have one row per rank. Collectives keep the graph's order whatever their cost, as all ranks
// must issue them in the same order.
struct CollectiveStage {
  int input = -1, output = -1;  // dense; may be the same value
  int ranks = 0;                // 0: run by the host
  int number = 0;               // counts from 1, in the graph's order
  int64_t place = 0, half = 0;  // in the memory shared by ranks: offset of its packets, and distance to those of every
                                // other step
  // Over several nodes: an all_reduce whose tiles send the node's sum to the others (kernels/cuda/loop/between.cuh).
  // `ranks` are then those of a node. `lane`: of its first chunk; `chunk`: bytes of a part. `nodes` 1: on one node.
  int nodes = 1, lane = 0;
  int64_t chunk = 0;
};

// The end of a step in multi-step plans: every worker reads the value once per step, wherever that is in its queue, and
// starts no further step once it is not zero. The stage is replicated on every worker. The value may not be written
// again until all workers have read it, so all of them stop after the same step.
struct StopStage {
  int value = -1;  // one element
};

// Limit of one stage's operands: emitters pass them to a task in an array of this length.
inline constexpr int kMostOperands = 64;

struct Stage {
  std::variant<RowProgram, MatmulStage, ProductsStage, AttentionStage, CombineStage, GatherStage, ScatterStage,
               SelectStage, ScanStage, BagStage, ExpertsStage, CheckStage, CollectiveStage, StopStage>
      body;
  std::vector<Access> accesses;
  int64_t extent = 1;  // of the tile axis
  int64_t grain = 1;   // tiles begin at multiples of it
  double flops = 0;    // of the whole stage
  double bytes = 0;    // bytes read and written, each counted once
  bool replicable =
      false;  // small, and without effects outside temporaries: every worker may compute all of it for itself
  // Stages that the same task runs next, over the same tile and extent, in order. What they read from the stages before
  // them was written by their own tile. `accesses` above includes theirs, except such reads.
  std::vector<Stage> tail;
  int node = -1;        // collectives and checks: the node that has their attributes
  std::string kind;     // for reports and timelines: "rows", "matmul", "attention", ...
  std::string name;     // for reports: "rms_norm" if recognized, else the operators: "mul+add"
  std::string origin;   // of its nodes
  std::string indexed;  // for messages: the operator that takes an index, among several, and its origin
};

// The products of a MatmulStage or ProductsStage; empty for other stages.
inline std::span<const MatmulStage> matmuls_of(const Stage& stage) {
  if (const auto* several = std::get_if<ProductsStage>(&stage.body)) return several->products;
  if (const auto* one = std::get_if<MatmulStage>(&stage.body)) return {one, 1};
  return {};
}

// Groups the graph's nodes into stages, in a valid execution order. Adds values to the graph: other views of its
// buffers. Throws Error(invalid_argument) if a value is read before it is written.
std::vector<Stage> make_stages(Graph& graph);

}  // namespace ark::compiler
