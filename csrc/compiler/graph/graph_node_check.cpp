// The rules of each operator: the number, types and shapes of its operands, and that its output may be written. Each
// failure names the node's origin.
#include <algorithm>
#include <string>
#include <vector>

#include "compiler/graph/box.hpp"
#include "compiler/graph/graph_check.hpp"
#include "util/format.hpp"

namespace ark::compiler {

namespace {

// The operands of one node and the questions that the rules ask about them.
class NodeChecker {
 public:
  NodeChecker(const Graph& graph, const Node& node) : graph_(graph), node_(node) {}

  void check() {
    for (int value : node_.inputs) check_computed(value_of(value));
    for (int value : node_.outputs) {
      if (node_.op != "round_e4m3" || value_of(value).type != ScalarType::e4m3) check_computed(value_of(value));
      check_output(value_of(value));
    }
    check_operator();
    check_in_place();
  }

 private:
  void check_operator() const {
    if (const PointwiseOp* op = find_pointwise(node_.op)) return pointwise(*op);
    if (node_.op == "iota") return iota();
    if (is_reduction(node_.op)) return reduction();
    if (node_.op == "matmul") return matmul();
    if (node_.op == "dequant_matmul") return dequant_matmul();
    if (node_.op == "scaled_matmul") return scaled_matmul();
    if (node_.op == "attention") return attention();
    if (node_.op == "gather") return gather();
    if (node_.op == "topk" || node_.op == "cumsum" || node_.op == "cumprod") return along_rows();
    if (node_.op == "embedding_bag") return embedding_bag();
    if (node_.op == "experts") return experts();
    if (node_.op == "check") return check_condition();
    if (node_.op == "scatter") return scatter();
    if (is_collective(node_.op)) return collective();
    if (node_.op == "stop") return stop();
    fail_node(node_, "there is no such operator");
  }

  template <class... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> pattern, const Args&... args) const {
    fail_node(node_, formatted(pattern, args...));
  }

  const Value& value_of(int value) const {
    if (value < 0 || value >= static_cast<int>(graph_.values().size())) {
      fail("value {} of {}", value, graph_.values().size());
    }
    return graph_.values()[value];
  }
  const Value& in(size_t i) const { return graph_.values()[node_.inputs[i]]; }
  const Value& out() const { return graph_.values()[node_.outputs[0]]; }

  void check_computed(const Value& value) const {
    if (is_code(value.type) && node_.op != "dequant_matmul" && node_.op != "scaled_matmul")
      fail("takes no codes of {}", name_of(value.type));
  }

  void check_output(const Value& value) const {
    if (value.is_literal()) fail("writes to a literal");
    const Buffer& buffer = graph_.buffers()[value.buffer];
    if (buffer.kind == Buffer::Kind::input && !buffer.mutated) {
      fail("writes to input {}, which is not marked as mutated", buffer.argument);
    }
    if (overlaps_itself(value)) fail("writes a view that may overlap itself");
  }

  void count(size_t least, size_t most) const {
    if (node_.inputs.size() < least || node_.inputs.size() > most || node_.outputs.size() != 1) {
      fail("takes {}{} operands and gives one result, here {} and {}", least,
           most > least ? formatted(" to {}", most) : "", node_.inputs.size(), node_.outputs.size());
    }
  }

  void expect_shape(const Value& value, const Shape& shape, const char* what) const {
    if (value.shape != shape) {
      fail("{} has shape {}, should have {}", what, to_string(value.shape), to_string(shape));
    }
  }

  void expect_floating(const Value& value) const {
    if (!is_floating(value.type)) fail("takes floating types, not {}", name_of(value.type));
  }

  void expect_type(const Value& value, ScalarType type, const char* what) const {
    if (value.type != type) {
      fail("{} is {}, should be {}", what, name_of(value.type), name_of(type));
    }
  }

  void expect_index(const Value& value) const {
    if (value.type != ScalarType::i64 && value.type != ScalarType::i32) fail("takes an index of int64 or int32");
    if (value.is_literal()) fail("takes an index that is no literal");
  }

  void pointwise(const PointwiseOp& op) const {
    const auto operands = static_cast<size_t>(op.operands);
    count(operands, operands);
    Shape shape;
    for (size_t i = 0; i < operands; ++i) shape = broadcast(node_, shape, in(i).shape);
    if (!broadcasts_to(shape, out().shape)) {
      fail("operands of shape {}, a result of {}", to_string(shape), to_string(out().shape));
    }
    if (op.boolean) expect_type(out(), ScalarType::boolean, "the result");
    if (node_.op == "where") expect_type(in(0), ScalarType::boolean, "the condition");
    if (node_.op.rfind("bitwise_", 0) == 0) {
      for (size_t i = 0; i < operands; ++i) {
        if (is_floating(in(i).type)) fail("takes integers or bool");
      }
      if (is_floating(out().type)) fail("gives integers or bool");
    }
  }

