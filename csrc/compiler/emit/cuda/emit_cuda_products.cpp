// Several products that share their rows, as one call of cuda/loop/products.cuh. Strides, encodings and cache policies
// are constants of the call.
#include <span>
#include <string>

#include "compiler/emit/cpu/emit_cpu_loops.hpp"

namespace ark::compiler {

void emit(FunctionWriter& to, const ProductsStage& stage) {
  if (!to.cuda()) to.refuse("products that share their rows");
  const MatmulStage& first = stage.products.at(0);
  if (first.codes.bits != 0) {
    const bool tiles = first.tile_columns > 0;
    const std::string sizes = tiles ? formatted("{}, {}, {}", first.m, first.tile_rows, first.tile_columns)
                                    : formatted("{}{}", first.m, to.scales_staged() ? ", true" : "");
    std::string call =
        formatted("dequant_{}<{}>({}", tiles ? "tiles" : "products", sizes, to.pointer_later(first.a, false));
    for (size_t i = 0; i < stage.products.size(); ++i)
      append(call, ",\n           {}", dequant_share(to, stage.products[i], i));
    if (tiles) to.multiply_by_groups();
    return to.line(call + ");");
  }
  std::string call = formatted("products<{}>({}", first.m, to.pointer_later(first.a, false));
  for (size_t i = 0; i < stage.products.size(); ++i) {
    const MatmulStage& product = stage.products[i];
    for (const int one : {product.a, product.b, product.out})
      if (!is_floating(to.value(one).type)) to.refuse("it multiplies matrices of {}", name_of(to.value(one).type));
    to.line("constexpr Product s{}{};", i, product_shape(to, product));
    const std::string bias =
        product.bias >= 0 ? to.pointer_later(product.bias, false) : "static_cast<const NoBias*>(nullptr)";
    const std::string out = to.pointer_later(product.out, true), b = to.pointer_later(product.b, false);
    append(call, ",\n           share<s{}>({}, {}, {}, {}, {})", i, b, out, bias, to.tile_begin(product.n),
           to.tile_end(product.n));
  }
  to.line(call + ");");
}

bool may_stage_scales(const FunctionWriter& to, std::span<const MatmulStage> products) {
  if (products.empty() || products[0].tile_columns > 0) return false;
  const auto& codes = products[0].codes;
  const auto by_column = [&](int value) {
    if (value < 0) return true;
    const Buffer& buffer = to.graph().buffer_of(value);
    return stride_from_end(to.value(value), 2) == 1 && buffer.kind == Buffer::Kind::input && !buffer.mutated;
  };
  return codes.bits != 0 && (codes.zero >= 0 || (codes.scale >= 0 && codes.group < products[0].k)) &&
         by_column(codes.scale) && by_column(codes.zero);
}

void stage_scales(FunctionWriter& to, std::span<const MatmulStage> products) {
  std::string call = formatted("stage_scales<{}>({}", products[0].m, to.pointer_later(products[0].a, false));
  for (size_t i = 0; i < products.size(); ++i) append(call, ",\n           {}", dequant_share(to, products[i], i));
  to.line(call + ");");
  to.have_scales_staged();
}

}  // namespace ark::compiler
