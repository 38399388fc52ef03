// Several products that share their rows, as one call of cuda/loop/products.cuh. Strides, encodings and cache policies
// are constants of the call.
#include <span>
#include <string>

#include "compiler/emit/cpu/emit_cpu_loops.hpp"

namespace ark::compiler {

namespace {

// Completes a call with the shares of products with quantized weights.
void call_with_shares(FunctionWriter& to, std::string call, std::span<const MatmulStage> products) {
  for (size_t i = 0; i < products.size(); ++i)
    append(call, "{}{}", i == 0 ? "" : ",\n           ", dequant_share(to, products[i], i));
  to.line(call + ");");
}

}  // namespace

void start_products(FunctionWriter& to, const Stage& stage) {
  const std::span<const MatmulStage> products = matmuls_of(stage);
  if (!to.cuda() || products.empty() || products[0].codes.bits == 0 || products[0].tile_columns > 0) return;
  to.open("");
  to.turn_to(stage);
  call_with_shares(
      to, formatted("dequant_start<{}, {}>(", products[0].m, cpp_type(to.value(products[0].a).type)), products);
  to.close();
  to.have_started();
}

void emit(FunctionWriter& to, const ProductsStage& stage) {
  if (!to.cuda()) to.refuse("products that share their rows");
  const MatmulStage& first = stage.products.at(0);
  if (first.codes.bits != 0) {
    const bool tiles = first.tile_columns > 0;
    const std::string sizes =
        tiles ? formatted("{}, {}, {}", first.m, first.tile_rows, first.tile_columns) : formatted("{}", first.m);
    if (tiles) to.multiply_by_groups();
    return call_with_shares(to,
                            formatted("dequant_{}<{}{}>({},\n           ", tiles ? "tiles" : "products", sizes,
                                      to.started() ? ", true" : "", to.pointer_later(first.a, false)),
                            stage.products);
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