  void iota() const {
    count(0, 0);
    if (out().shape.size() != 1) fail("gives one dimension");
  }

  void reduction() const {
    count(1, 1);
    if (in(0).is_literal()) fail("takes no literal");
    const auto rank = static_cast<int>(in(0).shape.size());
    const std::vector<int> dims = reduced_dims(node_, rank);
    const bool keep = node_.flag("keepdim");
    Shape shape;
    for (int i = 0; i < rank; ++i) {
      const bool reduced = std::find(dims.begin(), dims.end(), i) != dims.end();
      if (!reduced || keep) shape.push_back(reduced ? 1 : in(0).shape[i]);
    }
    expect_shape(out(), shape, "the result");
    if (node_.op == "argmax") expect_type(out(), ScalarType::i64, "the result");
    if (node_.op == "any") expect_type(out(), ScalarType::boolean, "the result");
    if (node_.op == "mean") expect_floating(out());
  }

  void matmul() const {
    count(2, 3);
    const Value &a = in(0), &b = in(1);
    if (a.shape.size() < 2 || b.shape.size() < 2) fail("takes operands of at least two dimensions");
    for (const Value* value : {&a, &b, &out()}) expect_floating(*value);
    if (node_.flag("tf32") && (a.type != ScalarType::f32 || b.type != ScalarType::f32))
      fail("multiplies {} and {} in TF32, which float32 operands alone may have", name_of(a.type), name_of(b.type));
    const size_t ra = a.shape.size(), rb = b.shape.size();
    if (a.shape[ra - 1] != b.shape[rb - 2]) {
      fail("{} times {}: the inner dimensions differ", to_string(a.shape), to_string(b.shape));
    }
    Shape shape =
        broadcast(node_, Shape(a.shape.begin(), a.shape.end() - 2), Shape(b.shape.begin(), b.shape.end() - 2));
    shape.push_back(a.shape[ra - 2]);
    shape.push_back(b.shape[rb - 1]);
    expect_shape(out(), shape, "the result");
    if (node_.inputs.size() == 3) {
      expect_floating(in(2));
      if (in(2).is_literal()) fail("takes a bias that is no literal");
      if (!broadcasts_to(in(2).shape, shape)) fail("a bias of {} for {}", to_string(in(2).shape), to_string(shape));
    }
  }

  void dequant_matmul() const {
    const bool scaled = node_.flag("scaled"), biased = node_.flag("biased"), four = node_.integer("bits") == 4;
    const std::string zero = node_.text("zero");
    const size_t operands = 2 + (scaled ? 1 : 0) + (zero.empty() ? 0 : 1) + (biased ? 1 : 0);
    count(operands, operands);
    const Value &a = in(0), &codes = in(1);
    const int64_t block = node_.integer("block");
    for (const Value* value : {&a, &codes, &out()})
      if (value->shape.size() != (value == &codes && block != 0 ? 3 : 2))
        fail("takes and gives two dimensions, not {}", to_string(value->shape));
    for (const Value* value : {&a, &out()}) expect_floating(*value);
    if (!four && node_.integer("bits") != 8) fail("takes codes of 4 or 8 bits");
    if (!is_code(codes.type) || codes.type == (four ? ScalarType::e4m3 : ScalarType::u8))
      fail("takes no codes of {}", name_of(codes.type));
    const int64_t offset = node_.integer("offset") + (node_.flag("signed") ? 8 : 0);
    const int64_t most = codes.type == ScalarType::e4m3 ? 0 : 128;  // the largest offset that keeps numbers exact in
                                                                    // half types
    if (offset < (four ? 0 : -most) || offset > most) fail("subtracts {} from its codes", offset);
    if (!zero.empty() && zero != "before" && zero != "after") fail("has no zeros '{}'", zero);
    const int64_t k = a.shape[1], n = block != 0 ? out().shape.at(1) : codes.shape[1];
    if (block != 0) {
      if (!four || block % 32 != 0 || n % block != 0) fail("has blocks of {} columns", block);
      expect_shape(codes, {n / block, k, block / 2}, "what is coded");
      if (codes.strides != Shape{k * block / 2, block / 2, 1}) fail("takes blocks without gaps");
    } else {
      expect_shape(codes, {four ? k / 2 : k, n}, "what is coded");
      if ((four && k % 2 != 0) || codes.strides[0] != 1)
        fail("takes codes that are adjacent along a depth that is even");
    }
    expect_shape(out(), {a.shape[0], n}, "the result");
    const int64_t groups = operands - (biased ? 1 : 0) > 2 ? (in(2).shape.empty() ? 0 : in(2).shape[0]) : 1;
    if (groups < 1 || k % groups != 0 || (groups > 1 && k / groups % 32 != 0))
      fail("takes groups of a multiple of 32, as many as the depth is of, not {} of {}", groups, k);
    for (size_t i = 2; i < operands; ++i) {
      const bool is_bias = biased && i + 1 == operands;
      if (in(i).is_literal()) fail("takes no literal");
      if (!is_bias) expect_shape(in(i), {groups, n}, "a scale or zero");
      if (i == 2 && scaled) expect_floating(in(i));
      if (is_bias) {
        expect_floating(in(i));
        if (!broadcasts_to(in(i).shape, out().shape)) fail("a bias of {}", to_string(in(i).shape));
      }
    }
  }

