// The feed-forward networks of a rank's experts, over rows sorted by expert.
//
// The products use ark's kernel (forward, half types on Hopper; moe_product), PyTorch's grouped product (bfloat16 on
// Hopper and later), or PyTorch's product expert by expert. The last reads the counts on the host, so it cannot be
// captured on a GPU. Results of each step are rounded to the dtype, as by PyTorch's separate operators; the order in
// which a product is added in float32 is that of the way, which shapes and rooms alone decide.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_grouped_mm.h>
#include <c10/core/DeviceGuard.h>

#include <limits>

#include "ops/moe.hpp"
#include "process_group/cuda/cuda_group.hpp"

namespace ark::ops {

namespace {

const CallSite kSite{-1, "moe_experts"};

// Room for rows per expert from which the second product, which nothing follows, is PyTorch's grouped product.
constexpr int64_t kLibraryRoom = std::numeric_limits<int64_t>::max();

enum class Ways { kernel, mixed, library };  // of the first and the second product

bool is_gated(const at::Tensor& w1, const at::Tensor& w2) {
  return w1.size(1) != w2.size(2);
}

// Whether PyTorch's grouped product runs without the host.
bool grouped_on_device(const at::Tensor& x, const at::Tensor& w1, const at::Tensor& w2) {
  const bool wide = x.size(1) % 8 == 0 && w1.size(1) % 8 == 0 && w2.size(2) % 8 == 0;
  return x.is_cuda() && x.scalar_type() == at::kBFloat16 && wide &&
         device_attribute(x.device().index(), CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) >= 9;
}

// Whether PyTorch's grouped product reads these matrices where they are.
bool is_wide(const at::Tensor& w) {
  return w.is_contiguous() && reinterpret_cast<uintptr_t>(w.const_data_ptr()) % 16 == 0;
}

// Computes the products of all experts in one of several ways.
class Grouped {
 public:
  Grouped(const at::Tensor& rows, const at::Tensor& counts, const at::Tensor& w1, const at::Tensor& w2)
      : experts_(counts.size(0)) {
    if (grouped_on_device(rows, w1, w2)) {
      ends_ = counts.cumsum(0, at::kInt);
      return;
    }
    if (rows.is_cuda() && is_capturing(rows.device())) {
      owners_ =
          at::searchsorted(counts.cumsum(0), at::arange(rows.size(0), counts.options()), false, true).unsqueeze(1);
      return;
    }
    const at::Tensor here = counts.to(at::kCPU, at::kLong);
    int64_t at = 0;
    for (int64_t e = 0; e < here.numel(); ++e) {
      counts_.push_back(here.const_data_ptr<int64_t>()[e]);
      at += counts_.back();
    }
    if (at > rows.size(0))
      refuse(kSite, ErrorKind::invalid_argument,
             "the counts name " + std::to_string(at) + " rows, and there are " + std::to_string(rows.size(0)),
             "Pass what moe_dispatch returned.");
  }

  // [rows, d] times w [experts, d, n]: [rows, n].
  at::Tensor product(const at::Tensor& rows, const at::Tensor& w) const {
    if (ends_.defined()) return at::_grouped_mm(rows.contiguous(), w, ends_);
    at::Tensor out = at::zeros({rows.size(0), w.size(2)}, rows.options());
    if (owners_.defined()) {
      for (int64_t e = 0; e < w.size(0); ++e) out = at::where(owners_.eq(e), at::mm(rows, w.select(0, e)), out);
      return out;
    }
    each([&](int64_t e, int64_t first, int64_t count) {
      at::Tensor to = out.narrow(0, first, count);
      at::mm_out(to, rows.narrow(0, first, count), w.select(0, e));
    });
    return out;
  }

