// Tests which functions a CUDA source has twice, for operands that are aligned to 16 bytes and for others, which
// operands decide, and which pointers must be aligned.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "compiler/emit/cuda/emit_cuda.hpp"
#include "compiler/emit/cuda_tables.hpp"
#include "compiler/graph/graph_builder.hpp"
#include "compiler/passes/pipeline.hpp"
#include "compiler/schedule/targets.hpp"

namespace ark::compiler {
namespace {

CudaSource source_of(const GraphBuilder& make, const char* target = "sm_90a") {
  return emit_cuda(make_plan(make.graph, gpu_target(target, 6)));
}

int64_t count(const std::string& text, const std::string& what) {
  int64_t times = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++times;
  return times;
}

// The arguments whose address decides between a function's variants.
int64_t aligned(const std::string& text) {
  return std::ranges::count_if(table_in<loop::Operand>(text, "kOperands"), [](const loop::Operand& one) {
    return one.aligned != 0 && one.base == loop::Operand::pointer;
  });
}

// rows x depth times weights [columns, depth], which are a slice of rows that are `spare` elements longer, from element
// `first` on.
CudaSource product(int64_t rows, int64_t depth, int64_t spare, ScalarType type, const char* target = "sm_90a",
                   int64_t first = 0) {
  GraphBuilder make;
  const int weights = make.parameter({40, depth + spare}, type);
  const int used = make.view(weights, {40, depth}, {depth + spare, 1}, first);
  make.copy_out(make.matmul(make.input({rows, depth}, type), make.transpose(used), -1, type));
  return source_of(make, target);
}

TEST(Alignment, PointersAreExpectedToBeAligned) {
  for (const char* target : {"sm_90a", "sm_80"})
    for (const int64_t rows : {1, 12, 100}) {
      const auto [text, scratch, pointers, shared, needed] = product(rows, 64, 0, ScalarType::bf16, target);
      const int64_t functions = rows == 100 ? 2 : 1;  // many rows use two stages
      EXPECT_EQ(count(text, "constexpr bool kAligned = true;"), functions) << rows;
      EXPECT_EQ(count(text, "kFunctions + ") + count(text, "_misaligned") + count(text, "template <bool"), 0) << rows;
      EXPECT_EQ(aligned(text), 0) << rows;
      EXPECT_EQ(needed, (std::vector<size_t>{0, 1})) << rows;  // both inputs, not the result
    }
}

TEST(Alignment, WhatStartsElsewhereHasAVariant) {
  for (const char* target : {"sm_90a", "sm_80"})
    for (const int64_t rows : {1, 12, 100}) {
      const auto [text, scratch, pointers, shared, needed] = product(rows, 64, 8, ScalarType::bf16, target, 4);
      const int64_t functions = rows == 100 ? 2 : 1;
      EXPECT_EQ(needed, std::vector<size_t>{}) << rows;
      EXPECT_EQ(count(text, "constexpr bool kAligned"), 0) << rows;
      EXPECT_EQ(count(text, "template <bool kAligned>"), functions) << rows;
      EXPECT_EQ(count(text, ".a_aligned = kAligned, .b_aligned = kAligned"), functions) << rows;
      EXPECT_EQ(count(text, "case kFunctions + "), functions) << rows;
      EXPECT_EQ(count(text, "_misaligned(context, p); break;"), functions) << rows;
      EXPECT_EQ(aligned(text), 2 * functions) << rows;  // both inputs, not the result
    }
}

TEST(Alignment, StridesAreKnownBefore) {
  for (const ScalarType type : {ScalarType::f32, ScalarType::bf16}) {
    const auto [text, scratch, pointers, shared, needed] =
        product(2, 63, 0, type);  // neither a's rows nor b's are aligned
    EXPECT_EQ(count(text, ".a_aligned = false, .b_aligned = false"), 1);
    EXPECT_EQ(count(text, "kAligned"), 0);
    EXPECT_EQ(count(text, "case kFunctions + "), 0);
    EXPECT_EQ(needed, std::vector<size_t>{});
  }
  const CudaSource source = product(2, 64, 5, ScalarType::bf16);
  EXPECT_EQ(count(source.text, ".a_aligned = kAligned, .b_aligned = false"), 1);
  EXPECT_EQ(source.aligned.size(), 1U);
}

TEST(Alignment, GroupsOfWarpsMultiplyWhatIsAligned) {
  const auto large = [](int64_t depth) {
    GraphBuilder make;
    const int a = make.input({384, depth}, ScalarType::bf16), b = make.parameter({512, depth}, ScalarType::bf16);
    make.copy_out(make.matmul(a, make.transpose(b), -1, ScalarType::bf16));
    return source_of(make).text;
  };
  EXPECT_EQ(count(large(1024), "ARK_LOOP void matmul"), 1);
  EXPECT_EQ(count(large(1023), "ARK_LOOP void matmul"), 0);
}

}  // namespace
}  // namespace ark::compiler
