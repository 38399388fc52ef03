// The typed graph that the front end builds and the planner reads. Values are strided views of buffers; nodes are
// ATen-level operators without views.
//
// Views cost nothing: each permute, slice, expand or split is a Value on the same buffer with its own strides, taken
// from PyTorch's metadata. An in-place write (a KV cache) has an output Value on the buffer it mutates. Nodes are kept
// in program order, which is always a valid execution order.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "compiler/graph/scalar_type.hpp"

namespace ark::compiler {

using Shape = std::vector<int64_t>;

struct Buffer {
  enum class Kind : uint8_t {
    input,      // an argument of the call, including parameters
    output,     // allocated by the caller for each call
    temporary,  // in the plan's arena
  };
  Kind kind = Kind::temporary;
  int argument = -1;  // position among the call's inputs or outputs
  int64_t bytes = 0;  // extent from the first byte that any of its Values may touch
  bool mutated = false;
  bool parameter = false;  // an input that never changes between calls (weights): may be loaded before any wait
};

// The layout of an argument or intermediate result: element (i, j, ...) is at buffer + (offset + i*strides[0] +
// j*strides[1] + ...) * size_of(type). A literal has no buffer and shape [].
struct Value {
  int buffer = -1;
  ScalarType type = ScalarType::f32;
  Shape shape;
  Shape strides;       // in elements; 0 where expanded
  int64_t offset = 0;  // in elements
  double literal = 0;  // of type `type`; i64 literals are exact up to 2^53

  bool is_literal() const { return buffer < 0; }
  int64_t elements() const;
};

using Attribute = std::variant<bool, int64_t, double, std::string, std::vector<int64_t>>;
using Attributes = std::map<std::string, Attribute>;

// Operators. Inputs broadcast as in PyTorch. Floating types are computed in float32 and integers in int64; the result
// is rounded to the output's type.
//
//    name         inputs                     outputs   attributes
//    <pointwise>  1 to 3                     1         names in pointwise_ops(): add, mul, where, exp, cast, ...
//    iota         -                          1         start, step (int)
//    sum mean amax amin argmax any           1 -> 1    dims (ints), keepdim (bool); argmax: first of equal maxima
//    matmul       a [*, M, K], b [*, K, N], bias (optional, broadcasts to [*, M, N])    1
//                                                      tf32 (bool): of float32; a GPU may multiply in TF32
//    dequant_matmul  a [M, K], codes [K, N], scale, zero (optional, [K / group, N]), bias (optional)    1 -> [M, N]
//                                                      product with quantized weights: (code - offset) * scale.
//                                                      bits (int): 8, int8 or float8_e4m3fn codes; or 4, two codes of
//                                                      adjacent depths in each byte of [K / 2, N] int8 or uint8;
//                                                      signed (bool), high_first (bool: the first of two codes is in
//                                                      the high bits), both for 4 bits only;
//                                                      offset (int); scaled (bool: there is a scale); zero ("": none;
//                                                      "before": subtracted before scaling; "after": added after
//                                                      scaling); biased (bool: there is a bias). block (int): if not
//                                                      0, 4-bit codes are [N / block, K, block / 2], dense, and byte j
//                                                      of a depth holds columns j and j + block / 2
//    scaled_matmul  a [M, K], b [K, N], both float8_e4m3fn; scales [M, 1] and [1, N], bias (optional)   1 -> [M, N]
//                                                      a b times both scales, plus the bias. M > 16, K a multiple of
//                                                      16; fast_accum (bool): sums may keep fewer bits than float32 has
//    attention    q [B, H, T, D], k, v [B, Hkv, S, D], mask (optional, bool or additive, broadcasts to [B, H, T, S])
//                                            1         scale (float), causal (bool: key <= query position),
//                                                      nan_rows (bool: rows without any position give NaN, as a
//                                                      softmax does, not zeros)
//    gather       table, index               1         dim: out[.., index.., ..] = table[.., index.., ..] along dim;
//                                                      several indices of one shape apply to dim and those after it;
//                                                      along (bool): index has out's shape, and
//                                                      out[.., i, ..] = table[.., index[.., i, ..], ..]
//    scatter      base, index [n], source    1         dim: base[.., index[i], ..] = source[.., i, ..] in place; the
//                                                      output is on base's buffer; accumulate (bool): +=;
//                                                      along (bool): index has source's shape
//                 both: wrap (bool: negative indices count from the end); called (text: the user's name for it)
//    topk         a                          1 -> i64  dim, largest (bool), stable (bool): indices of the largest
//                                                      (smallest) elements of each row, in order, NaN largest; as many
//                                                      as the result's length along dim; stable: ties in index order
//    cumsum cumprod                1 -> 1              dim; accumulated in float64 or int64
//    embedding_bag  table [V, D], index [n], offsets [b], weights [n] (optional)        1 -> [bags, D]
//                                                      mode ("sum", "mean", "max"), padding_idx (int; -1: none),
//                                                      include_last_offset (bool); an empty bag gives zeros
//    experts      a [*, K], table [E, K, N], index     1 -> [*, N]  out[p] = a[p] table[index[p]]; runs (bool): index
//                                                      [E] holds the end of each matrix's rows in a [P, K]; rows after
//                                                      the last end give zeros
//    check        condition (bool [])        1         message; copies the condition; false fails the step
//    all_reduce, all_gather, reduce_scatter, all_to_all
//                 1 -> 1, dense              group (int: index among the region's groups); reduce_op ("sum", "avg",
//                 ...);
//                                            ranks (int: of the group; GPUs need it);
//                                            input_splits, output_splits (ints; all_to_all; empty: even)
//    stop         one element                -         in multi-step plans: no step follows once it is not zero
struct Node {
  std::string op;
  std::vector<int> inputs;
  std::vector<int> outputs;
  Attributes attributes;
  std::string origin;  // for messages: "layers.0.attn.wq (model.py:31)"

  int64_t integer(const std::string& name, int64_t otherwise = 0) const;
  double real(const std::string& name, double otherwise = 0) const;
  bool flag(const std::string& name, bool otherwise = false) const;
  std::string text(const std::string& name) const;
  std::vector<int64_t> integers(const std::string& name) const;
};

class Graph {
 public:
  // Each returns an index, and throws Error(invalid_argument) naming the node's origin if the argument is invalid.
  int add_buffer(const Buffer& buffer);
  int add_value(const Value& value);
  int add_node(const Node& node);
  void check() const;  // every value is written before it is read; the rest was checked as it was added

  const std::vector<Buffer>& buffers() const { return buffers_; }
  const std::vector<Value>& values() const { return values_; }
  const std::vector<Node>& nodes() const { return nodes_; }
  const Buffer& buffer_of(int value) const { return buffers_[values_[value].buffer]; }
  int inputs() const { return inputs_; }
  int outputs() const { return outputs_; }

 private:
  std::vector<Buffer> buffers_;
  std::vector<Value> values_;
  std::vector<Node> nodes_;
  int inputs_ = 0;
  int outputs_ = 0;
};

// Pointwise operators and their number of operands; nullptr for an unknown name.
struct PointwiseOp {
  const char* name;
  int operands;
  bool boolean;  // the result is bool whatever the operands (comparisons, logical operators)
};
const PointwiseOp* find_pointwise(const std::string& name);
const std::vector<PointwiseOp>& pointwise_ops();

}  // namespace ark::compiler
