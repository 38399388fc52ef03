// Several products that share their rows, as one call of cuda/loop/products.cuh. Strides, encodings and cache policies
// are constants of the call.
#include <string>

#include "compiler/emit/cpu/emit_cpu_loops.hpp"

namespace ark::compiler {

void emit(FunctionWriter& to, const ProductsStage& stage) {
  if (!to.cuda()) to.refuse("products that share their rows");
  const MatmulStage& first = stage.products.at(0);
  if (first.codes.bits != 0) {
    const bool tiles = first.tile_columns > 0;
    const std::string sizes =
        tiles ? formatted("{}, {}, {}", first.m, first.tile_rows, first.tile_columns) : formatted("{}", first.m);
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

}  // namespace ark::compiler
