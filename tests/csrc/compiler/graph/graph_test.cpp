// Tests that graphs refuse wrong input and name its origin. Also tests types and the table of pointwise operators.
#include "compiler/graph/graph.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <set>

#include "compiler/verify/interpreter.hpp"
#include "graph_builder.hpp"
#include "util/error.hpp"

namespace ark::compiler {
namespace {

// Returns the error's text, or an empty string.
std::string message_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.message();
  }
  return "";
}
void expect_refused(const std::string& words, const std::function<void()>& act) {
  const std::string message = message_of(act);
  EXPECT_NE(message.find(words), std::string::npos) << "wanted: " << words << "\ngot: " << message;
}
Node node_of(const std::string& op, std::vector<int> inputs, int output, Attributes attributes = {}) {
  return {op, std::move(inputs), {output}, std::move(attributes), "layers.0 (model.py:31)"};
}

TEST(ScalarTypes, HaveThePyTorchNames) {
  for (ScalarType type : {ScalarType::f32, ScalarType::bf16, ScalarType::f16, ScalarType::i64, ScalarType::i32,
                          ScalarType::boolean, ScalarType::i8, ScalarType::u8, ScalarType::e4m3}) {
    EXPECT_EQ(scalar_type(name_of(type)), type);
  }
  EXPECT_THROW(scalar_type("complex64"), Error);
}

TEST(Pointwise, TableHasEachNameOnce) {
  std::set<std::string> names;
  for (const PointwiseOp& op : pointwise_ops()) {
    EXPECT_TRUE(names.insert(op.name).second) << op.name;
    EXPECT_EQ(find_pointwise(op.name), &op);
    // The interpreter must know every operator.
    EXPECT_NO_THROW(apply(op.name, std::vector<double>(static_cast<size_t>(op.operands), 1.0), false)) << op.name;
  }
  EXPECT_EQ(find_pointwise("sum"), nullptr);
}

TEST(Graphs, RefuseBuffersAndValuesThatCannotBe) {
  GraphBuilder builder;
  Buffer empty;
  expect_refused("0 bytes", [&] { builder.graph.add_buffer(empty); });
  Buffer nowhere;
  nowhere.kind = Buffer::Kind::output;
  nowhere.bytes = 4;
  expect_refused("without a position", [&] { builder.graph.add_buffer(nowhere); });
  Buffer changing;
  changing.kind = Buffer::Kind::input;
  changing.argument = 0;
  changing.bytes = 4;
  changing.parameter = changing.mutated = true;
  expect_refused("parameter", [&] { builder.graph.add_buffer(changing); });

  const int x = builder.input({4, 6});
  expect_refused("outside buffer 0 of 96 bytes", [&] { builder.view(x, {4, 6}, {6, 1}, 1); });
  expect_refused("outside", [&] { builder.view(x, {2}, {-1}, 0); });
  expect_refused("length 0", [&] { builder.view(x, {0, 6}, {6, 1}); });
  expect_refused("strides", [&] { builder.view(x, {4, 6}, {1}); });
  Value far = builder.at(x);
  far.buffer = 9;
  expect_refused("buffer 9 of 1", [&] { builder.graph.add_value(far); });
  EXPECT_NO_THROW(builder.view(x, {6}, {-1}, 5));  // reversed, within bounds
  EXPECT_EQ(builder.graph.inputs(), 1);
  EXPECT_EQ(builder.graph.outputs(), 0);
}

TEST(Graphs, RefuseNodesByTheirOperatorsRules) {
  GraphBuilder builder;
  Graph& graph = builder.graph;
  const auto i64 = ScalarType::i64;
  const int a = builder.input({3, 4}), b = builder.input({4, 5}), out = builder.temporary({3, 4});
  const int index = builder.input({2}, i64), truth = builder.temporary({3, 4}, ScalarType::boolean);
  const auto refuse = [&](const std::string& words, const Node& node) {
    expect_refused(words, [&] { graph.add_node(node); });
    const std::string message = message_of([&] { graph.add_node(node); });
    EXPECT_NE(message.find(node.op + " of layers.0 (model.py:31)"), std::string::npos) << message;
  };
  refuse("no such operator", node_of("frobnicate", {a}, out));
  refuse("takes 2 operands", node_of("add", {a}, out));
  refuse("do not broadcast", node_of("add", {a, b}, out));
  refuse("a result of [3, 4]", node_of("neg", {builder.input({2, 3, 4})}, out));
  refuse("should be bool", node_of("lt", {a, a}, out));
  refuse("condition is float32", node_of("where", {a, a, a}, out));
  refuse("integers or bool", node_of("bitwise_and", {a, a}, out));
  refuse("value 99", node_of("neg", {99}, out));
  refuse("not marked as mutated", node_of("neg", {a}, a));
  refuse("writes to a literal", node_of("neg", {a}, builder.literal(1)));
  refuse("may overlap itself", node_of("copy", {a}, builder.expand(builder.temporary({1, 4}), {3, 4})));
  refuse("one dimension", node_of("iota", {}, out));
  refuse("dimension 2 of 2", node_of("sum", {a}, out, {{"dims", std::vector<int64_t>{2}}}));
  refuse("named twice", node_of("sum", {a}, out, {{"dims", std::vector<int64_t>{1, -1}}}));
  refuse("should have [3]", node_of("sum", {a}, out, {{"dims", std::vector<int64_t>{1}}}));
  refuse("wrong type", node_of("sum", {a}, out, {{"dims", int64_t{1}}}));
  refuse("should be int64", node_of("argmax", {a}, builder.temporary({3}), {{"dims", std::vector<int64_t>{1}}}));
  refuse("inner dimensions differ", node_of("matmul", {b, a}, out));
  refuse("should have [3, 5]", node_of("matmul", {a, b}, out));
  refuse("floating types", node_of("matmul", {a, builder.input({4, 5}, i64)}, out));
  refuse("a bias of", node_of("matmul", {a, b, builder.input({4})}, builder.temporary({3, 5})));
  refuse("dimension 3", node_of("gather", {a, index}, out, {{"dim", int64_t{3}}}));
  refuse("should have [2, 4]", node_of("gather", {a, index}, out, {{"dim", int64_t{0}}}));
  refuse("index of int64 or int32", node_of("gather", {a, a}, out, {{"dim", int64_t{0}}}));
  refuse("2 indices from dimension 1", node_of("gather", {a, index, index}, out, {{"dim", int64_t{1}}}));
  const int base = builder.input({5, 4}, ScalarType::f32, true), rows = builder.input({2, 4});
  refuse("not the base", node_of("scatter", {base, index, rows}, builder.temporary({5, 4}), {{"dim", int64_t{0}}}));
  refuse("should have [2, 4]", node_of("scatter", {base, index, a}, base, {{"dim", int64_t{0}}}));
  const int q = builder.input({1, 3, 2, 4}), k = builder.input({1, 2, 5, 4});
  refuse("3 query heads for 2", node_of("attention", {q, k, k}, builder.temporary({1, 3, 2, 4}), {{"scale", 1.0}}));
  const int half = builder.slice(base, 0, 0, 3), other = builder.slice(base, 0, 1, 4);
  refuse("as another view", node_of("neg", {half}, other));
  EXPECT_TRUE(graph.nodes().empty());
  EXPECT_NO_THROW(graph.add_node(node_of("neg", {half}, half)));
  EXPECT_NO_THROW(graph.add_node(node_of("lt", {a, a}, truth)));
}

