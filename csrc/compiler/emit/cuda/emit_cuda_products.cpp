// Several products that share their rows, as one call of cuda/loop/products.cuh. Strides, encodings and cache policies
// are constants of the call.
#include <string>

#include "compiler/emit/cpu/emit_cpu_loops.hpp"

namespace ark::compiler {

void emit_products(FunctionWriter& to, const ProductsStage& stage) {
  if (!to.cuda()) to.refuse("products that share their rows");
  const MatmulStage& first = stage.products.at(0);
  if (first.codes.bits != 0) {
    std::string call = "dequant_products<" + number(first.m) + ">(" + to.pointer_later(first.a, false);
    for (size_t i = 0; i < stage.products.size(); ++i)
      call += ",\n           " + dequant_share(to, stage.products[i], number(static_cast<int64_t>(i)));
    return to.line(call + ");");
  }
  std::string call = "products<" + number(first.m) + ">(" + to.pointer_later(first.a, false);
  for (size_t i = 0; i < stage.products.size(); ++i) {
    const MatmulStage& product = stage.products[i];
    for (const int one : {product.a, product.b, product.out})
      if (!is_floating(to.value(one).type))
        to.refuse("it multiplies matrices of " + std::string(name_of(to.value(one).type)));
    const std::string shape = "s" + number(static_cast<int64_t>(i));
    to.line("constexpr Product " + shape + product_shape(to, product) + ";");
    const std::string bias =
        product.bias >= 0 ? to.pointer_later(product.bias, false) : "static_cast<const NoBias*>(nullptr)";
    call += ",\n           share<" + shape + ">(" + to.pointer_later(product.b, false) + ", " +
            to.pointer_later(product.out, true) + ", " + bias + ", " + to.tile_begin(product.n) + ", " +
            to.tile_end(product.n) + ")";
  }
  to.line(call + ");");
}

}  // namespace ark::compiler
