// Checks of a call's inputs (region.hpp): they must match what was compiled, and be disjoint where the region writes.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "compiler/emit/common/emit_tables.hpp"
#include "compiler/region/region.hpp"
#include "util/error.hpp"

namespace ark::compiler {

namespace {

template <class List>
std::string text_of(const List& list) {
  std::string text = "[";
  for (size_t i = 0; i < list.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(list[i]);
  return text + "]";
}

// Reads a byte of each of the object's cache lines. The reads do not depend on each other.
template <class T>
void touch(const T* object) {
  if (object == nullptr) return;
  const auto* bytes = reinterpret_cast<const volatile char*>(object);
  for (size_t i = 0; i < sizeof(T); i += 64) static_cast<void>(bytes[i]);
  static_cast<void>(bytes[sizeof(T) - 1]);
}

}  // namespace

bool Region::is_as_expected(const at::Tensor& input, const Expected& spec) const {
  const at::IntArrayRef sizes(extents_.data() + spec.first, spec.dims);
  const at::IntArrayRef strides(extents_.data() + spec.first + spec.dims, spec.dims);
  return input.device() == device() && input.layout() == at::kStrided &&
         !input.unsafeGetTensorImpl()->is_python_dispatch() && input.scalar_type() == spec.type &&
         input.sizes() == sizes && input.strides() == strides;
}

// Called for an unexpected input. Throws, unless only irrelevant strides differ.
void Region::check(size_t i, const at::Tensor& input) const {
  const Spec& spec = inputs_[i];
  const auto fail = [&](const std::string& what) {
    throw Error(ErrorKind::invalid_argument, options_.name + ": input " + std::to_string(i) + " " + what,
                ErrorContext{-1, -1, "", 0, "Compile again for this input (torch._dynamo.reset())."});
  };
  if (input.device() != device()) fail("is on " + input.device().str() + ", not " + device().str());
  if (input.layout() != at::kStrided) fail("is not strided");
  if (input.unsafeGetTensorImpl()->is_python_dispatch()) fail("is of a class that may have no memory of its own");
  if (input.scalar_type() != spec.type)
    fail(std::string("is ") + c10::toString(input.scalar_type()) + ", not " + c10::toString(spec.type));
  if (input.sizes() != at::IntArrayRef(spec.sizes))
    fail("has the shape " + text_of(input.sizes()) + ", not " + text_of(spec.sizes));
  // The stride of a dimension of length 1, or of an empty tensor, is irrelevant.
  for (size_t d = 0; d < spec.sizes.size() && input.numel() > 0; ++d) {
    if (spec.sizes[d] > 1 && input.stride(d) != spec.strides[d])
      fail("has the strides " + text_of(input.strides()) + ", not " + text_of(spec.strides));
  }
}

// Checks the inputs and returns their addresses. Tensors and storages are scattered and mostly evicted from near
// caches, so all are touched first; otherwise the check's branches would wait for them one by one.
std::vector<void*> Region::pointers_of(const std::vector<at::Tensor>& inputs) const {
  if (inputs.size() != inputs_.size())
    throw Error(ErrorKind::invalid_argument, options_.name + " takes " + std::to_string(inputs_.size()) +
                                                 " inputs, not " + std::to_string(inputs.size()));
  for (const at::Tensor& input : inputs) {
    touch(input.unsafeGetTensorImpl());
    touch(input.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  }
  std::vector<void*> pointers(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!is_as_expected(inputs[i], expected_[i])) check(i, inputs[i]);
    pointers[i] = inputs[i].data_ptr();
  }
  return pointers;
}

// An input that is written must not share a byte with any other argument, since the plan orders accesses by argument.
// (Interleaved tensors, such as halves of one cache, may be disjoint.) Caches the addresses found disjoint, since most
// calls repeat them.
bool Region::overlap(const std::vector<void*>& pointers) const {
  {
    const std::lock_guard lock(apart_mutex_);
    if (pointers == apart_) return false;
  }
  for (const size_t i : mutated_) {
    const auto at = reinterpret_cast<intptr_t>(pointers[i]);
    for (size_t k = 0; k < pointers.size(); ++k) {
      const auto other = reinterpret_cast<intptr_t>(pointers[k]);
      const Box &mine = inputs_[i].bytes, &its = inputs_[k].bytes;
      if (k == i || at + mine.end() <= other || other + its.end() <= at) continue;
      Box one = mine, two = its;
      (at < other ? two : one).offset += at < other ? other - at : at - other;
      if (compiler::overlap(one, two)) return true;
    }
  }
  const std::lock_guard lock(apart_mutex_);
  apart_ = pointers;
  return false;
}

// Inputs that a GPU's kernel needs aligned and that are elsewhere are copied, as Inductor does, and their pointers
// replaced. Rare: what PyTorch allocates is aligned, and so are most views.
Region::Copies Region::align(const std::vector<at::Tensor>& inputs, std::vector<void*>& pointers) const {
  Copies copies;
  for (const size_t i : cuda_->aligned()) {
    if (i >= inputs.size()) break;  // outputs are allocated by the region
    if (reinterpret_cast<uintptr_t>(pointers[i]) % kPieceAlignment == 0 || inputs[i].numel() == 0) continue;
    if (copies.empty()) cuda_->raise_if_failed();
    const at::AutoDispatchBelowADInplaceOrView guard;
    const at::Tensor& input = inputs[i];
    int64_t span = 1;  // elements, gaps included
    for (int64_t d = 0; d < input.dim(); ++d) span += (input.size(d) - 1) * input.stride(d);
    at::Tensor copy = at::empty({span}, input.options());
    copy.copy_(input.as_strided({span}, {1}, input.storage_offset()));
    pointers[i] = copy.data_ptr();
    copies.emplace_back(i, std::move(copy));
  }
  return copies;
}

// What the step wrote into copies of inputs. Gaps are not written: they may be another tensor's. Returns whether there
// was anything.
bool Region::write_back(const std::vector<at::Tensor>& inputs, const Copies& copies) const {
  bool any = false;
  for (const auto& [i, copy] : copies) {
    if (!inputs_[i].mutated) continue;
    const at::AutoDispatchBelowADInplaceOrView guard;
    at::Tensor(inputs[i]).copy_(copy.as_strided(inputs[i].sizes(), inputs[i].strides(), 0));
    any = true;
  }
  return any;
}

void Region::fail_overlap() const {
  throw Error(ErrorKind::invalid_argument, options_.name + ": two inputs share memory that the compiled region writes",
              ErrorContext{-1, -1, "", 0, "Give it tensors of their own."});
}

// Bumps version counters as any in-place operator does, so that autograd notices changes to what it saved, including
// those of a kernel that then fails.
void Region::bump_versions(const std::vector<at::Tensor>& inputs) const {
  for (const size_t i : mutated_) {
    if (!inputs[i].is_inference()) {
      inputs[i].unsafeGetTensorImpl()->bump_version();
    } else if (!c10::InferenceMode::is_enabled()) {
      TORCH_CHECK(false, options_.name, ": Inplace update to inference tensor outside InferenceMode is not allowed. ",
                  "Input ", i, " is one: clone it first, or call under torch.inference_mode().");
    }
  }
}

bool overlapping(const std::vector<at::Tensor>& tensors, const std::vector<size_t>& written) {
  struct Place {
    intptr_t at = 0;
    Box bytes;
  };
  const auto place_of = [](const at::Tensor& tensor) {
    // As a value of bytes: a plan knows a few types, a tensor may have any.
    const int64_t size = static_cast<int64_t>(tensor.element_size());
    Value value;
    value.type = ScalarType::boolean;
    value.shape = tensor.sizes().vec();
    for (const int64_t stride : tensor.strides()) value.strides.push_back(stride * size);
    value.shape.push_back(size);
    value.strides.push_back(1);
    return Place{reinterpret_cast<intptr_t>(tensor.const_data_ptr()), box_of(value)};
  };
  const auto in_memory = [](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && !tensor.unsafeGetTensorImpl()->is_python_dispatch() && tensor.numel() > 0;
  };
  for (const size_t i : written) {
    if (!in_memory(tensors[i])) continue;
    for (size_t k = 0; k < tensors.size(); ++k) {
      if (k == i || !in_memory(tensors[k]) || !tensors[i].storage().is_alias_of(tensors[k].storage())) continue;
      Place one = place_of(tensors[i]), two = place_of(tensors[k]);
      if (one.at > two.at) std::swap(one, two);
      two.bytes.offset += two.at - one.at;
      if (overlap(one.bytes, two.bytes)) return true;
    }
  }
  return false;
}

}  // namespace ark::compiler