TEST(Graphs, RefuseCodesThatNoProductReads) {
  GraphBuilder builder;
  const int a = builder.input({3, 64}), out = builder.temporary({3, 5});
  const int eight = builder.transpose(builder.parameter({5, 64}, ScalarType::i8));
  const int four = builder.transpose(builder.parameter({5, 32}, ScalarType::u8));
  const int scale = builder.transpose(builder.parameter({5, 2})), wrong = builder.transpose(builder.parameter({5, 4}));
  const auto product = [&](std::vector<int> inputs, int64_t bits, bool scaled, const char* zero = "",
                           int64_t offset = 0) {
    return node_of("dequant_matmul", std::move(inputs), out,
                   {{"bits", bits},
                    {"signed", false},
                    {"high_first", false},
                    {"offset", offset},
                    {"scaled", scaled},
                    {"zero", std::string(zero)},
                    {"biased", false}});
  };
  const auto refuse = [&](const std::string& words, const Node& node) {
    expect_refused(words, [&] { builder.graph.add_node(node); });
  };
  refuse("takes no codes of int8", node_of("neg", {eight}, builder.temporary({64, 5}, ScalarType::i8)));
  refuse("takes no codes of int8", node_of("matmul", {a, eight}, out));
  refuse("takes no codes of uint8",
         product({a, builder.transpose(builder.parameter({5, 64}, ScalarType::u8))}, 8, false));
  refuse("takes no codes of float32", product({a, builder.transpose(builder.parameter({5, 64}))}, 8, false));
  refuse("4 or 8 bits", product({a, eight}, 2, false));
  refuse("should have [32, 5]", product({a, eight}, 4, false));
  refuse("adjacent", product({a, builder.parameter({64, 5}, ScalarType::i8)}, 8, false));
  refuse("takes 3 operands", product({a, eight}, 8, true));
  refuse("groups of a multiple of 32", product({a, eight, wrong}, 8, true));
  refuse("should have [2, 5]", product({a, four, scale, wrong}, 4, true, "after"));
  refuse("has no zeros 'behind'", product({a, four, scale, scale}, 4, true, "behind"));
  refuse("subtracts -1 from its codes", product({a, four, scale}, 4, true, "", -1));
  EXPECT_NO_THROW(builder.graph.add_node(product({a, four, scale, scale}, 4, true, "before", 8)));
}

TEST(Graphs, RefuseWhatIsReadBeforeItIsWritten) {
  GraphBuilder builder;
  const int x = builder.input({4, 6}), whole = builder.temporary({8, 6});
  builder.into(builder.slice(whole, 0, 0, 4), "copy", {x});
  EXPECT_NO_THROW(builder.graph.check());
  const int part = builder.slice(whole, 0, 1, 4);
  builder.copy_out(part);
  EXPECT_NO_THROW(builder.graph.check());
  GraphBuilder early = builder;
  early.copy_out(whole);
  expect_refused("before all of it is written", [&] { early.graph.check(); });
  // Writing the odd and the even rows of the rest completes it.
  builder.into(builder.slice(whole, 0, 4, 8, 2), "copy", {builder.slice(x, 0, 0, 2)});
  GraphBuilder odd = builder;
  odd.copy_out(odd.transpose(whole));
  expect_refused("before all of it is written", [&] { odd.graph.check(); });
  builder.into(builder.slice(whole, 0, 5, 8, 2), "copy", {builder.slice(x, 0, 2, 4)});
  builder.copy_out(builder.transpose(whole));
  EXPECT_NO_THROW(builder.graph.check());
  // A result of the call has no content either.
  const int result = builder.output({3});
  builder.copy_out(result);
  expect_refused("before all of it is written", [&] { builder.graph.check(); });
}

}  // namespace
}  // namespace ark::compiler
