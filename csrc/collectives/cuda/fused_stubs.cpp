// Generates the source texts of fused_stubs.hpp: each instantiates one kernel template for a dtype, a shape and a mode.
// Kernels are compiled on first use; the lists at the end let checks compile them without a GPU.
#include "collectives/cuda/fused_stubs.hpp"

#include <algorithm>
#include <bit>

#include "cuda/fused/embedding_rows.cuh"
#include "cuda/fused/moe_rows.cuh"

namespace ark {

namespace {

const char* format_of(DType dtype) {
  return dtype == DType::bf16 ? "BFloat16" : dtype == DType::f16 ? "Float16" : "Float32";
}

std::string fused_entry(const std::string& name, const std::string& params, const std::string& arguments,
                        int threads = device::kBagThreads, int resident = 0) {
  return "extern \"C\" __global__ void __launch_bounds__(" + std::to_string(threads) +
         (resident != 0 ? ", " + std::to_string(resident) : "") + ") " + name +
         "(const __grid_constant__ ark::device::" + params + " p) {\n  ark::device::" + name + "<" + arguments +
         ">(p);\n}\n";
}

// Blocks per multiprocessor. Left to itself, the compiler spills registers to fit more.
constexpr int kMoeResident = 4;

std::string boolean(bool value) {
  return value ? "true" : "false";
}

std::string name_of_stub(const char* kind, DType dtype, bool narrow, bool wide, int lanes, bool weighted) {
  return std::string(kind) + "_" + name_of(dtype) + (narrow ? "_i32" : "_i64") +
         (wide ? "_" + std::to_string(lanes) : "_any") + (weighted ? "_weighted" : "");
}

const char* name_of_mode(device::MatmulMode mode) {
  return mode == device::MatmulMode::all_reduce       ? "all_reduce"
         : mode == device::MatmulMode::reduce_scatter ? "reduce_scatter"
                                                      : "all_gather";
}

const char* name_of_activation(device::MoeActivation activation) {
  switch (activation) {
    case device::MoeActivation::silu: return "silu";
    case device::MoeActivation::gelu: return "gelu";
    case device::MoeActivation::gelu_tanh: return "gelu_tanh";
    case device::MoeActivation::relu: return "relu";
    default: return "none";
  }
}

std::string experts_arguments(DType dtype, device::MatmulShape shape, bool gated, device::MoeActivation activation) {
  return std::string("ark::device::") + format_of(dtype) + ", " + std::to_string(shape.rows) + ", " +
         std::to_string(shape.columns) + ", " + boolean(gated) +
         ", ark::device::MoeActivation::" + name_of_activation(activation);
}

void add_matmul(std::vector<Stub>& stubs, DType dtype, device::MatmulShape shape, bool across,
                device::MatmulMode mode) {
  stubs.push_back({std::string("matmul_") + name_of_mode(mode) + "_" + name_of(dtype) + "_" +
                       std::to_string(shape.rows) + "x" + std::to_string(shape.columns) + (across ? "_across" : ""),
                   matmul_stub(dtype, shape, across, mode), 90});
}

void add_fused(std::vector<Stub>& stubs, DType dtype, bool narrow, bool wide, int lanes) {
  for (const bool weighted : {false, true})
    stubs.push_back({name_of_stub("embedding_bag", dtype, narrow, wide, lanes, weighted),
                     embedding_bag_stub(dtype, narrow, wide, lanes, weighted)});
  for (const bool mean : {false, true})
    stubs.push_back(
        {name_of_stub(mean ? "embedding_gradient_mean" : "embedding_gradient", dtype, narrow, wide, lanes, false),
         embedding_gradient_stub(dtype, narrow, wide, lanes, mean)});
}

std::string name_of_experts(const char* kind, DType dtype, device::MatmulShape shape, bool gated,
                            device::MoeActivation activation) {
  return std::string(kind) + "_" + name_of(dtype) + "_" + std::to_string(shape.rows) + "x" +
         std::to_string(shape.columns) + (gated ? "_gated_" : "_") + name_of_activation(activation);
}

void add_moe_product(std::vector<Stub>& stubs, DType dtype, device::MatmulShape shape, bool gated,
                     device::MoeActivation activation) {
  stubs.push_back({name_of_experts("moe_product", dtype, shape, gated, activation),
                   moe_product_stub(dtype, shape, gated, activation), 90});
}

void add_moe(std::vector<Stub>& stubs, DType dtype, bool wide) {
  const std::string kind = std::string(name_of(dtype)) + (wide ? "" : "_any");
  for (const bool narrow : {false, true})
    stubs.push_back({"moe_dispatch_" + kind + (narrow ? "_i32" : "_i64"), moe_dispatch_stub(dtype, narrow, wide)});
  stubs.push_back({"moe_rows_" + kind, moe_rows_stub(dtype, wide)});
}

}  // namespace

RowShape RowShape::of(uint64_t row_bytes, uint64_t element_bytes) {
  RowShape shape;
  shape.wide = row_bytes % 16 == 0;
  shape.units = static_cast<uint32_t>(row_bytes / (shape.wide ? 16 : element_bytes));
  shape.lanes = shape.wide ? static_cast<int>(std::clamp<uint32_t>(std::bit_ceil(shape.units), 4, 32)) : 32;
  shape.columns = (shape.units + shape.lanes - 1) / shape.lanes;
  return shape;
}

std::string embedding_bag_stub(DType dtype, bool narrow_indices, bool wide, int lanes, bool weighted) {
  return "#include \"cuda/fused/embedding_bag.cuh\"\n" +
         fused_entry("embedding_bag", "BagParams",
                     std::string("ark::device::") + format_of(dtype) + ", " + (narrow_indices ? "int" : "long long") +
                         ", " + boolean(wide) + ", " + std::to_string(lanes) + ", " + boolean(weighted));
}

std::string embedding_gradient_stub(DType dtype, bool narrow_indices, bool wide, int lanes, bool mean) {
  const std::string format = std::string("ark::device::") + format_of(dtype);
  const std::string shape = boolean(wide) + ", " + std::to_string(lanes);
  const std::string index = narrow_indices ? "int" : "long long";
  const std::string rows = format + ", " + index + ", " + shape + ", " + boolean(mean);
  return "#include \"cuda/fused/embedding_rows.cuh\"\n" +
         fused_entry("send_gradient", "GradientParams", format + ", " + shape) +
         fused_entry("name_rows", "RowSumParams", index) + fused_entry("sum_rows", "RowSumParams", rows) +
         fused_entry("sum_crowded_rows", "RowSumParams", rows);
}

std::string matmul_stub(DType dtype, device::MatmulShape shape, bool across, device::MatmulMode mode) {
  return "#include \"cuda/fused/matmul.cuh\"\n" +
         fused_entry("matmul", "MatmulParams",
                     std::string("ark::device::") + format_of(dtype) + ", " + std::to_string(shape.rows) + ", " +
                         std::to_string(shape.columns) + ", " + boolean(across) +
                         ", ark::device::MatmulMode::" + name_of_mode(mode),
                     shape.threads());
}

std::string moe_dispatch_stub(DType dtype, bool narrow_ids, bool wide) {
  return "#include \"cuda/fused/moe_rows.cuh\"\n" +
         fused_entry("moe_dispatch", "MoeParams",
                     std::string("ark::device::") + format_of(dtype) + ", " + (narrow_ids ? "int" : "long long") +
                         ", " + boolean(wide),
                     device::kMoeThreads);
}

std::string moe_rows_stub(DType dtype, bool wide) {
  const std::string arguments = std::string("ark::device::") + format_of(dtype) + ", " + boolean(wide);
  return "#include \"cuda/fused/moe_rows.cuh\"\n" +
         fused_entry("moe_scatter", "MoeParams", arguments, device::kMoeThreads, kMoeResident) +
         fused_entry("moe_gather", "MoeParams", arguments, device::kMoeThreads, kMoeResident) +
         fused_entry("moe_settle", "SettleParams", arguments, device::kMoeThreads, kMoeResident);
}

std::string moe_product_stub(DType dtype, device::MatmulShape shape, bool gated, device::MoeActivation activation) {
  return "#include \"cuda/fused/moe_product.cuh\"\n" + fused_entry("moe_product", "MoeProductParams",
                                                                   experts_arguments(dtype, shape, gated, activation),
                                                                   shape.threads());
}

std::vector<Stub> representative_fused_stubs() {
  std::vector<Stub> stubs;
  add_fused(stubs, DType::bf16, false, true, 16);
  add_fused(stubs, DType::f32, true, true, 32);
  add_fused(stubs, DType::f16, false, false, 32);
  add_moe(stubs, DType::bf16, true);
  add_moe(stubs, DType::f16, false);
  add_moe(stubs, DType::f32, true);
  add_moe_product(stubs, DType::bf16, kMatmulShapes[0], true, device::MoeActivation::silu);
  add_moe_product(stubs, DType::f16, kMatmulShapes[2], true, device::MoeActivation::gelu);
  add_moe_product(stubs, DType::bf16, kMatmulShapes[3], false, device::MoeActivation::none);
  add_matmul(stubs, DType::bf16, kMatmulShapes[0], false, device::MatmulMode::all_reduce);
  add_matmul(stubs, DType::f16, kMatmulShapes[0], true, device::MatmulMode::reduce_scatter);
  add_matmul(stubs, DType::bf16, kMatmulShapes[0], true, device::MatmulMode::all_gather);
  add_matmul(stubs, DType::f16, kMatmulShapes[1], false, device::MatmulMode::all_gather);
  add_matmul(stubs, DType::bf16, kMatmulShapes[3], false, device::MatmulMode::all_reduce);
  return stubs;
}

std::vector<Stub> every_fused_stub() {
  std::vector<Stub> stubs;
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    for (const bool narrow : {false, true}) {
      for (const int lanes : {4, 8, 16, 32}) add_fused(stubs, dtype, narrow, true, lanes);
      add_fused(stubs, dtype, narrow, false, 32);
    }
    for (const bool wide : {false, true}) add_moe(stubs, dtype, wide);
  }
  for (const DType dtype : {DType::bf16, DType::f16})
    for (const device::MatmulShape& shape : kMatmulShapes) {
      for (const bool across : {false, true})
        for (const auto mode :
             {device::MatmulMode::all_reduce, device::MatmulMode::reduce_scatter, device::MatmulMode::all_gather})
          add_matmul(stubs, dtype, shape, across, mode);
      add_moe_product(stubs, dtype, shape, false, device::MoeActivation::none);
      for (const bool gated : {false, true})
        for (const auto activation : {device::MoeActivation::silu, device::MoeActivation::gelu,
                                      device::MoeActivation::gelu_tanh, device::MoeActivation::relu})
          add_moe_product(stubs, dtype, shape, gated, activation);
    }
  return stubs;
}

}  // namespace ark
