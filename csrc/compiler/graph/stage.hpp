// A stage: one operator, or several that run in one go, with a tile space of one axis. The tiler cuts the axis into
// tasks; the accesses say which part of which value a tile touches.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "compiler/graph/graph.hpp"

namespace ark::compiler {

// What caches shall do with what an access touches; cache_policy.hpp chooses. No policy changes a bit of a result.
enum class CachePolicy : uint8_t {
  normal,
  evict_first,  // makes way before all else, and passes the first-level cache
  evict_last,   // stays longest
  no_allocate,  // passes the first-level cache; on a CPU all of them
};

// Which part of a value a tile touches. Stages look at buffers through views of their own where that makes one
// dimension of several (heads of all sequences, rows of all batches), so that one axis is enough. Tile [begin, end) of
// an extent E touches, of a value whose dimension `axis` has length L, indices [begin*L/E, end*L/E) (L is a multiple of
// E, or E of L with tiles that respect it: `grain`); axis -1: all of it.
struct Access {
  int value = -1;
  int axis = -1;
  bool write = false;
  bool sparse = false;  // touches some of it, known at run time: a gather's table, a scatter's base
  CachePolicy cache = CachePolicy::normal;
};

// Pointwise operators and reductions over one index space, as one pass over rows: the whole of norms, softmax,
// residuals, rotary embeddings, activations, masks. The row's columns are the last `inner` dimensions of `shape`; a
// reduction turns a register of the row's columns into one number of the row. Registers are numbered by instruction.
// A register of bfloat16 or float16 is rounded to it though it is held as float32; what is used inside the stage alone
// is float32. No load of a program sees what a store of it writes, but for stores to the very element that the same row
// and column loaded, in programs that reduce nothing; `load`s may thus be repeated, as often as it suits the emitter.
struct RowProgram {
  struct Instruction {
    enum class Kind : uint8_t {
      load,     // value, broadcast over `shape`
      literal,  // value is a literal
      index,    // the position along dimension args[0] of `shape` (i64)
      op,       // pointwise `name` of registers args
      reduce,   // `name` (sum, mean, amax, amin, argmax, any) over the row's columns of register args[0]
      store,    // register args[0] into value, which has `shape`, or is 1 long (or absent) in the reduced dimensions;
                // with args[1]: `through` an index, into value of which that is the last dimension
    };
    Kind kind = Kind::op;
    std::string name;
    std::vector<int> args;
    int value = -1;
    ScalarType type = ScalarType::f32;  // of the result, rounded to it
    bool scalar = false;                // one number a row
    Shape strides;                      // load, store: the value's strides over `shape` (0: broadcast or reduced)
    // A load of several: the sum, in order, of so many elements, so far apart. Only split_k() makes them.
    struct Parts {
      int64_t count = 1, apart = 0;
    } parts = {};
    // As many strides further as register args[1] says, which is checked against the size. `dim`: what the user calls
    // the dimension. `wrap`: negative indices count from the end.
    struct Through {
      int64_t stride = 0, size = 0;
      int dim = 0;
      bool wrap = false;
    } through;
  };
  Shape shape;
  int inner = 0;
  int axis = -1;  // the dimension of `shape` that tiles cut, by indices as in Access; an outer one, or, where nothing
                  // is reduced, any; -1: extent is 1
  std::vector<Instruction> code;
};

// An all_reduce that is no stage: who makes a rank's part sends it to all ranks, and who reads the sum adds their
// parts. Only fuse_all_reduce() makes them. `ranks` 0: there is none.
struct Push {
  int node = -1;                           // the all_reduce
  int ranks = 0, number = 0;               // these and the places as of a CollectiveStage
  int64_t place = 0, half = 0, apart = 0;  // `apart`: bytes from the packets of one rank to those of the next
  int64_t elements = 0;
};

// How weights are coded: number [d, c] of `b` is (code [d, c] - offset) * scale [d / group, c]. `zero`, where there is
// one, is subtracted from the code as well, or, `zero_after`, added to the result.
struct Codes {
  int bits = 0;             // 8, or 4: two a byte, of adjacent depths; 0: b holds the numbers themselves
  bool is_signed = false;   // of 4 bits
  bool high_first = false;  // of two in a byte, the first in its high bits
  int64_t offset = 0;
  int scale = -1, zero = -1;  // values [k / group, n]; -1: none
  bool zero_after = false;
  int64_t group = 0;
  // Of 4 bits on a CPU: so many columns side by side, byte j of a depth having columns j and j + block / 2. `b` is then
  // [n / block, k, block / 2]. 0: columns of bytes.
  int64_t block = 0;
};

struct MatmulStage {
  int a = -1, b = -1, out = -1, bias = -1;  // values; bias -1: none
  int64_t batch = 1, m = 1, n = 1, k = 1;
  // What tiles cut: the last dimension of `out`, the last but one, or the outer one that the Access of `out` names.
  enum class Axis : uint8_t { columns, rows, batch } axis = Axis::columns;
  // What a GPU's kernel takes at once; 0: it chooses for itself. See matmul_tiling.hpp.
  int64_t tile_rows = 0, tile_columns = 0;
  // What is done to each element before it is stored: its load stands for the element, rounded to its type, its store
  // for `out`. Empty: nothing. See epilogue_fusion.hpp.
  std::vector<RowProgram::Instruction> finish = {};
  // What lies at `out` is the sum over ranks.
  Push push = {};
  // Of products of coded weights, which are cut by columns, or on a CPU by rows, and have one batch.
  Codes codes = {};
};

// Several that share `a`, each with columns as tiles' axis; only fuse_horizontally() makes them. Tiles take their part
// of each, so that products of the same width have the same columns in one tile.
struct ProductsStage {
  std::vector<MatmulStage> products;
};

struct AttentionStage {
  int q = -1, k = -1, v = -1, mask = -1, out = -1;
  double scale = 1;
  bool causal = false;
  int64_t first_query = 0;  // position of the first query row, for `causal`; only split_queries() sets it
  // Where it is given, `out` gets sums that are not divided yet, and this each row's greatest score and its total; only
  // split_kv() sets it.
  int states = -1;
  // Where it is given, a position is added before it is looked at: its key and value, dense rows by head, which the
  // same task has made, become those of the cache's row `position`, if k and v have that. `cache`: k from the cache's
  // first row on, of which there are `size`; `dim`: what the user calls them. Only fuse_kv_append() makes them.
  struct Added {
    int k = -1, v = -1, position = -1, cache = -1;
    int64_t size = 0;
    int dim = 0;
    bool wrap = false;  // negative indices count from the end
  } added = {};
  // Tiles cut KV heads (their query heads go together) or, where the Access of `out` names dimension 0, the batch;
  // blocks of positions that the mask rules out whole are not read: work follows the actual length.
};

// Attention from what its parts left: the first dimension of `sums` and `states` counts them. Tiles cut query heads or,
// where the Access of `out` names dimension 0, the batch.
struct CombineStage {
  int sums = -1, states = -1, out = -1;
};

// Tiles cut the dimension of `out` that its Access names. Several indices are for as many dimensions, from `dim`.
// `wrap`: negative indices count from the end. `along`: an index for each element of `out`.
struct GatherStage {
  int table = -1;
  std::vector<int> indices;
  int out = -1, dim = 0;
  bool wrap = false, along = false;
};
// Tiles cut the dimension of `source` that its Access names (dim itself: positions; then base's axis is -1). `along`:
// an index for each element of `source`. `accumulate`: adds, position after position.
struct ScatterStage {
  int base = -1, index = -1, source = -1, dim = 0;
  bool wrap = false, along = false, accumulate = false;
};
// Where the greatest (least) of each row along `dim` are, as many as `out` is long there. Tiles cut another dimension.
// `stable`: of equals the first comes first; else as std::nth_element leaves them, which is what PyTorch does.
struct SelectStage {
  int input = -1, out = -1, dim = 0;
  bool largest = true, stable = false;
};
// Running sums or products along `dim`. Tiles cut another dimension.
struct ScanStage {
  int input = -1, out = -1, dim = 0;
  bool product = false;
};
// Rows of `table` pooled bag by bag. Tiles cut `out`: bags, or columns.
struct BagStage {
  int table = -1, index = -1, offsets = -1, weights = -1, out = -1;  // weights -1: none
  enum class Mode : uint8_t { sum, mean, max } mode = Mode::sum;
  int64_t padding = -1;      // the index that counts for nothing; -1: none
  bool last_offset = false;  // `offsets` ends with the end of the last bag
};
// out[p] = a[p] times the matrix of `table` that is row p's, known at run time: index[p], or, `runs`, the first e with
// p < index[e]. Tiles cut the columns of `out`, so that queues are static whatever is chosen, and only matrices that
// were chosen are read, each once.
struct ExpertsStage {
  int a = -1, table = -1, index = -1, out = -1;
  bool runs = false;
};

// Ends the step with the node's message where the condition does not hold; `out` repeats it.
struct CheckStage {
  int condition = -1, out = -1;
};

// For the host to run: one tile, on worker 0, the thread that called, which is the one that an eager collective runs on
// too. On a GPU lower_collectives() makes tiles of it, no two on one worker, which cut the elements that each rank
// has; input and output are then flat, or of as many rows as ranks. Collectives keep the graph's order among
// themselves, whatever they cost: all ranks must issue the same order.
struct CollectiveStage {
  int input = -1, output = -1;  // dense; may be the same value
  int ranks = 0;                // 0: for the host
  int number = 0;               // from 1, in the graph's order
  int64_t place = 0, half = 0;  // in the memory that ranks share: where its packets lie, and those of every other step
};

// The end of a loop of steps, in multi-step plans: every worker looks at a number once a step, on its queue wherever
// that is, and begins no other step where it was not zero. A replica on every worker; nobody may write the number again
// before all have looked, so all workers end after the same step.
struct StopStage {
  int value = -1;  // one element
};

// Of one stage: emitters hand operands to a task in an array of this length.
inline constexpr int kMostOperands = 64;

struct Stage {
  std::variant<RowProgram, MatmulStage, ProductsStage, AttentionStage, CombineStage, GatherStage, ScatterStage,
               SelectStage, ScanStage, BagStage, ExpertsStage, CheckStage, CollectiveStage, StopStage>
      body;
  std::vector<Access> accesses;
  int64_t extent = 1;  // of the tile axis
  int64_t grain = 1;   // tiles begin at multiples of it
  double flops = 0;    // of the whole stage
  double bytes = 0;    // read and written, each byte once
  bool replicable =
      false;  // small and without effect outside temporaries: every worker may compute all of it for itself
  // What the same task does next, over the same tile: stages of this one's extent, in order. What they read of what
  // stands before them here, their own tile has written; `accesses` above are those of all, without such reads.
  std::vector<Stage> tail;
  int node = -1;        // collectives and checks: their attributes stand there
  std::string kind;     // for people and timelines: "rows", "matmul", "attention", ...
  std::string name;     // for people: "rms_norm" where recognised, else what it does: "mul+add"
  std::string origin;   // of its nodes
  std::string indexed;  // for people: the operator among several that takes an index, and its origin
};

// Of a MatmulStage or a ProductsStage; else none.
inline std::span<const MatmulStage> matmuls_of(const Stage& stage) {
  if (const auto* several = std::get_if<ProductsStage>(&stage.body)) return several->products;
  if (const auto* one = std::get_if<MatmulStage>(&stage.body)) return {one, 1};
  return {};
}

// Groups the graph's nodes into stages, in an order that is valid to execute. Throws Error(invalid_argument) for a
// graph that reads what is not written. Adds values to the graph: other views of its buffers.
std::vector<Stage> make_stages(Graph& graph);

}  // namespace ark::compiler