  // a [rows, n] transposed times b [rows, d], expert by expert: [experts, n, d].
  at::Tensor across(const at::Tensor& a, const at::Tensor& b) const {
    if (ends_.defined()) return at::_grouped_mm(a.contiguous().t(), b.contiguous(), ends_);
    if (owners_.defined()) {
      std::vector<at::Tensor> of;
      for (int64_t e = 0; e < experts_; ++e) of.push_back(at::mm(at::where(owners_.eq(e), a, 0).t(), b));
      return at::stack(of);
    }
    at::Tensor out = at::zeros({experts_, a.size(1), b.size(1)}, a.options());
    each([&](int64_t e, int64_t first, int64_t count) {
      at::Tensor to = out.select(0, e);
      at::mm_out(to, a.narrow(0, first, count).t(), b.narrow(0, first, count));
    });
    return out;
  }

 private:
  template <class Body>
  void each(Body&& body) const {
    int64_t first = 0;
    for (size_t e = 0; e < counts_.size(); ++e) {
      if (counts_[e] != 0) body(static_cast<int64_t>(e), first, counts_[e]);
      first += counts_[e];
    }
  }

  const int64_t experts_;
  at::Tensor ends_;              // on the device; or
  at::Tensor owners_;            // expert of each row, on the device; or
  std::vector<int64_t> counts_;  // on the host
};

at::Tensor activated(const at::Tensor& x, const std::string& activation) {
  if (activation == "silu") return at::silu(x);
  if (activation == "relu") return at::relu(x);
  return at::gelu(x, activation == "gelu" ? "none" : "tanh");
}

at::Tensor activated_backward(const at::Tensor& gradient, const at::Tensor& x, const std::string& activation) {
  if (activation == "silu") return at::silu_backward(gradient, x);
  if (activation == "relu") return at::threshold_backward(gradient, x, 0);
  return at::gelu_backward(gradient, x, activation == "gelu" ? "none" : "tanh");
}

// `products`: "auto", or the way to take.
Ways ways_of(const at::Tensor& rows, const at::Tensor& w1, const at::Tensor& w2, const std::string& products) {
  const bool takes = moe_product_takes(rows, w1, w2), mixes = takes && grouped_on_device(rows, w1, w2) && is_wide(w2);
  if (products == "auto")
    return !takes ? Ways::library : mixes && rows.size(0) / w1.size(0) >= kLibraryRoom ? Ways::mixed : Ways::kernel;
  if (products == "library") return Ways::library;
  if (products == "kernel" && takes) return Ways::kernel;
  if (products == "mixed" && mixes) return Ways::mixed;
  refuse(kSite, ErrorKind::invalid_argument,
         "products is '" + products + "' for " + dtype_name(rows.scalar_type()) + " on " + rows.device().str(),
         "Pass 'auto' or 'library'; 'kernel' and 'mixed' are for float16 and bfloat16 on Hopper GPUs.");
}

void check_counted(const at::Tensor& rows, const at::Tensor& counts, const at::Tensor& w1, const at::Tensor& w2,
                   const std::string& activation) {
  if (rows.dim() != 2 || counts.dim() != 1)
    refuse(kSite, ErrorKind::invalid_argument, "rows is " + shape_of(rows) + ", counts " + shape_of(counts),
           "Pass what moe_dispatch returned.");
  check_experts(kSite, w1, w2, rows, counts.size(0), activation);
}

}  // namespace

bool moe_experts_need_no_host(const at::Tensor& x, const at::Tensor& w1, const at::Tensor& w2) {
  return moe_product_takes(x, w1, w2) || grouped_on_device(x, w1, w2);
}

void check_experts(const CallSite& site, const at::Tensor& w1, const at::Tensor& w2, const at::Tensor& x, int64_t local,
                   const std::string& activation) {
  if (activation != "silu" && activation != "gelu" && activation != "gelu_tanh" && activation != "relu")
    refuse(site, ErrorKind::invalid_argument, "activation is '" + activation + "'",
           "Pass 'silu', 'gelu', 'gelu_tanh' or 'relu'.");
  check_tensor(site, "w1", w1);
  check_tensor(site, "w2", w2);
  for (const at::Tensor* const weight : {&w1, &w2}) {
    const char* const name = weight == &w1 ? "w1" : "w2";
    check_same_dtype(site, name, *weight, "x", x);
    if (weight->device() != x.device())
      refuse(site, ErrorKind::invalid_argument,
             std::string(name) + " is on " + weight->device().str() + " but x is on " + x.device().str(),
             "Move it there.");
  }
  const bool fits = w1.dim() == 3 && w2.dim() == 3 && w1.size(0) == local && w2.size(0) == local &&
                    w1.size(2) == x.size(1) && w2.size(1) == x.size(1) &&
                    (w1.size(1) == w2.size(2) || w1.size(1) == 2 * w2.size(2));
  if (!fits)
    refuse(site, ErrorKind::invalid_argument,
           "w1 is " + shape_of(w1) + " and w2 is " + shape_of(w2) + ", for rows of " + std::to_string(x.size(1)) +
               " columns and " + std::to_string(local) + " experts of this rank",
           "Pass w1 as [experts, ffn, dim], or [experts, 2 * ffn, dim] with the gate first, and w2 as "
           "[experts, dim, ffn].");
}

at::Tensor moe_experts(const at::Tensor& rows, const at::Tensor& counts, const at::Tensor& w1, const at::Tensor& w2,
                       const std::string& activation, const std::string& products) {
  return with_torch_errors([&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    const c10::OptionalDeviceGuard guard(rows.device());
    check_counted(rows, counts, w1, w2, activation);
    if (rows.numel() == 0) return at::zeros_like(rows);
    const Ways ways = ways_of(rows, w1, w2, products);
    if (ways != Ways::library) {
      const at::Tensor inner = moe_product(rows, counts, w1, is_gated(w1, w2), activation);
      if (ways == Ways::kernel) return moe_product(inner, counts, w2, false, "");
      return Grouped(rows, counts, w1, w2).product(inner, w2.transpose(1, 2));
    }
    const Grouped grouped(rows, counts, w1, w2);
    const at::Tensor hidden = grouped.product(rows, w1.transpose(1, 2));
    const int64_t ffn = w2.size(2);
    const at::Tensor inner = is_gated(w1, w2)
                                 ? activated(hidden.narrow(1, 0, ffn), activation).mul_(hidden.narrow(1, ffn, ffn))
                                 : activated(hidden, activation);
    return grouped.product(inner, w2.transpose(1, 2));
  });
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> moe_experts_backward(const at::Tensor& gradient, const at::Tensor& rows,
                                                                    const at::Tensor& counts, const at::Tensor& w1,
                                                                    const at::Tensor& w2,
                                                                    const std::string& activation) {
  return with_torch_errors([&]() -> std::tuple<at::Tensor, at::Tensor, at::Tensor> {
    const at::AutoDispatchBelowADInplaceOrView below;
    const c10::OptionalDeviceGuard guard(rows.device());
    check_counted(rows, counts, w1, w2, activation);
    if (rows.numel() == 0) return {at::zeros_like(rows), at::zeros_like(w1), at::zeros_like(w2)};
    const at::Tensor of_out = gradient.contiguous();
    const Grouped grouped(rows, counts, w1, w2);
    const at::Tensor hidden = grouped.product(rows, w1.transpose(1, 2));
    const at::Tensor of_inner = grouped.product(of_out, w2);
    at::Tensor inner, of_hidden;
    if (is_gated(w1, w2)) {
      const int64_t ffn = w2.size(2);
      const at::Tensor gate = hidden.narrow(1, 0, ffn), factor = hidden.narrow(1, ffn, ffn);
      const at::Tensor through = activated(gate, activation);
      inner = through * factor;
      of_hidden = at::cat({activated_backward(of_inner * factor, gate, activation), of_inner * through}, 1);
    } else {
      inner = activated(hidden, activation);
      of_hidden = activated_backward(of_inner, hidden, activation);
    }
    return {grouped.product(of_hidden, w1), grouped.across(of_hidden, rows), grouped.across(of_out, inner)};
  });
}

}  // namespace ark::ops
