// Compiles, loads and launches kernels.
#include "jit/kernel.hpp"

#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "cuda/driver.hpp"
#include "jit/compiler.hpp"
#include "util/error.hpp"
#include "util/start_thread.hpp"

namespace ark::jit {

Target target_of(int major, int minor, const std::string& device_name) {
  if (major < 8) {
    ErrorContext context;
    context.remedy = "Use NCCL there (backend=\"nccl\", or ARK_DISABLE=1).";
    throw Error(ErrorKind::invalid_argument,
                device_name + " has compute capability " + std::to_string(major) + "." + std::to_string(minor) +
                    ", and ark's kernels need 8.0 (Ampere) or newer",
                context);
  }
  Target target{major, minor, "sm_" + std::to_string(major * 10 + minor)};
  // Adds the architecture-specific instructions (wgmma, tcgen05), which the plain name excludes.
  if (target.arch == "sm_90" || target.arch == "sm_100") target.arch += 'a';
  return target;
}

struct KernelLibrary::Impl {
  struct Module {
    std::mutex mutex;  // held while the stub is compiled and loaded; other stubs proceed
    CUmodule module = nullptr;
    bool from_cache = false;
    std::vector<uint8_t> cubin;
    std::map<std::string, Kernel> kernels;  // by entry; nodes do not move
  };

