// Checks of users' tensors. Errors name the argument, the value, the rank and the remedy.
#include "process_group/tensors.hpp"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <sstream>

#include "process_group/translate.hpp"

namespace ark {

namespace {

std::string describe(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.sizes() << ", " << dtype_name(tensor.scalar_type());
  return text.str();
}

bool plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

}  // namespace

void refuse(const CallSite& site, ErrorKind kind, const std::string& what, const std::string& remedy) {
  throw Error(kind, what, ErrorContext{site.rank, -1, site.operation, 0, remedy});
}

void check_tensor(const CallSite& site, const char* argument, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    refuse(site, ErrorKind::type_error, std::string(argument) + " is not a tensor (undefined)", "Pass a tensor.");
  }
  if (tensor.layout() != at::kStrided) {
    std::ostringstream layout;
    layout << tensor.layout();
    refuse(site, ErrorKind::type_error,
           std::string(argument) + " has layout torch." + layout.str() + " (" + describe(tensor) + ")",
           "Pass a strided tensor (to_dense()); only all_reduce takes sparse COO tensors.");
  }
  if (!tensor.device().is_cpu() && !tensor.device().is_cuda()) {
    refuse(site, ErrorKind::invalid_argument,
           std::string(argument) + " is on " + tensor.device().str() + " (" + describe(tensor) +
               "), and ark moves CPU and CUDA tensors",
           "Pass a CPU or CUDA tensor.");
  }
}

const at::Tensor& only(const CallSite& site, const char* argument, const Tensors& tensors) {
  if (tensors.size() != 1) {
    refuse(site, ErrorKind::invalid_argument,
           std::string(argument) + " holds " + std::to_string(tensors.size()) + " tensors instead of one",
           "Pass one tensor a call (one process drives one device).");
  }
  check_tensor(site, argument, tensors[0]);
  return tensors[0];
}

void check_same_dtype(const CallSite& site, const char* argument, const at::Tensor& tensor, const char* other_argument,
                      const at::Tensor& other) {
  if (tensor.scalar_type() == other.scalar_type()) return;
  refuse(site, ErrorKind::type_error,
         std::string(argument) + " is " + dtype_name(tensor.scalar_type()) + " but " + other_argument + " is " +
             dtype_name(other.scalar_type()),
         "Give both the same dtype.");
}

void check_elements(const CallSite& site, const char* argument, int64_t elements, int64_t expected,
                    const std::string& why) {
  if (elements == expected) return;
  refuse(site, ErrorKind::invalid_argument,
         std::string(argument) + " has " + std::to_string(elements) + " elements, but " + std::to_string(expected) +
             " are needed (" + why + ")",
         "Give it that size.");
}

void check_count(const CallSite& site, const char* argument, size_t count, size_t expected, const char* why) {
  if (count == expected) return;
  refuse(site, ErrorKind::invalid_argument,
         std::string(argument) + " has " + std::to_string(count) + " entries, but " + std::to_string(expected) +
             " are needed (" + why + ")",
         "Give it that length.");
}

void check_rank(const CallSite& site, const char* argument, int64_t value, int size) {
  if (value >= 0 && value < size) return;
  refuse(site, ErrorKind::invalid_argument,
         std::string(argument) + " is " + std::to_string(value) + ", which is no rank of this group of " +
             std::to_string(size),
         "Use a rank from 0 to " + std::to_string(size - 1) + ".");
}

std::string entry_of(const char* argument, size_t index) {
  return std::string(argument) + "[" + std::to_string(index) + "]";
}

const at::Tensor* TensorArgument::first() const {
  const at::Tensor* first = nullptr;
  for_each([&](const at::Tensor& tensor) { first = first == nullptr ? &tensor : first; });
  return first;
}

int64_t TensorArgument::elements() const {
  int64_t elements = 0;
  for_each([&](const at::Tensor& tensor) { elements += tensor.numel(); });
  return elements;
}

Tensors TensorArgument::flat() const {
  if (const auto* list = std::get_if<const Tensors*>(&given_)) return **list;
  Tensors all;
  for_each([&](const at::Tensor& tensor) { all.push_back(tensor); });
  return all;
}

c10::IValue TensorArgument::value() const {
  if (const auto* tensor = std::get_if<const at::Tensor*>(&given_)) return c10::IValue(**tensor);
  if (const auto* lists = std::get_if<const std::vector<Tensors>*>(&given_)) return c10::IValue(**lists);
  return c10::IValue(flat());
}

Input::Input(const at::Tensor& tensor) {
  if (plain(tensor)) {
    tensor_ = tensor;
  } else {
    at::AutoDispatchBelowADInplaceOrView guard;
    tensor_ = tensor.resolve_conj().resolve_neg().contiguous();
  }
  data_ = tensor_.const_data_ptr();
}

void raise_version(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

Output::Output(const CallSite& site, const char* argument, const at::Tensor& tensor, Use use) : tensor_(tensor) {
  if (plain(tensor)) {
    data_ = tensor_.mutable_data_ptr();
    if (use != Use::read) raise_version(tensor);
    return;
  }
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    std::ostringstream strides;
    strides << tensor.strides();
    refuse(site, ErrorKind::invalid_argument,
           std::string(argument) + " overlaps itself (" + describe(tensor) + ", strides " + strides.str() +
               "), so a result cannot be written to it",
           "Pass tensor.contiguous() or tensor.clone().");
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  staged_ = at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous));
  if (use != Use::write) staged_.copy_(tensor);
  data_ = staged_.mutable_data_ptr();
  if (use != Use::read) raise_version(tensor);
}

void Output::commit() {
  if (!staged_.defined()) return;
  at::AutoDispatchBelowADInplaceOrView guard;
  tensor_.copy_(staged_);
}

std::vector<Input> inputs_of(const Tensors& tensors) {
  std::vector<Input> inputs;
  inputs.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) inputs.emplace_back(tensor);
  return inputs;
}

std::vector<Output> outputs_of(const CallSite& site, const char* argument, const Tensors& tensors, Use use) {
  std::vector<Output> outputs;
  outputs.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) outputs.emplace_back(site, argument, tensor, use);
  return outputs;
}

std::vector<const void*> places_of(const std::vector<Input>& inputs) {
  std::vector<const void*> places;
  for (const Input& input : inputs) places.push_back(input.data());
  return places;
}

std::vector<void*> places_of(const std::vector<Output>& outputs) {
  std::vector<void*> places;
  for (const Output& output : outputs) places.push_back(output.data());
  return places;
}

std::vector<const void*> split_evenly(const void* data, int size, size_t bytes) {
  std::vector<const void*> parts(size);
  for (int r = 0; r < size; ++r) parts[r] = static_cast<const std::byte*>(data) + r * bytes;
  return parts;
}

std::vector<void*> split_evenly(void* data, int size, size_t bytes) {
  std::vector<void*> parts(size);
  for (int r = 0; r < size; ++r) parts[r] = static_cast<std::byte*>(data) + r * bytes;
  return parts;
}

uint64_t shape_hash(uint64_t seed, const at::Tensor& tensor) {
  auto mix = [&](uint64_t value) {
    seed = (seed ^ value) * 0x9e3779b97f4a7c15ull;
    seed ^= seed >> 29;
  };
  mix(static_cast<uint64_t>(tensor.dim()) + 1);
  for (int64_t size : tensor.sizes()) mix(static_cast<uint64_t>(size));
  return seed;
}

}  // namespace ark