  void scaled_matmul() const {
    count(4, 5);
    const Value &a = in(0), &b = in(1);
    for (const Value* value : {&a, &b}) {
      expect_type(*value, ScalarType::e4m3, "an operand");
      if (value->shape.size() != 2) fail("takes two dimensions, not {}", to_string(value->shape));
    }
    const int64_t m = a.shape[0], k = a.shape[1], n = b.shape[1];
    expect_shape(b, {k, n}, "the second operand");
    expect_shape(in(2), {m, 1}, "the scale of rows");
    expect_shape(in(3), {1, n}, "the scale of columns");
    expect_shape(out(), {m, n}, "the result");
    expect_floating(out());
    for (size_t i = 2; i < node_.inputs.size(); ++i) {
      expect_floating(in(i));
      if (in(i).is_literal()) fail("takes no literal");
    }
    if (node_.inputs.size() == 5 && !broadcasts_to(in(4).shape, out().shape))
      fail("a bias of {}", to_string(in(4).shape));
    // Tensor cores take operands that are adjacent along the depth, 16 bytes at a time.
    if (m <= 16 || k % 16 != 0 || a.strides[1] != 1 || b.strides[0] != 1)
      fail("takes more than 16 rows, and operands that are adjacent along a depth of a multiple of 16");
    node_.flag("fast_accum");
  }

  void attention() const {
    count(3, 4);
    const Value &q = in(0), &k = in(1), &v = in(2);
    for (const Value* value : {&q, &k, &v, &out()}) {
      expect_floating(*value);
      if (value->shape.size() != 4) fail("takes four dimensions, not {}", to_string(value->shape));
    }
    const int64_t heads = k.shape[1];
    if (q.shape[1] % heads != 0) {
      fail("{} query heads for {} of keys", q.shape[1], heads);
    }
    expect_shape(k, {q.shape[0], heads, k.shape[2], q.shape[3]}, "k");
    expect_shape(v, {q.shape[0], heads, k.shape[2], v.shape[3]}, "v");
    expect_shape(out(), {q.shape[0], q.shape[1], q.shape[2], v.shape[3]}, "the result");
    if (node_.attributes.count("scale") == 0) fail("needs attribute 'scale'");
    node_.real("scale");
    node_.flag("causal");
    node_.flag("nan_rows");
    if (node_.inputs.size() == 4) {
      const Shape scores = {q.shape[0], q.shape[1], q.shape[2], k.shape[2]};
      if (!broadcasts_to(in(3).shape, scores)) fail("a mask of {} for {}", to_string(in(3).shape), to_string(scores));
      if (in(3).type != ScalarType::boolean && !is_floating(in(3).type)) fail("takes a mask of bool or floating type");
    }
  }

  size_t dim_of(const Value& value) const {
    const int64_t dim = node_.integer("dim");
    if (dim < 0 || dim >= static_cast<int64_t>(value.shape.size())) {
      fail("dimension {} of {}", dim, to_string(value.shape));
    }
    return static_cast<size_t>(dim);
  }

  void gather() const {
    count(2, 1 + in(0).shape.size());
    const size_t dim = dim_of(in(0)), indices = node_.inputs.size() - 1;
    for (size_t i = 1; i <= indices; ++i) {
      expect_index(in(i));
      expect_shape(in(i), in(1).shape, "an index");
    }
    Shape shape = in(0).shape;
    if (dim + indices > shape.size()) fail("{} indices from dimension {}", indices, dim);
    if (node_.flag("along")) {
      count(2, 2);
      expect_type(out(), in(0).type, "the result");
      expect_shape(in(1), out().shape, "the index");
      if (out().shape.size() == shape.size()) shape[dim] = out().shape[dim];
      return expect_shape(out(), shape, "the result");
    }
    const auto at = shape.begin() + static_cast<std::ptrdiff_t>(dim);
    const auto behind = shape.erase(at, at + static_cast<std::ptrdiff_t>(indices));
    shape.insert(behind, in(1).shape.begin(), in(1).shape.end());
    expect_shape(out(), shape, "the result");
    expect_type(out(), in(0).type, "the result");
  }

