// Checks, describes and stages users' tensors. Everything is checked before a byte moves.
//
// Collectives move plain contiguous memory. Input and Output stand for a user's tensor: its own memory if contiguous,
// else a contiguous copy. An input is copied at issue, an output is copied back when the operation is done.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <variant>
#include <vector>

#include "util/error.hpp"

namespace ark {

using Tensors = std::vector<at::Tensor>;

// The origin of an error: rank and operation.
struct CallSite {
  int rank;
  const char* operation;
};

[[noreturn]] void refuse(const CallSite& site, ErrorKind kind, const std::string& what, const std::string& remedy);

// Requires a defined, strided tensor on the CPU or a CUDA device. `argument`: its name in the Python API.
void check_tensor(const CallSite& site, const char* argument, const at::Tensor& tensor);
// Returns the only tensor of a list and refuses any other length.
const at::Tensor& only(const CallSite& site, const char* argument, const Tensors& tensors);
void check_same_dtype(const CallSite& site, const char* argument, const at::Tensor& tensor, const char* other_argument,
                      const at::Tensor& other);
void check_elements(const CallSite& site, const char* argument, int64_t elements, int64_t expected,
                    const std::string& why);
void check_count(const CallSite& site, const char* argument, size_t count, size_t expected, const char* why);
void check_rank(const CallSite& site, const char* argument, int64_t value, int size);
std::string entry_of(const char* argument, size_t index);  // "tensors[3]"

// A view of a collective's input or output: a tensor, a list or lists of lists, as the caller passed it, because the
// profiler shows that form. It lives no longer than the arguments.
class TensorArgument {
 public:
  TensorArgument() = default;  // no argument
  TensorArgument(const at::Tensor& tensor) : given_(&tensor) {}
  TensorArgument(const Tensors& list) : given_(&list) {}
  TensorArgument(const std::vector<Tensors>& lists) : given_(&lists) {}

  template <class Visit>
  void for_each(Visit&& visit) const;
  const at::Tensor* first() const;  // null if there is none
  int64_t elements() const;         // sum over all tensors
  Tensors flat() const;
  c10::IValue value() const;

 private:
  std::variant<std::monostate, const at::Tensor*, const Tensors*, const std::vector<Tensors>*> given_;
};

class Input {
 public:
  Input() = default;
  explicit Input(const at::Tensor& tensor);
  const void* data() const { return data_; }

 private:
  at::Tensor tensor_;
  const void* data_ = nullptr;
};

// Autograd detects a write by the tensor's version, which a write through a pointer does not change. Without this, a
// backward that saved the tensor would silently use the new contents. Inference tensors have no version.
void raise_version(const at::Tensor& tensor);

// How a collective uses its output tensor.
enum class Use {
  write,   // replaces every element
  update,  // also reads it: the old elements are part of the result
  read,    // only reads it: the root of a broadcast
};

class Output {
 public:
  Output() = default;
  // Refuses a tensor that overlaps itself. Raises its version on the calling thread, unless it is only read.
  Output(const CallSite& site, const char* argument, const at::Tensor& tensor, Use use = Use::write);
  void* data() const { return data_; }
  void commit();  // copies a staged result to the user's tensor

 private:
  at::Tensor tensor_, staged_;
  void* data_ = nullptr;
};

std::vector<Input> inputs_of(const Tensors& tensors);
std::vector<Output> outputs_of(const CallSite& site, const char* argument, const Tensors& tensors,
                               Use use = Use::write);

// The addresses of their data.
std::vector<const void*> places_of(const std::vector<Input>& inputs);
std::vector<void*> places_of(const std::vector<Output>& outputs);
// Pieces of one contiguous buffer, one per rank.
std::vector<const void*> split_evenly(const void* data, int size, size_t bytes);
std::vector<void*> split_evenly(void* data, int size, size_t bytes);

uint64_t shape_hash(uint64_t seed, const at::Tensor& tensor);

template <class Visit>
void TensorArgument::for_each(Visit&& visit) const {
  if (const auto* tensor = std::get_if<const at::Tensor*>(&given_)) {
    visit(**tensor);
  } else if (const auto* list = std::get_if<const Tensors*>(&given_)) {
    for (const at::Tensor& entry : **list) visit(entry);
  } else if (const auto* lists = std::get_if<const std::vector<Tensors>*>(&given_)) {
    for (const Tensors& list : **lists) {
      for (const at::Tensor& entry : list) visit(entry);
    }
  }
}

}  // namespace ark
