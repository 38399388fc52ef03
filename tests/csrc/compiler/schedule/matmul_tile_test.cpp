// Tests which products are multiplied in tiles, and that those of the same rows choose theirs together.
#include "compiler/schedule/matmul_tile.hpp"

#include <gtest/gtest.h>

#include <set>
#include <utility>
#include <variant>

#include "compiler/graph/graph_builder.hpp"
#include "compiler/passes/pipeline.hpp"
#include "compiler/schedule/plan.hpp"
#include "compiler/schedule/targets.hpp"

namespace ark::compiler {
namespace matmul_tile_test {

constexpr int kWorkers = 132;
constexpr ScalarType kHalf = ScalarType::bf16;

int linear(GraphBuilder& builder, int a, int64_t n) {
  const int64_t k = builder.at(a).shape.back();
  return builder.matmul(a, builder.transpose(builder.parameter({n, k}, builder.at(a).type)), -1, builder.at(a).type);
}

bool in_tiles(int64_t rows, int64_t columns, int64_t depth, const char* target, ScalarType type = kHalf) {
  GraphBuilder builder;
  const int a = builder.input({rows, depth}, type);
  MatmulStage product;
  product.a = a;
  product.b = builder.transpose(builder.parameter({columns, depth}, type));
  product.m = rows;
  product.n = columns;
  product.k = depth;
  return multiplied_in_tiles(builder.graph, product, gpu_target(target, kWorkers));
}

TEST(MatmulTile, FewRowsAreInTilesIfTheMatrixIsLarge) {
  for (const int64_t rows : {5, 8, 16}) {
    EXPECT_TRUE(in_tiles(rows, 8192, 2048, "sm_90a")) << rows;
    EXPECT_FALSE(in_tiles(rows, 2048, 2048, "sm_90a")) << rows;
    EXPECT_FALSE(in_tiles(rows, 8192, 2048, "sm_80")) << rows;
    EXPECT_FALSE(in_tiles(rows, 8192, 2048, "sm_90a", ScalarType::f32)) << rows;
  }
  for (const int64_t rows : {1, 4}) EXPECT_FALSE(in_tiles(rows, 8192, 2048, "sm_90a")) << rows;
  for (const char* target : {"sm_80", "sm_90a"}) EXPECT_TRUE(in_tiles(17, 64, 64, target)) << target;
}

// The tile columns of all products of the plan, by their number of columns.
std::set<std::pair<int64_t, int64_t>> tiles_of(Graph& graph) {
  std::set<std::pair<int64_t, int64_t>> found;
  for (const Stage& stage : make_plan(graph, gpu_target("sm_90a", kWorkers)).stages)
    if (const auto* product = std::get_if<MatmulStage>(&stage.body))
      found.emplace(product->n, product->tile_rows * 1000 + product->tile_columns);
  return found;
}

TEST(MatmulTile, ProductsOfTheSameRowsChooseTogether) {
  GraphBuilder together, alone;
  const int rows = together.input({512, 2048}, kHalf);
  for (const int64_t columns : {2048, 512, 512}) together.copy_out(linear(together, rows, columns));
  alone.copy_out(linear(alone, alone.input({512, 2048}, kHalf), 512));
  const auto shared = tiles_of(together.graph), own = tiles_of(alone.graph);
  ASSERT_EQ(shared.size(), 2u);
  ASSERT_EQ(own.size(), 1u);
  EXPECT_EQ(shared.begin()->second, shared.rbegin()->second) << "tiles of different shapes";
  EXPECT_NE(shared.begin()->second, own.begin()->second) << "one product alone takes the same: this shows nothing";
}

}  // namespace matmul_tile_test
}  // namespace ark::compiler