  void scatter() const {
    count(3, 3);
    expect_index(in(1));
    const Value& base = in(0);
    const size_t dim = dim_of(base);
    const bool along = node_.flag("along");
    if (!along && in(1).shape.size() != 1) fail("takes an index of one dimension");
    if (out().buffer != base.buffer || out().offset != base.offset || out().strides != base.strides ||
        out().shape != base.shape || out().type != base.type) {
      fail("the result is not the base that it changes");
    }
    if (along) expect_shape(in(1), in(2).shape, "the index");
    if (in(1).shape.size() <= (along ? dim : 0)) fail("takes an index that has the dimension");
    Shape shape = base.shape;
    shape[dim] = in(1).shape[along ? dim : 0];
    expect_shape(in(2), shape, "the source");
    expect_type(in(2), base.type, "the source");
    if (node_.flag("accumulate") && base.type == ScalarType::boolean) fail("adds no booleans");
  }

  void check_condition() const {
    count(1, 1);
    if (in(0).is_literal()) fail("takes a condition that is no literal");
    for (const Value* value : {&in(0), &out()}) {
      expect_type(*value, ScalarType::boolean, "the condition");
      expect_shape(*value, {}, "the condition");
    }
    node_.text("message");
  }

  void along_rows() const {
    count(1, 1);
    if (in(0).is_literal()) fail("takes no literal");
    const size_t dim = dim_of(in(0));
    if (node_.op != "topk") return expect_shape(out(), in(0).shape, "the result");
    expect_type(out(), ScalarType::i64, "the result");
    Shape shape = in(0).shape;
    if (out().shape.size() == shape.size()) shape[dim] = std::min(shape[dim], out().shape[dim]);
    expect_shape(out(), shape, "the result");
  }

  void embedding_bag() const {
    count(3, 4);
    const Value& table = in(0);
    if (table.is_literal() || table.shape.size() != 2) fail("takes a table of two dimensions");
    expect_floating(table);
    for (const int i : {1, 2}) {
      expect_index(in(i));
      if (in(i).shape.size() != 1) fail("takes indices and offsets of one dimension");
    }
    const int64_t bags = in(2).shape[0] - (node_.flag("include_last_offset") ? 1 : 0);
    expect_shape(out(), {bags, table.shape[1]}, "the result");
    expect_floating(out());
    const std::string mode = node_.text("mode");
    if (mode != "sum" && mode != "mean" && mode != "max") fail("has no mode '{}'", mode);
    if (node_.inputs.size() == 4) {
      if (mode != "sum") fail("takes weights with sums alone");
      if (in(3).is_literal()) fail("takes weights that are no literal");
      expect_floating(in(3));
      expect_shape(in(3), in(1).shape, "weights");
    }
  }

  void experts() const {
    count(3, 3);
    const Value &a = in(0), &table = in(1);
    for (const Value* value : {&a, &table, &out()}) expect_floating(*value);
    if (a.is_literal() || table.is_literal() || table.shape.size() != 3 || a.shape.size() < 2) {
      fail("takes rows and a table of three dimensions");
    }
    expect_index(in(2));
    Shape rows(a.shape.begin(), a.shape.end() - 1);
    if (a.shape.back() != table.shape[1]) fail("takes rows as long as its matrices are high");
    if (node_.flag("runs") && rows.size() != 1) fail("takes rows of one dimension where they come in runs");
    expect_shape(in(2), node_.flag("runs") ? Shape{table.shape[0]} : rows, "the index");
    rows.push_back(table.shape[2]);
    expect_shape(out(), rows, "the result");
  }

  void stop() const {
    if (node_.inputs.size() != 1 || !node_.outputs.empty()) fail("takes one operand and gives no result");
    if (in(0).is_literal()) fail("takes no literal");
    if (in(0).elements() != 1) fail("takes one element, not {}", to_string(in(0).shape));
  }

  void collective() const {
    count(1, 1);
    if (in(0).is_literal()) fail("takes no literal");
    expect_type(out(), in(0).type, "the result");
  }

  // The output must not overlap an operand still to be read; a pointwise operator may overwrite the element it reads.
  void check_in_place() const {
    if (node_.outputs.empty()) return;
    for (size_t i = node_.op == "scatter" ? 1 : 0; i < node_.inputs.size(); ++i) {
      if (!overlap(in(i), out())) continue;
      const bool itself = in(i).offset == out().offset && in(i).type == out().type && in(i).shape == out().shape &&
                          in(i).strides == out().strides;
      if (itself && (find_pointwise(node_.op) != nullptr || is_collective(node_.op))) continue;
      fail("writes over an operand that it reads as another view; copy it first");
    }
  }

  const Graph& graph_;
  const Node& node_;
};

}  // namespace

void check_node(const Graph& graph, const Node& node) {
  NodeChecker(graph, node).check();
}

}  // namespace ark::compiler
