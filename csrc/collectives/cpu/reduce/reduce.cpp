// Selects reduction kernels by type, operation and instruction set.
//
// The instruction set is detected once. force_reduce_isa lets tests compare the sets bit for bit. The choice is one
// pointer to constant data, so a relaxed atomic suffices.
#include "reduce.hpp"

#include <atomic>
#include <cstring>
#include <string>

#include "reduce_isa.hpp"
#include "util/error.hpp"

namespace ark {

namespace {

struct Isa {
  const char* name;
  ReduceFn (*find)(DType, ReduceOp);
  ConvertFn (*converter)(DType, bool widen);
};

constexpr Isa kBaseline{"baseline", find_reduce_baseline, find_converter_baseline};
#if defined(__x86_64__)
constexpr Isa kAvx2{"avx2", find_reduce_avx2, find_converter_avx2};
constexpr Isa kAvx512{"avx512", find_reduce_avx512, find_converter_avx512};

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

// Returns null if this machine lacks the set or the name is unknown.
const Isa* available(const char* name) {
#if defined(__x86_64__)
  if (std::strcmp(name, kAvx512.name) == 0) return has_avx512() ? &kAvx512 : nullptr;
  if (std::strcmp(name, kAvx2.name) == 0) return has_avx2() ? &kAvx2 : nullptr;
#endif
  return std::strcmp(name, kBaseline.name) == 0 ? &kBaseline : nullptr;
}

const Isa* best() {
  for (const char* name : {"avx512", "avx2"}) {
    if (const Isa* isa = available(name)) return isa;
  }
  return &kBaseline;
}

std::atomic<const Isa*>& chosen() {
  static std::atomic<const Isa*> isa{best()};
  return isa;
}

bool is_complex(DType dtype) {
  return dtype == DType::c32 || dtype == DType::c64 || dtype == DType::c128;
}
bool is_integer(DType dtype) {
  return dtype <= DType::i64;
}  // includes bool

}  // namespace

ReduceFn find_reduce(DType dtype, ReduceOp op) {
  if (why_unsupported(dtype, op)) return nullptr;
  return chosen().load(std::memory_order_relaxed)->find(dtype, op);
}

ConvertFn find_widen(DType dtype) {
  return chosen().load(std::memory_order_relaxed)->converter(dtype, true);
}

ConvertFn find_narrow(DType dtype) {
  return chosen().load(std::memory_order_relaxed)->converter(dtype, false);
}

const char* why_unsupported(DType dtype, ReduceOp op) {
  if (static_cast<int>(dtype) >= kDTypes) return "the dtype is unknown to this version";
  if (static_cast<int>(op) >= kReduceOps) return "the operation is unknown to this version";
  if (dtype == DType::raw8) return "opaque bytes (quantised and packed types) can be moved but not reduced";
  const bool bitwise = op == ReduceOp::band || op == ReduceOp::bor || op == ReduceOp::bxor;
  if (bitwise && !is_integer(dtype)) return "BAND, BOR and BXOR work on the bits of integers and bool only";
  if (op == ReduceOp::avg && is_integer(dtype)) {
    return "AVG divides, and integers and bool cannot hold the quotient: use SUM and divide";
  }
  if (op == ReduceOp::premul_sum && is_integer(dtype)) {
    return "PREMUL_SUM multiplies by a real factor, and integers and bool cannot hold the product: convert to a "
           "floating-point dtype first";
  }
  if ((op == ReduceOp::min || op == ReduceOp::max) && is_complex(dtype)) {
    return "MIN and MAX order numbers and complex numbers have no order: reduce the real and imaginary parts "
           "(torch.view_as_real)";
  }
  const bool adds = op == ReduceOp::sum || op == ReduceOp::avg || op == ReduceOp::premul_sum;
  if (adds && dtype == DType::f8_e8m0fnu) {
    return "float8_e8m0fnu holds powers of two and no zero, so sums of it have no meaning (PyTorch does not add it "
           "either): convert to float32 first, or use PRODUCT, MIN or MAX";
  }
  return nullptr;
}

const char* reduce_isa() {
  return chosen().load(std::memory_order_relaxed)->name;
}

void force_reduce_isa(const char* isa) {
  const Isa* found = isa ? available(isa) : best();
  if (!found) {
    ErrorContext context;
    context.remedy = "Name one of baseline, avx2 and avx512 that the CPU has, or null for the best.";
    throw Error(ErrorKind::invalid_argument,
                std::string("the reductions cannot use instruction set '") + isa + "': not on this machine", context);
  }
  chosen().store(found, std::memory_order_relaxed);
}

}  // namespace ark