  Impl(int device, Settings settings) : device(device), compiler(std::move(settings), driver().version) {
    target = target_of(device_attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                       device_attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
                       "device " + std::to_string(device) + " (" + device_name(device) + ")");
    multiprocessors = device_attribute(device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    cache_bytes = device_attribute(device, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
    shared_optin = device_attribute(device, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  }

  Module& module_of(const std::string& stub) {
    const std::lock_guard lock(mutex);
    return modules[stub];
  }

  // Runs on the loading thread.
  void load(Module& module, const std::string& stub, const std::string& entry, bool fuse, bool may_spill,
            const std::vector<uint8_t>* saved) {
    const RelaxedCapture relaxed;
    const CurrentContext context(device);
    if (module.module == nullptr) {
      Source source{stub, target.arch, {}};
      source.fuse = fuse;
      source.may_spill = may_spill;
      CachedKernel found = saved != nullptr ? CachedKernel{*saved, CachedKernel::Origin::cache} : compiler.get(source);
      check(driver().module_load_data(&module.module, found.cubin.data()), "loading the kernel " + entry);
      module.from_cache = found.origin == CachedKernel::Origin::cache;
      module.cubin = std::move(found.cubin);
    }
    Kernel kernel;
    kernel.entry = entry;
    kernel.device = device;
    check(driver().module_get_function(&kernel.function, module.module, entry.c_str()),
          "looking for the kernel " + entry + " in its stub");
    check(driver().func_load(kernel.function), "loading the kernel " + entry);
    auto attribute = [&](CUfunction_attribute which) {
      int value = 0;
      check(driver().func_get_attribute(&value, which, kernel.function), "cuFuncGetAttribute of " + entry);
      return value;
    };
    kernel.registers = attribute(CU_FUNC_ATTRIBUTE_NUM_REGS);
    kernel.static_shared = attribute(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
    kernel.local = attribute(CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES);
    kernel.max_threads = attribute(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
    kernel.max_dynamic_shared = shared_optin - kernel.static_shared;
    check(driver().func_set_attribute(kernel.function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                      kernel.max_dynamic_shared),
          "cuFuncSetAttribute of " + entry);
    size_t offset = 0;
    check(driver().func_get_param_info(kernel.function, 0, &offset, &kernel.param_bytes),
          "cuFuncGetParamInfo of " + entry + ", which must take one struct");
    kernel.can_overlap = target.major >= 9;
    kernel.from_cache = module.from_cache;
    module.kernels.emplace(entry, std::move(kernel));
  }

  const int device;
  Compiler compiler;
  Target target;
  int multiprocessors = 0;
  int64_t cache_bytes = 0;
  int shared_optin = 0;
  std::mutex mutex;  // guards only the map
  std::map<std::string, Module> modules;
};

KernelLibrary::KernelLibrary(int device, Settings settings)
    : impl_(std::make_unique<Impl>(device, std::move(settings))) {}
KernelLibrary::~KernelLibrary() = default;

KernelLibrary& KernelLibrary::of(int device) {
  static std::mutex mutex;
  static auto* libraries = new std::map<int, std::unique_ptr<KernelLibrary>>;  // kernels may run during exit
  jit::ensure_configured();  // an operator without a group may be the first user
  {
    const std::lock_guard lock(mutex);
    if (const auto known = libraries->find(device); known != libraries->end()) return *known->second;
  }
  Settings now = jit::settings();  // may wait for the GIL, whose holder may wait for the mutex
  const std::lock_guard lock(mutex);
  if (const auto known = libraries->find(device); known != libraries->end()) return *known->second;
  return *libraries->emplace(device, std::make_unique<KernelLibrary>(device, std::move(now))).first->second;
}

const Target& KernelLibrary::target() const {
  return impl_->target;
}

int KernelLibrary::device() const {
  return impl_->device;
}

int KernelLibrary::multiprocessors() const {
  return impl_->multiprocessors;
}

int64_t KernelLibrary::cache_bytes() const {
  return impl_->cache_bytes;
}

std::vector<uint8_t> KernelLibrary::cubin(const std::string& stub) const {
  Impl::Module& module = impl_->module_of(stub);
  const std::lock_guard lock(module.mutex);
  return module.cubin;
}

const Kernel& KernelLibrary::get(const std::string& stub, const char* entry, bool fuse, bool may_spill,
                                 const std::vector<uint8_t>* saved) {
  Impl::Module& module = impl_->module_of(stub);
  const std::lock_guard lock(module.mutex);
  if (const auto known = module.kernels.find(entry); known != module.kernels.end()) return known->second;
  std::exception_ptr failure;
  start_thread("the thread that loads a kernel", [&] {
    try {
      impl_->load(module, stub, entry, fuse, may_spill, saved);
    } catch (...) {
      failure = std::current_exception();
    }
  }).join();
  if (failure) std::rethrow_exception(failure);
  return module.kernels.at(entry);
}

int resident_blocks(const Kernel& kernel, int threads, size_t dynamic_shared_bytes) {
  const CurrentContext context(kernel.device);
  int blocks = 0;
  check(driver().occupancy_max_active_blocks(&blocks, kernel.function, threads, dynamic_shared_bytes),
        "asking how many blocks of " + kernel.entry + " are resident");
  return blocks * KernelLibrary::of(kernel.device).multiprocessors();
}

void launch(const Kernel& kernel, Dim3 grid, Dim3 block, size_t dynamic_shared_bytes, CUstream stream,
            const void* params, size_t bytes, LaunchMode mode) {
  if (bytes != kernel.param_bytes)
    throw Error(ErrorKind::invalid_argument, "kernel " + kernel.entry + " takes a struct of " +
                                                 std::to_string(kernel.param_bytes) + " bytes, and was given " +
                                                 std::to_string(bytes));
  CUlaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (mode == LaunchMode::cooperative) {
    attributes[0].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attributes[0].value.cooperative = 1;
    attributes[1].id = CU_LAUNCH_ATTRIBUTE_PRIORITY;
    attributes[1].value.priority = 0;
    count = 2;
  } else if (mode == LaunchMode::overlapped && kernel.can_overlap) {
    attributes[0].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attributes[0].value.programmaticStreamSerializationAllowed = 1;
    count = 1;
  }
  CUlaunchConfig config{};
  config.gridDimX = grid.x, config.gridDimY = grid.y, config.gridDimZ = grid.z;
  config.blockDimX = block.x, config.blockDimY = block.y, config.blockDimZ = block.z;
  config.sharedMemBytes = static_cast<unsigned>(dynamic_shared_bytes);
  config.hStream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  void* arguments[] = {const_cast<void*>(params)};
  const CUresult result = driver().launch_kernel_ex(&config, kernel.function, arguments, nullptr);
  if (result == CUDA_SUCCESS) return;
  auto shape = [](Dim3 d) { return std::to_string(d.x) + "x" + std::to_string(d.y) + "x" + std::to_string(d.z); };
  check(result, "launching " + kernel.entry + " (grid " + shape(grid) + ", block " + shape(block) + ", " +
                    std::to_string(dynamic_shared_bytes) + " bytes of shared memory" +
                    (mode == LaunchMode::cooperative ? ", cooperative)" : ")"));
}

}  // namespace ark::jit
