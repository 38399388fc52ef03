// Translates between PyTorch and the library: dtypes, reduce ops, stores and exceptions.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <exception>
#include <string>

#include "shm/key_value.hpp"
#include "util/dtype.hpp"
#include "util/error.hpp"

namespace ark {

// Returns raw8 for types that can be moved but have no arithmetic here (quantised, bit types, float4).
DType dtype_of(at::ScalarType type);
std::string dtype_name(at::ScalarType type);     // "torch.bfloat16"
std::string shape_of(const at::Tensor& tensor);  // "[2, 3]"

struct Reduction {
  ReduceOp op = ReduceOp::sum;
  double factor = 1.0;
};
// Throws ValueError or TypeError if the operation is undefined for the type.
Reduction reduction_of(const c10d::ReduceOp& op, at::ScalarType type, int rank, const char* operation);

// Converts to PyTorch's exceptions: ValueError, TypeError, DistBackendError. Others pass unchanged.
std::exception_ptr to_torch(std::exception_ptr error);
[[noreturn]] void throw_torch(const Error& error);
template <class F>
auto with_torch_errors(F&& body) {
  try {
    return body();
  } catch (const Error& error) {
    throw_torch(error);
  }
}

class StoreAdapter : public KeyValueStore {
 public:
  explicit StoreAdapter(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> get(const std::string& key, std::chrono::milliseconds timeout) override;
  std::optional<std::vector<uint8_t>> find(const std::string& key) override;
  std::optional<std::vector<std::vector<uint8_t>>> find_all(const std::vector<std::string>& keys) override;

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace ark
