// Products with quantized weights, as calls of the device libraries: kernels/cpu/dequant.hpp, or
// kernels/cuda/loop/dequant.cuh through emit_products(), which takes one product or several.
#include <algorithm>
#include <string>

#include "compiler/emit/cpu/emit_cpu_loops.hpp"

namespace ark::compiler {

namespace {

// "{.bits = 4, ...}": an initializer of Codes in kernels/protocol/codes.hpp.
std::string codes_text(FunctionWriter& to, const MatmulStage& matmul) {
  const Codes& codes = matmul.codes;
  const auto strides = [&](int value) {
    const int64_t group = value < 0 ? 0 : stride_from_end(to.value(value), 2);
    const int64_t column = value < 0 ? 0 : stride_from_end(to.value(value), 1);
    return formatted("{{{}, {}}}", group, column);
  };
  return formatted(
      "{{.bits = {}, .is_signed = {}, .high_first = {}, .zero_after = {}, .offset = {}, .group = {},\n"
      "                    .scale = {}, .zero = {}, .block = {}}}",
      codes.bits, codes.is_signed, codes.high_first, codes.zero_after, codes.offset, codes.group, strides(codes.scale),
      strides(codes.zero), codes.block);
}

}  // namespace

void emit_dequant_matmul(FunctionWriter& to, const MatmulStage& matmul) {
  using Axis = MatmulStage::Axis;
  std::string r0 = "0", r1 = formatted("{}", matmul.m), c0 = "0", c1 = formatted("{}", matmul.n);
  if (matmul.axis == Axis::rows) r0 = to.tile_begin(matmul.m), r1 = to.tile_end(matmul.m);
  if (matmul.axis == Axis::columns) c0 = to.tile_begin(matmul.n), c1 = to.tile_end(matmul.n);
  const auto given = [&](int value, const char* otherwise) {
    return value >= 0 ? to.pointer(value, false) : formatted("static_cast<const {}*>(nullptr)", otherwise);
  };
  if (to.cuda() && matmul.codes.block != 0) to.refuse("its columns lie in blocks");
  if (to.cuda()) return emit_products(to, {{matmul}});
  to.line("constexpr Product s{};", product_shape(to, matmul));
  to.line("constexpr Codes q{};", codes_text(to, matmul));
  const std::string bias = given(matmul.bias, "NoBias"), out = to.pointer(matmul.out, true),
                    zero = given(matmul.codes.zero, "NoScale"), scale = given(matmul.codes.scale, "NoScale"),
                    b = to.pointer(matmul.b, false), a = to.pointer(matmul.a, false);
  // At most kRowBlock packed rows of dequant.hpp: 48, in pairs of 16-lane vectors.
  const int64_t scratch = to.scratch(std::min<int64_t>(matmul.m, 48) * ((matmul.k + 31) / 32 * 32) * 4);
  to.line("dequant_product<{}, s, q>({}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {});", matmul.m, a, b, scale, zero, out,
          bias, r0, r1, c0, c1, to.scratch_at(scratch));
}

std::string dequant_share(FunctionWriter& to, const MatmulStage& matmul, size_t number) {
  const auto given = [&](int value, const char* otherwise) {
    return value >= 0 ? to.pointer_later(value, false) : formatted("static_cast<const {}*>(nullptr)", otherwise);
  };
  to.line("constexpr Product s{}{};", number, product_shape(to, matmul));
  to.line("constexpr Codes q{}{};", number, codes_text(to, matmul));
  const std::string bias = given(matmul.bias, "NoBias"), out = to.pointer_later(matmul.out, true),
                    zero = given(matmul.codes.zero, "NoScale"), scale = given(matmul.codes.scale, "NoScale"),
                    b = to.pointer_later(matmul.b, false);
  return formatted("coded_share<s{0}, q{0}>({1}, {2}, {3}, {4}, {5}, {6}, {7})", number, b, scale, zero, out, bias,
                   to.tile_begin(matmul.n), to.tile_end(matmul.n));
}

}  // namespace ark::compiler
