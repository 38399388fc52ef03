// Checking and staging of users' tensors: everything is checked before a byte moves.
//
// Collectives move plain contiguous memory. Input<> and Output stand for a user's tensor: the tensor's own memory when
// it is contiguous, else a contiguous copy (made when the call is issued, or copied back when the operation is done).
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "error.hpp"

namespace ark {

// Where a complaint comes from.
struct CallSite {
  int rank;
  const char* operation;
};

[[noreturn]] void refuse(const CallSite& site, ErrorKind kind, const std::string& what, const std::string& remedy);

// Defined, strided, on the CPU. `argument` as the Python API names it.
void check_tensor(const CallSite& site, const char* argument, const at::Tensor& tensor);
// Exactly one tensor in the list.
const at::Tensor& only(const CallSite& site, const char* argument, const std::vector<at::Tensor>& tensors);
void check_same_dtype(const CallSite& site, const char* argument, const at::Tensor& tensor, const char* other_argument,
                      const at::Tensor& other);
void check_elements(const CallSite& site, const char* argument, int64_t elements, int64_t expected,
                    const std::string& why);
void check_count(const CallSite& site, const char* argument, size_t count, size_t expected, const char* why);
void check_rank(const CallSite& site, const char* argument, int64_t value, int size);

class Input {
 public:
  Input() = default;
  explicit Input(const at::Tensor& tensor);
  const void* data() const { return data_; }

 private:
  at::Tensor tensor_;
  const void* data_ = nullptr;
};

class Output {
 public:
  Output() = default;
  // Refuses a tensor that overlaps itself.
  Output(const CallSite& site, const char* argument, const at::Tensor& tensor, bool also_input = false);
  void* data() const { return data_; }
  void commit();  // brings a staged result to the user's tensor

 private:
  at::Tensor tensor_, staged_;
  void* data_ = nullptr;
};

std::vector<Input> inputs_of(const std::vector<at::Tensor>& tensors);
std::vector<Output> outputs_of(const CallSite& site, const char* argument, const std::vector<at::Tensor>& tensors,
                               bool also_input = false);

int64_t elements_of(const std::vector<at::Tensor>& tensors);  // of all together

uint64_t shape_hash(uint64_t seed, const at::Tensor& tensor);

}  // namespace ark
