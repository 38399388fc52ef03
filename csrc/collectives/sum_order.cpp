// Which operations the settings of sum_order.hpp concern.
#include "collectives/sum_order.hpp"

namespace ark {

std::string text_of(const SumOrder& sums) {
  return sums.flat ? ", order flat" : sums.input_partials ? ", partials input" : "";
}

bool depends_on_order(const Descriptor& descriptor) {
  const bool reduces =
      descriptor.kind == Kind::all_reduce || descriptor.kind == Kind::reduce || descriptor.kind == Kind::reduce_scatter;
  const bool adds = descriptor.op == ReduceOp::sum || descriptor.op == ReduceOp::avg ||
                    descriptor.op == ReduceOp::product || descriptor.op == ReduceOp::premul_sum;
  return reduces && adds && descriptor.dtype >= DType::f16 && descriptor.dtype <= DType::c128;
}

bool has_wide_partials(const Descriptor& descriptor) {
  if (!depends_on_order(descriptor)) return false;
  switch (descriptor.dtype) {
    case DType::f32:
    case DType::f64:
    case DType::c64:
    case DType::c128: return false;
    default: return true;
  }
}

}  // namespace ark
