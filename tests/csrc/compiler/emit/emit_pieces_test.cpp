// Tests which row programs a GPU's threads take in pieces, how many threads take a row, and what an operand at any
// address changes.
#include <gtest/gtest.h>

#include <string>

#include "compiler/emit/cuda/emit_cuda.hpp"
#include "compiler/graph/graph_builder.hpp"
#include "compiler/passes/pipeline.hpp"
#include "compiler/schedule/targets.hpp"

namespace ark::compiler {
namespace {

std::string emitted(const GraphBuilder& make) {
  return emit_cuda(make_plan(make.graph, gpu_target("sm_90a", 132))).text;
}

bool contains(const std::string& text, const std::string& what) {
  return text.find(what) != std::string::npos;
}

// x / (the sum of its rows' squares), of rows that are `spare` elements apart.
std::string normed_rows(int64_t rows, int64_t columns, ScalarType type, int64_t spare = 0) {
  GraphBuilder make;
  const int all = make.input({rows, columns + spare}, type);
  const int x = spare == 0 ? all : make.slice(all, 1, 0, columns);
  const int squares = make.pointwise("mul", {x, x}, type);
  make.copy_out(make.pointwise("div", {x, make.reduce("sum", squares, {1}, true, type)}, type));
  return emitted(make);
}

// a + b, b with a row for all.
std::string row_added(int64_t rows, int64_t columns, ScalarType type) {
  GraphBuilder make;
  make.copy_out(make.pointwise("add", {make.input({rows, columns}, type), make.input({columns}, type)}, type));
  return emitted(make);
}

TEST(Pieces, AreForManyRows) {
  EXPECT_FALSE(contains(normed_rows(1, 2048, ScalarType::bf16), "RawPiece"));
  EXPECT_FALSE(contains(normed_rows(32, 2048, ScalarType::bf16), "RawPiece"));
  EXPECT_TRUE(contains(normed_rows(256, 2048, ScalarType::bf16), "RawPiece<bf16, 8> k"));
  EXPECT_TRUE(contains(normed_rows(2048, 2048, ScalarType::f32), "RawPiece<float, 4> k"));
}

TEST(Pieces, AreForManyElements) {
  EXPECT_FALSE(contains(row_added(256, 256, ScalarType::bf16), "RawPiece"));
  EXPECT_TRUE(
      contains(row_added(512, 512, ScalarType::bf16), "RawPiece<bf16, 4> k"));  // few, so each thread takes less
  EXPECT_TRUE(contains(row_added(64, 8192, ScalarType::bf16), "RawPiece<bf16, 8> k"));
  EXPECT_TRUE(contains(row_added(64, 8192, ScalarType::f32), "RawPiece<float, 4> k"));
}

TEST(Pieces, NeedLinesOfWholePieces) {
  EXPECT_FALSE(contains(normed_rows(2048, 1023, ScalarType::bf16), "RawPiece"));
  EXPECT_FALSE(contains(normed_rows(2048, 1024, ScalarType::bf16, 1), "RawPiece"));  // rows at odd addresses
  EXPECT_TRUE(contains(normed_rows(2048, 1024, ScalarType::bf16, 8), "RawPiece<bf16, 8> k"));
  EXPECT_TRUE(contains(normed_rows(2048, 1020, ScalarType::f32), "RawPiece<float, 4> k"));
  EXPECT_FALSE(contains(row_added(2049, 1023, ScalarType::bf16), "RawPiece"));
  EXPECT_TRUE(contains(row_added(2049, 1016, ScalarType::bf16), "RawPiece<bf16, 8> k"));
}

// As few warps take a row as have the registers for it, and at least as many as there are rows for.
TEST(Pieces, ManyRowsAreInFlight) {
  EXPECT_TRUE(contains(normed_rows(2048, 768, ScalarType::bf16), "using Group = Warp;"));
  EXPECT_TRUE(contains(normed_rows(2048, 2048, ScalarType::bf16), "using Group = Warps2;"));
  EXPECT_TRUE(contains(normed_rows(2048, 4096, ScalarType::bf16), "using Group = Warps4;"));
  EXPECT_TRUE(contains(normed_rows(2048, 16384, ScalarType::bf16), "using Group = Block;"));
  EXPECT_FALSE(contains(normed_rows(2048, 65536, ScalarType::bf16), "RawPiece"));
  EXPECT_TRUE(contains(normed_rows(600, 512, ScalarType::bf16), "using Group = Warp;"));
  EXPECT_TRUE(contains(normed_rows(600, 768, ScalarType::bf16), "using Group = Warps2;"));
}

// A row's loads all come before its first pass, and its passes use what they loaded.
TEST(Pieces, ALoadServesAllPasses) {
  const std::string text = normed_rows(2048, 768, ScalarType::bf16);
  const size_t load = text.find("load_pieces<Group, 8, 768>("), pass = text.find("for_pieces<Group, 8, 768>(");
  ASSERT_NE(load, std::string::npos);
  EXPECT_LT(load, pass);
  EXPECT_NE(text.find("for_pieces<Group, 8, 768>(", pass + 1), std::string::npos);
  EXPECT_EQ(text.find("].load<", text.find("].load<") + 1), std::string::npos);
  EXPECT_LT(pass, text.find("widen_anew(k0);"));
}

TEST(Pieces, OperandsAreExpectedToBeAligned) {
  const std::string text = row_added(64, 8192, ScalarType::bf16);
  EXPECT_TRUE(contains(text, "k0[turn].load<kAligned>("));
  EXPECT_TRUE(contains(text, "store_piece<kAligned>("));
  EXPECT_TRUE(contains(text, "constexpr bool kAligned = true;"));
}

// Rounding is left to the store if nothing else reads the result.
TEST(Pieces, AResultIsRoundedOnce) {
  EXPECT_FALSE(contains(row_added(64, 8192, ScalarType::bf16), "round_to("));
  GraphBuilder make;
  const int a = make.input({64, 8192}, ScalarType::bf16);
  const int twice = make.into(make.output({64, 8192}, ScalarType::bf16), "add", {a, a});
  make.copy_out(make.pointwise("mul", {twice, a}, ScalarType::bf16));
  EXPECT_TRUE(contains(emitted(make), "round_to(ark::loop::add("));
}

}  // namespace
}  // namespace ark::compiler
