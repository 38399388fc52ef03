// The backward pass: gathers gradients of bags at the tables' ranks, then sums rows and returns or applies them. See
// embedding_gradient_cpu.cpp and embedding_gradient_cuda.cpp.
#include <ATen/core/LegacyTypeDispatch.h>

#include "ops/embedding_bag.hpp"

namespace ark::ops {

std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>> backward(const BagArguments& given,
                                                                     const at::Tensor& gradient, bool of_weights) {
  constexpr const char* kName = "embedding_bag_all_to_all_backward";
  return with_torch_errors([&]() -> std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>> {
    const at::AutoDispatchBelowADInplaceOrView below;
    ProcessGroupArk& group = backend_of(given.group, kName);
    const Layout layout = layout_of(given, group, kName);
    const BagArguments bags = prepared(given);
    const int64_t sizes[] = {layout.batch, layout.all(), layout.dim};
    if (gradient.sizes() != at::IntArrayRef(sizes) || gradient.scalar_type() != layout.dtype)
      refuse({group.getRank(), kName}, ErrorKind::invalid_argument,
             "the gradient has not the shape and dtype of the result", "Pass what autograd passes.");
    const bool cuda = layout.device != c10::kCPU;
    at::Tensor of_bags;
    if (gradient.numel() == 0) {
      of_bags =
          at::zeros({layout.tables[group.getRank()], group.getSize() * layout.batch, layout.dim}, gradient.options());
    } else {
      of_bags = cuda ? gather_gradient_cuda(bags, layout, group, gradient.contiguous())
                     : gather_gradient_cpu(bags, layout, group, gradient.contiguous());
    }
    std::vector<at::Tensor> weights;
    if (of_weights) weights = weight_gradients(bags, of_bags);  // before rows are updated in place
    std::vector<at::Tensor> tables = cuda ? table_gradients_cuda(bags, of_bags) : table_gradients_cpu(bags, of_bags);
    return {std::move(tables), std::move(weights)};
  });
}

at::Tensor sparse_gradient(const at::Tensor& rows, const at::Tensor& values, const at::Tensor& table) {
  return at::_sparse_coo_tensor_unsafe(rows.unsqueeze(0), values, table.sizes(), values.options().layout(at::kSparse))
      ._coalesced_(true);
}

at::Tensor bag_numbers(const at::Tensor& offsets, int64_t entries, int64_t bags) {
  const at::Tensor begins = offsets.narrow(0, 0, offsets.numel()).contiguous();
  const at::Tensor places = at::arange(entries, offsets.options());
  return at::searchsorted(begins, places, false, true).sub_(1).clamp_max_(bags);
}

}  // namespace ark::ops
