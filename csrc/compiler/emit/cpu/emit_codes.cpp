// Products with quantized weights, as calls of the device libraries: kernels/cpu/dequant.hpp, or
// kernels/cuda/loop/dequant.cuh through emit_products(), which takes one product or several.
#include <algorithm>
#include <string>

#include "compiler/emit/cpu/emit_cpu_loops.hpp"

namespace ark::compiler {

namespace {

std::string flag(bool value) {
  return value ? "true" : "false";
}

// "{.bits = 4, ...}": an initializer of Codes in kernels/protocol/codes.hpp.
std::string codes_text(FunctionWriter& to, const MatmulStage& matmul) {
  const Codes& codes = matmul.codes;
  const auto strides = [&](int value) {
    const int64_t group = value < 0 ? 0 : stride_from_end(to.value(value), 2);
    const int64_t column = value < 0 ? 0 : stride_from_end(to.value(value), 1);
    return "{" + number(group) + ", " + number(column) + "}";
  };
  return "{.bits = " + number(codes.bits) + ", .is_signed = " + flag(codes.is_signed) +
         ", .high_first = " + flag(codes.high_first) + ", .zero_after = " + flag(codes.zero_after) +
         ", .offset = " + number(codes.offset) + ", .group = " + number(codes.group) +
         ",\n                    .scale = " + strides(codes.scale) + ", .zero = " + strides(codes.zero) +
         ", .block = " + number(codes.block) + "}";
}

}  // namespace

void emit_dequant_matmul(FunctionWriter& to, const MatmulStage& matmul) {
  using Axis = MatmulStage::Axis;
  std::string r0 = "0", r1 = number(matmul.m), c0 = "0", c1 = number(matmul.n);
  if (matmul.axis == Axis::rows) r0 = to.tile_begin(matmul.m), r1 = to.tile_end(matmul.m);
  if (matmul.axis == Axis::columns) c0 = to.tile_begin(matmul.n), c1 = to.tile_end(matmul.n);
  const auto given = [&](int value, const char* otherwise) {
    return value >= 0 ? to.pointer(value, false) : "static_cast<const " + std::string(otherwise) + "*>(nullptr)";
  };
  if (to.cuda() && matmul.codes.block != 0) to.refuse("its columns lie in blocks");
  if (to.cuda()) return emit_products(to, {{matmul}});
  to.line("constexpr Product s" + product_shape(to, matmul) + ";");
  to.line("constexpr Codes q" + codes_text(to, matmul) + ";");
  std::string call = "dequant_product<" + number(matmul.m) + ", s, q>(" + to.pointer(matmul.a, false) + ", " +
                     to.pointer(matmul.b, false) + ", " + given(matmul.codes.scale, "NoScale") + ", " +
                     given(matmul.codes.zero, "NoScale") + ", " + to.pointer(matmul.out, true) + ", " +
                     given(matmul.bias, "NoBias") + ", " + r0 + ", " + r1 + ", " + c0 + ", " + c1;
  // At most kRowBlock packed rows of dequant.hpp: 48, in pairs of 16-lane vectors.
  const int64_t scratch = to.scratch(std::min<int64_t>(matmul.m, 48) * ((matmul.k + 31) / 32 * 32) * 4);
  to.line(call + ", " + to.scratch_at(scratch) + ");");
}

std::string dequant_share(FunctionWriter& to, const MatmulStage& matmul, const std::string& number) {
  const auto given = [&](int value, const char* otherwise) {
    return value >= 0 ? to.pointer_later(value, false) : "static_cast<const " + std::string(otherwise) + "*>(nullptr)";
  };
  to.line("constexpr Product s" + number + product_shape(to, matmul) + ";");
  to.line("constexpr Codes q" + number + codes_text(to, matmul) + ";");
  return "coded_share<s" + number + ", q" + number + ">(" + to.pointer_later(matmul.b, false) + ", " +
         given(matmul.codes.scale, "NoScale") + ", " + given(matmul.codes.zero, "NoScale") + ", " +
         to.pointer_later(matmul.out, true) + ", " + given(matmul.bias, "NoBias") + ", " + to.tile_begin(matmul.n) +
         ", " + to.tile_end(matmul.n) + ")";
}

}  // namespace ark::compiler
