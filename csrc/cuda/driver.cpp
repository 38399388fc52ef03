// Opens libcuda.so.1 and explains failures.
#include "cuda/driver.hpp"

#include <atomic>
#include <map>
#include <mutex>
#include <utility>

#include "util/error.hpp"

namespace ark {

namespace {

Error no_driver(const std::string& what, const std::string& remedy) {
  ErrorContext context;
  context.remedy = remedy;
  return Error(ErrorKind::system, what, context);
}

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string describe_with(const Driver* driver, CUresult result) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (driver != nullptr && driver->get_error_name != nullptr &&
      (driver->get_error_name(result, &name) != CUDA_SUCCESS ||
       driver->get_error_string(result, &text) != CUDA_SUCCESS))
    name = nullptr;
  if (name == nullptr || text == nullptr) return "CUDA error " + std::to_string(static_cast<int>(result));
  return std::string(name) + " (" + text + ")";
}

const char* remedy_of(CUresult result) {
  switch (result) {
    case CUDA_ERROR_OUT_OF_MEMORY: return "Free device memory, or use smaller buffers.";
    case CUDA_ERROR_NO_DEVICE: return "Check nvidia-smi and CUDA_VISIBLE_DEVICES, or use CPU tensors.";
    case CUDA_ERROR_NOT_INITIALIZED:
      return "A process forked after CUDA started cannot use it: start processes with spawn, or fork before.";
    case CUDA_ERROR_STUB_LIBRARY:
      return "The libcuda.so.1 that was found is the toolkit's stub: remove the stubs folder from LD_LIBRARY_PATH.";
    case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: return "The kernel's driver is another version than libcuda.so.1: reboot.";
    case CUDA_ERROR_INVALID_IMAGE:
    case CUDA_ERROR_NO_BINARY_FOR_GPU: return "The driver is older than the NVRTC that compiled: update the driver.";
    default:
      return is_sticky(result)
                 ? "A kernel that ran before this call failed, not necessarily one of ark; the process "
                   "must be started again. compute-sanitizer, or CUDA_LAUNCH_BLOCKING=1, finds the kernel."
                 : "";
  }
}

// Never freed, because threads may still make calls while the process ends. Not std::call_once, which ThreadSanitizer
// considers held after an exception.
std::atomic<const Driver*> g_driver{nullptr};

}  // namespace

Driver load_driver(const jit::LibraryOpener& opener) {
  std::string why_not;
  void* library = opener.open("libcuda.so.1", why_not);
  if (library == nullptr)
    throw no_driver("there is no NVIDIA driver: libcuda.so.1 cannot be opened (" + why_not + ")",
                    "Install NVIDIA's driver for CUDA " + version_text(kOldestDriver) +
                        " or newer (in a container: start it with the GPUs), or use CPU tensors.");
  Driver table;
  const char* missing = nullptr;
#define ARK_CUDA_RESOLVE(member, name, parameters)                                        \
  table.member = reinterpret_cast<CUresult(*) parameters>(opener.symbol(library, #name)); \
  if (table.member == nullptr && missing == nullptr) missing = #name;
  ARK_CUDA_FUNCTIONS(ARK_CUDA_RESOLVE)
#undef ARK_CUDA_RESOLVE
  if (table.driver_get_version == nullptr || table.driver_get_version(&table.version) != CUDA_SUCCESS)
    throw no_driver("libcuda.so.1 does not tell its version, so it is not NVIDIA's driver", "Install NVIDIA's driver.");
  if (table.version < kOldestDriver)
    throw no_driver("the NVIDIA driver supports CUDA " + version_text(table.version) + ", and ark needs " +
                        version_text(kOldestDriver),
                    "Update the driver (550 or newer), or use CPU tensors.");
  if (missing != nullptr)
    throw no_driver(
        std::string("libcuda.so.1 lacks ") + missing + " though it says CUDA " + version_text(table.version),
        "Install NVIDIA's driver again.");
  if (const CUresult result = table.init(0); result != CUDA_SUCCESS)
    throw no_driver("the NVIDIA driver cannot be used: " + describe_with(&table, result), remedy_of(result));
  return table;
}

const Driver& driver() {
  static std::mutex mutex;
  if (const Driver* known = g_driver.load(std::memory_order_acquire)) return *known;
  const std::lock_guard lock(mutex);
  if (g_driver.load(std::memory_order_relaxed) == nullptr)
    g_driver.store(new Driver(load_driver(jit::LibraryOpener::system())), std::memory_order_release);
  return *g_driver.load(std::memory_order_relaxed);
}

void use_driver(const Driver& table) {
  g_driver.store(&table, std::memory_order_release);
}

std::string driver_problem() {
  try {
    driver();
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

bool has_driver() noexcept {
  try {
    driver();
    return true;
  } catch (...) {
    return false;
  }
}

std::string describe(CUresult result) {
  return describe_with(g_driver.load(std::memory_order_acquire), result);
}

void check(CUresult result, const std::string& what) {
  if (result == CUDA_SUCCESS) return;
  ErrorContext context;
  context.remedy = remedy_of(result);
  throw Error(ErrorKind::system, what + " failed: " + describe(result), context);
}

bool is_sticky(CUresult result) {
  switch (result) {
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED: return true;
    default: return false;
  }
}

int device_attribute(int device, CUdevice_attribute attribute) {
  CUdevice handle = 0;
  check(driver().device_get(&handle, device), "cuDeviceGet of device " + std::to_string(device));
  int value = 0;
  check(driver().device_get_attribute(&value, attribute, handle),
        "cuDeviceGetAttribute " + std::to_string(attribute) + " of device " + std::to_string(device));
  return value;
}

std::string device_name(int device) {
  CUdevice handle = 0;
  check(driver().device_get(&handle, device), "cuDeviceGet of device " + std::to_string(device));
  char name[256] = {};
  check(driver().device_get_name(name, sizeof name, handle), "cuDeviceGetName of device " + std::to_string(device));
  return name;
}

CUcontext primary_context(int device) {
  static std::mutex mutex;
  static auto* contexts = new std::map<int, CUcontext>;
  const std::lock_guard lock(mutex);
  if (const auto known = contexts->find(device); known != contexts->end()) return known->second;
  const RelaxedCapture relaxed;
  CUdevice handle = 0;
  check(driver().device_get(&handle, device), "cuDeviceGet of device " + std::to_string(device));
  CUcontext context = nullptr;
  check(driver().device_primary_ctx_retain(&context, handle),
        "cuDevicePrimaryCtxRetain of device " + std::to_string(device));
  return contexts->emplace(device, context).first->second;
}

CurrentContext::CurrentContext(CUcontext context) {
  check(driver().ctx_get_current(&former_), "cuCtxGetCurrent");
  changed_ = former_ != context;
  if (changed_) check(driver().ctx_set_current(context), "cuCtxSetCurrent");
}

CurrentContext::~CurrentContext() {
  if (changed_) driver().ctx_set_current(former_);
}

RelaxedCapture::RelaxedCapture() {
  check(driver().thread_exchange_stream_capture_mode(&former_), "cuThreadExchangeStreamCaptureMode");
}

RelaxedCapture::~RelaxedCapture() {
  driver().thread_exchange_stream_capture_mode(&former_);
}

}  // namespace ark
