// Maps dtypes, reduce ops and exceptions between PyTorch and the library, and adapts c10d's store. The library below
// does not depend on torch, so all conversions are here.
#include "process_group/translate.hpp"

#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>
#include <thread>

#include "collectives/cpu/reduce/reduce.hpp"
#include "health/group_health.hpp"
#include "process_group/cuda/cuda_streams.hpp"

namespace ark {

DType dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kBool: return DType::boolean;
    case at::kByte: return DType::u8;
    case at::kChar: return DType::i8;
    case at::kUInt16: return DType::u16;
    case at::kShort: return DType::i16;
    case at::kUInt32: return DType::u32;
    case at::kInt: return DType::i32;
    case at::kUInt64: return DType::u64;
    case at::kLong: return DType::i64;
    case at::kHalf: return DType::f16;
    case at::kBFloat16: return DType::bf16;
    case at::kFloat: return DType::f32;
    case at::kDouble: return DType::f64;
    case at::kFloat8_e4m3fn: return DType::f8_e4m3fn;
    case at::kFloat8_e5m2: return DType::f8_e5m2;
    case at::kFloat8_e4m3fnuz: return DType::f8_e4m3fnuz;
    case at::kFloat8_e5m2fnuz: return DType::f8_e5m2fnuz;
    case at::kFloat8_e8m0fnu: return DType::f8_e8m0fnu;
    case at::kComplexHalf: return DType::c32;
    case at::kComplexFloat: return DType::c64;
    case at::kComplexDouble: return DType::c128;
    default: return DType::raw8;
  }
}

std::string dtype_name(at::ScalarType type) {
  const DType dtype = dtype_of(type);
  return std::string("torch.") + (dtype == DType::raw8 ? c10::toString(type) : name_of(dtype));
}

std::string shape_of(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.sizes();
  return text.str();
}

Reduction reduction_of(const c10d::ReduceOp& op, at::ScalarType type, int rank, const char* operation) {
  Reduction reduction;
  switch (op.op_) {
    case c10d::ReduceOp::SUM: reduction.op = ReduceOp::sum; break;
    case c10d::ReduceOp::AVG: reduction.op = ReduceOp::avg; break;
    case c10d::ReduceOp::PRODUCT: reduction.op = ReduceOp::product; break;
    case c10d::ReduceOp::MIN: reduction.op = ReduceOp::min; break;
    case c10d::ReduceOp::MAX: reduction.op = ReduceOp::max; break;
    case c10d::ReduceOp::BAND: reduction.op = ReduceOp::band; break;
    case c10d::ReduceOp::BOR: reduction.op = ReduceOp::bor; break;
    case c10d::ReduceOp::BXOR: reduction.op = ReduceOp::bxor; break;
    case c10d::ReduceOp::PREMUL_SUM: {
      reduction.op = ReduceOp::premul_sum;
      const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
      if (supplement == nullptr) {
        throw Error(
            ErrorKind::invalid_argument, "PREMUL_SUM came without its factor",
            ErrorContext{rank, -1, operation, 0, "Make it with torch.distributed._make_nccl_premul_sum(factor)."});
      }
      const at::Tensor& factor = supplement->tensor_factor;
      // The host reads the factor, and waits for the current stream if it is on a device.
      if (factor.defined() && factor.is_cuda() && is_capturing(factor.device())) {
        throw Error(ErrorKind::invalid_argument,
                    "PREMUL_SUM's factor is a CUDA tensor, which cannot be read while a graph is captured",
                    ErrorContext{rank, -1, operation, 0, "Give the factor as a number or a CPU tensor."});
      }
      reduction.factor = factor.defined() ? factor.item<double>() : supplement->double_factor;
      break;
    }
    default:
      throw Error(ErrorKind::invalid_argument, "unknown reduce operation " + std::to_string(static_cast<int>(op.op_)),
                  ErrorContext{rank, -1, operation, 0, "Use one of torch.distributed.ReduceOp."});
  }
  const DType dtype = dtype_of(type);
  if (find_reduce(dtype, reduction.op) == nullptr) {
    const char* why = why_unsupported(dtype, reduction.op);
    throw Error(ErrorKind::type_error,
                std::string("ReduceOp.") + name_of(reduction.op) + " is not defined for " + dtype_name(type) +
                    (why ? std::string(": ") + why : ""),
                ErrorContext{rank, -1, operation, 0, "Convert the tensor, or use another ReduceOp."});
  }
  return reduction;
}

void throw_torch(const Error& error) {
  switch (error.kind()) {
    case ErrorKind::invalid_argument: C10_THROW_ERROR(ValueError, error.what());
    case ErrorKind::out_of_range: C10_THROW_ERROR(IndexError, error.what());
    case ErrorKind::type_error: C10_THROW_ERROR(TypeError, error.what());
    default: C10_THROW_ERROR(DistBackendError, error.what());
  }
}

std::exception_ptr to_torch(std::exception_ptr error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& own) {
    try {
      throw_torch(own);
    } catch (...) {
      return std::current_exception();
    }
  } catch (...) {
    return std::current_exception();
  }
}

namespace {

[[noreturn]] void store_failed(const std::exception& error) {
  throw Error(
      ErrorKind::system, std::string("the rendezvous store failed: ") + error.what(),
      ErrorContext{-1, -1, "init", 0, "See whether the process that hosts the store (rank 0 or torchrun) lives."});
}

}  // namespace

void StoreAdapter::set(const std::string& key, const std::vector<uint8_t>& value) {
  try {
    store_->set(key, value);
  } catch (const std::exception& error) {
    store_failed(error);
  }
}

// Uses check() and not wait(): a wait that times out prints warnings and closes connections.
std::optional<std::vector<uint8_t>> StoreAdapter::find(const std::string& key) {
  try {
    if (!store_->check({key})) return std::nullopt;
    return store_->get(key);
  } catch (const std::exception& error) {
    store_failed(error);
  }
}

std::optional<std::vector<std::vector<uint8_t>>> StoreAdapter::find_all(const std::vector<std::string>& keys) {
  if (!store_->hasExtendedApi()) return KeyValueStore::find_all(keys);
  try {
    if (!store_->check(keys)) return std::nullopt;
    return store_->multiGet(keys);
  } catch (const std::exception& error) {
    store_failed(error);
  }
}

std::vector<uint8_t> StoreAdapter::get(const std::string& key, std::chrono::milliseconds timeout) {
  const auto until = Clock::now() + timeout;
  for (auto pause = std::chrono::milliseconds(1);; pause = std::min(pause * 2, std::chrono::milliseconds(50))) {
    if (auto value = find(key)) return *value;
    if (Clock::now() >= until) {
      throw Error(
          ErrorKind::timeout,
          "key " + key + " did not appear in the rendezvous store within " + std::to_string(timeout.count()) + " ms",
          ErrorContext{-1, -1, "init", 0, "See whether every rank started."});
    }
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace ark
