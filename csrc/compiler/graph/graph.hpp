// The typed graph that the front end fills in and the planner reads: values are strided views of buffers, nodes are
// operators of ATen's level that have no views left.
//
// A view costs nothing: every permute, slice, expand, split is a Value on the same buffer with strides of its own, as
// PyTorch's metadata gives them. What writes in place (a KV cache) has an output Value on the buffer that it mutates.
// Nodes are kept in program order, which is always a valid order of execution.
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
    input,      // an argument of the call; parameters too
    output,     // allocated by the caller for each call
    temporary,  // inside the plan's arena
  };
  Kind kind = Kind::temporary;
  int argument = -1;  // position among the call's inputs, or among its outputs
  int64_t bytes = 0;  // extent from the first byte that any of its Values may touch
  bool mutated = false;
  bool parameter = false;  // an input that stays what it is between calls (weights): may be loaded ahead of any wait
};

// What a call's argument or an intermediate result looks like: element (i, j, ...) lies at
// buffer + (offset + i*strides[0] + j*strides[1] + ...) * size_of(type). A literal has no buffer and shape [].
struct Value {
  int buffer = -1;
  ScalarType type = ScalarType::f32;
  Shape shape;
  Shape strides;       // in elements; 0 where expanded
  int64_t offset = 0;  // in elements
  double literal = 0;  // of type: i64 literals are exact up to 2^53

  bool is_literal() const { return buffer < 0; }
  int64_t elements() const;
};

using Attribute = std::variant<bool, int64_t, double, std::string, std::vector<int64_t>>;
using Attributes = std::map<std::string, Attribute>;

// Operators. Inputs broadcast as in PyTorch; compute is float32 for floating types, int64 for integers, and the result
// is rounded to the output's type.
//
//   name         inputs                     outputs   attributes
//   <pointwise>  1 to 3                     1         names in pointwise_ops(): add, mul, where, exp, cast, ...
//   iota         -                          1         start, step (int)
//   sum mean amax amin argmax any           1 -> 1    dims (ints), keepdim (bool); argmax: the first of equals
//   matmul       a [*, M, K], b [*, K, N], bias (optional, broadcasts to [*, M, N])    1
//   dequant_matmul  a [M, K], codes [K, N], scale, zero (optional, [K / group, N]), bias (optional)    1 -> [M, N]
//                                                     a product with coded weights: code - offset, times scale. bits
//                                                     (int): 8, codes of int8 or float8_e4m3fn, or 4, two in each of
//                                                     [K / 2, N] int8 or uint8, of adjacent depths;
//                                                     signed (bool), high_first (bool: of two, the first in the high
//                                                     bits), both of 4 bits;
//                                                     offset (int); scaled (bool), zero ("": none; "before": minus
//                                                     the code, then times scale; "after": plus what is scaled),
//                                                     biased (bool): which inputs there are. block (int): where
//                                                     it is not 0, codes of 4 bits are [N / block, K, block / 2],
//                                                     dense, byte j of a depth having columns j and j + block / 2
//   attention    q [B, H, T, D], k, v [B, Hkv, S, D], mask (optional, bool or additive, broadcasts to [B, H, T, S])
//                                           1         scale (float), causal (bool: key <= query position)
//   gather       table, index               1         dim: out[.., index.., ..] = table[.., index.., ..] along dim;
//                                                     several indices, of one shape: along dim and those that follow;
//                                                     along (bool): index has out's shape, and
//                                                     out[.., i, ..] = table[.., index[.., i, ..], ..]
//   scatter      base, index [n], source    1         dim: base[.., index[i], ..] = source[.., i, ..] in place; the
//                                                     output lies on base's buffer; accumulate (bool): +=;
//                                                     along (bool): index has source's shape
//                both: wrap (bool: negative indices count from the end); called (text: the user's name for it)
//   topk         a                          1 -> i64  dim, largest (bool), stable (bool): where the greatest (least) of
//                                                     each row are, in order, NaN greatest; as many as the result is
//                                                     long along dim; stable: of equals the first comes first
//   cumsum cumprod                1 -> 1              dim; accumulated in float64 or int64
//   embedding_bag  table [V, D], index [n], offsets [b], weights [n] (optional)        1 -> [bags, D]
//                                                     mode ("sum", "mean", "max"), padding_idx (int; -1: none),
//                                                     include_last_offset (bool); what is empty gives zeros
//   experts      a [*, K], table [E, K, N], index     1 -> [*, N]  out[p] = a[p] table[index[p]]; runs (bool): index
//                                                     [E] says where each matrix's rows of a [P, K] end; rows behind
//                                                     the last give zeros
//   check        condition (bool [])        1         message; repeats the condition; false ends the step with an error
//   all_reduce, all_gather, reduce_scatter, all_to_all
//                1 -> 1, dense              group (int: index among the region's groups); reduce_op ("sum", "avg",
//                ...);
//                                           ranks (int: of the group; GPUs need it);
//                                           input_splits, output_splits (ints; all_to_all; empty: even)
//   stop         one element                -         where steps are multi-step: no step follows where it is not zero
struct Node {
  std::string op;
  std::vector<int> inputs;
  std::vector<int> outputs;
  Attributes attributes;
  std::string origin;  // for people: "layers.0.attn.wq (model.py:31)"

  int64_t integer(const std::string& name, int64_t otherwise = 0) const;
  double real(const std::string& name, double otherwise = 0) const;
  bool flag(const std::string& name, bool otherwise = false) const;
  std::string text(const std::string& name) const;
  std::vector<int64_t> integers(const std::string& name) const;
};

class Graph {
 public:
  // Each returns an index. Checked: what is wrong throws Error(invalid_argument) naming the node's origin.
  int add_buffer(const Buffer& buffer);
  int add_value(const Value& value);
  int add_node(const Node& node);
  void check() const;  // what no single node shows: every value is written before it is read

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

// Pointwise operators and how many operands each takes; nullptr where there is no such operator.
struct PointwiseOp {
  const char* name;
  int operands;
  bool boolean;  // the result is bool whatever the operands are (comparisons, logical operators)
};
const PointwiseOp* find_pointwise(const std::string& name);
const std::vector<PointwiseOp>& pointwise_ops();

}  // namespace ark::compiler
