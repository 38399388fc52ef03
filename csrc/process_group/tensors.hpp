// Checking, describing and staging of users' tensors: everything is checked before a byte moves.
//
// Collectives move plain contiguous memory. Input and Output stand for a user's tensor: the tensor's own memory when
// it is contiguous, else a contiguous copy (made when the call is issued, or copied back when the operation is done).
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <variant>
#include <vector>

#include "util/error.hpp"

namespace ark {

using Tensors = std::vector<at::Tensor>;

// Where a complaint comes from.
struct CallSite {
  int rank;
  const char* operation;
};

[[noreturn]] void refuse(const CallSite& site, ErrorKind kind, const std::string& what, const std::string& remedy);

// Defined, strided, on the CPU or a CUDA device. `argument` as the Python API names it.
void check_tensor(const CallSite& site, const char* argument, const at::Tensor& tensor);
// Exactly one tensor in the list.
const at::Tensor& only(const CallSite& site, const char* argument, const Tensors& tensors);
void check_same_dtype(const CallSite& site, const char* argument, const at::Tensor& tensor, const char* other_argument,
                      const at::Tensor& other);
void check_elements(const CallSite& site, const char* argument, int64_t elements, int64_t expected,
                    const std::string& why);
void check_count(const CallSite& site, const char* argument, size_t count, size_t expected, const char* why);
void check_rank(const CallSite& site, const char* argument, int64_t value, int size);
std::string entry_of(const char* argument, size_t index);  // "tensors[3]"

// What a collective was given as its input or output: a tensor, a list of them, or lists of lists, in the form in which
// it was given, since the profiler shows that. A view: it lives no longer than the arguments.
class TensorArgument {
 public:
  TensorArgument() = default;  // none
  TensorArgument(const at::Tensor& tensor) : given_(&tensor) {}
  TensorArgument(const Tensors& list) : given_(&list) {}
  TensorArgument(const std::vector<Tensors>& lists) : given_(&lists) {}

  template <class Visit>
  void for_each(Visit&& visit) const;
  const at::Tensor* first() const;  // null: there is none
  int64_t elements() const;         // of all together
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

// Autograd learns of a write to memory from the tensor's version, which a write through a pointer leaves alone: a
// backward that saved the tensor would take the new contents for the old. Inference tensors have no version.
void raise_version(const at::Tensor& tensor);

// What a collective does with a tensor that it was given to write to.
enum class Use {
  write,   // every element is replaced
  update,  // reads it too: its elements are part of the result
  read,    // only reads it: the root of a broadcast
};

class Output {
 public:
  Output() = default;
  // Refuses a tensor that overlaps itself. Raises the tensor's version, in the thread of the call, unless it is read.
  Output(const CallSite& site, const char* argument, const at::Tensor& tensor, Use use = Use::write);
  void* data() const { return data_; }
  void commit();  // brings a staged result to the user's tensor

 private:
  at::Tensor tensor_, staged_;
  void* data_ = nullptr;
};

std::vector<Input> inputs_of(const Tensors& tensors);
std::vector<Output> outputs_of(const CallSite& site, const char* argument, const Tensors& tensors,
                               Use use = Use::write);

// Where their bytes are.
std::vector<const void*> places_of(const std::vector<Input>& inputs);
std::vector<void*> places_of(const std::vector<Output>& outputs);
// Pieces of one contiguous buffer, one a rank.
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
