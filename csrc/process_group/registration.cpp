// Registered memory and allocation for a group: checks users' tensors and passes them to the group's windows.
//
// All ranks call together, and Registration tells all of them if one rank's arguments are invalid. The first
// registration creates the group's side on the device, like a first collective. Allocation is not collective: the
// tensor can be registered but is not yet.
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <sstream>

#include "collectives/cuda/cuda_communicator.hpp"
#include "process_group/cuda/cuda_group.hpp"
#include "process_group/cuda/cuda_streams.hpp"
#include "process_group/process_group_ark.hpp"

namespace ark {

namespace {

const char* const kHow = "Allocate it there: with torch.cuda.use_mem_pool(ark_torch.memory.pool()): ...";

void check_registrable(const CallSite& site, const std::optional<at::Tensor>& tensor) {
  if (!tensor) refuse(site, ErrorKind::type_error, "tensor is not a tensor", "Pass a CUDA tensor.");
  check_tensor(site, "tensor", *tensor);
  if (!tensor->is_cuda())
    refuse(site, ErrorKind::invalid_argument, "tensor is on cpu; registered memory is GPU memory", kHow);
  if (!tensor->is_contiguous()) {
    std::ostringstream shape;
    shape << tensor->sizes() << ", strides " << tensor->strides();
    refuse(site, ErrorKind::invalid_argument, "tensor is not contiguous (sizes " + shape.str() + ")",
           "Register the tensor that it is a view of.");
  }
  if (tensor->nbytes() == 0) refuse(site, ErrorKind::invalid_argument, "tensor is empty", "Pass one with elements.");
  if (is_capturing(tensor->device())) {
    refuse(site, ErrorKind::invalid_argument, "a graph is being captured, and there ranks cannot meet",
           "Call it before the capture begins.");
  }
}

}  // namespace

RegisteredRange ProcessGroupArk::range_of(const CallSite& site, const std::optional<at::Tensor>& tensor) {
  check_registrable(site, tensor);
  char* const data = static_cast<char*>(tensor->data_ptr());
  auto segment = find_shareable(data, tensor->nbytes());
  if (!segment) {
    refuse(site, ErrorKind::invalid_argument, "tensor is not from ark_torch.memory.pool(), so no other rank can map it",
           kHow);
  }
  return {data, tensor->nbytes(), std::move(segment)};
}

bool ProcessGroupArk::may_register() {
  const auto cuda = core_->cuda();
  const auto communicator = cuda ? cuda->communicator() : nullptr;
  if (core_->shm && !(cuda && cuda->carrier) && !(communicator && communicator->on_host())) return true;
  if (rank_ == 0 && options_->log && !told_of_registration_) {
    options_->log(
        "group \"" + options_->group_name + "\": memory is not registered, since " +
        (communicator ? "what its ranks share is on the host" : "ark does not carry this group's CUDA tensors"));
  }
  told_of_registration_ = true;
  return false;
}

Registration& ProcessGroupArk::registration() {
  const std::chrono::milliseconds timeout(core_->timeout_ms.load());
  if (registration_failure_) throw *registration_failure_;
  if (!registration_) {
    MemoryMeeting::Options options;
    options.rank = rank_, options.size = size_;
    options.timeout = timeout;
    options.name = "registration";
    options.check = [core = core_.get()] {
      core->check_open("register");
      ends_with(core->shm->health(), std::chrono::milliseconds(core->timeout_ms.load()))();
    };
    StoreAdapter store(c10::make_intrusive<c10d::PrefixStore>("ark/cuda/" + start_, store_));
    std::string why;
    try {
      auto meeting = MemoryMeeting::join(store, options, why);
      if (!meeting)
        throw Error(
            ErrorKind::system, "the ranks cannot meet to share memory: " + why,
            ErrorContext{rank_, -1, "register", 0, "Mend that on every rank, or do without registered memory."});
      registration_ = std::make_unique<Registration>(std::move(meeting));
    } catch (const Error& error) {
      registration_failure_ = error;  // peers have moved on, so there is no second try
      throw;
    }
  }
  registration_->set_timeout(timeout);
  return *registration_;
}

template <class Act>
auto ProcessGroupArk::registering(const char* call, Act&& act) {
  return with_torch_errors([&] {
    try {
      core_->check_open(call);
      const std::lock_guard lock(registering_);
      try {
        return act(CallSite{rank_, call});
      } catch (const Error& error) {
        // A rank that did not wait to the end does not know what the others hold, so no collective may rely on it.
        const bool gave_up = error.kind() == ErrorKind::timeout || error.kind() == ErrorKind::mismatch;
        if (gave_up && registration_ && registration_->over()) core_->shm->health().fail(error.at(rank_, call));
        throw;
      }
    } catch (const Error& error) {
      throw error.at(rank_, call);
    }
  });
}

Windows* ProcessGroupArk::windows_on(const char* call, c10::Device device,
                                     std::shared_ptr<CudaCommunicator>& communicator) {
  const auto side = cuda_side(call, device);
  communicator = side->communicator();
  if (communicator) return communicator->on_host() ? nullptr : &communicator->windows();
  if (!side->carrier) throw Error(ErrorKind::closed, "the process group was shut down");
  return nullptr;
}

bool ProcessGroupArk::register_memory(const std::optional<at::Tensor>& tensor) {
  return registering("register", [&](const CallSite& site) {
    if (!may_register()) return range_of(site, tensor).data == nullptr;
    std::shared_ptr<CudaCommunicator> communicator;
    const uint32_t id = registration().add([&] { return range_of(site, tensor); },
                                           [&] { return windows_on(site.operation, tensor->device(), communicator); });
    return id != 0 || may_register();
  });
}

void ProcessGroupArk::deregister_memory(const std::optional<at::Tensor>& tensor) {
  registering("deregister", [&](const CallSite& site) {
    if (!may_register()) return check_registrable(site, tensor);
    const auto side = core_->cuda();
    const auto communicator = side ? side->communicator() : nullptr;
    const auto offer = [&] {
      check_registrable(site, tensor);
      return RegisteredRange{static_cast<char*>(tensor->data_ptr()), tensor->nbytes(), nullptr};
    };
    registration().remove(offer, communicator ? &communicator->windows() : nullptr,
                          [&] { return communicator->settle(); });
  });
}

bool ProcessGroupArk::register_pool(const PoolId& id, c10::Device device, const Segments& segments) {
  return registering("register_mem_pool", [&](const CallSite& site) {
    if (!may_register()) return false;
    RegisteredPool& pool = pools_[id];
    const auto offer = [&] {
      if (is_capturing(device)) {
        refuse(site, ErrorKind::invalid_argument, "a graph is being captured, and there ranks cannot meet",
               "Call it before the capture begins.");
      }
      std::vector<RegisteredRange> ranges;
      for (const auto& [address, bytes] : segments) {
        char* const data = reinterpret_cast<char*>(address);
        if (pool.known.count(data) != 0) continue;
        auto segment = find_shareable(data, bytes);
        if (!segment) {
          refuse(site, ErrorKind::invalid_argument, "the pool's memory is of an allocator that cannot share it",
                 "Use ark_torch.memory.pool(), or make the pool with torch.cuda.MemPool(backend.mem_allocator).");
        }
        ranges.push_back({data, bytes, std::move(segment)});
      }
      // Sort by age, which is equal on ranks that allocate alike; addresses are not.
      std::sort(ranges.begin(), ranges.end(),
                [](const auto& one, const auto& other) { return one.segment->number < other.segment->number; });
      return ranges;
    };
    std::vector<RegisteredRange> offered;
    std::shared_ptr<CudaCommunicator> communicator;
    const auto ids = registration().add_all([&] { return offered = offer(); },
                                            [&] { return windows_on(site.operation, device, communicator); });
    if (ids.size() != offered.size()) return may_register();
    pool.ids.insert(pool.ids.end(), ids.begin(), ids.end());
    for (const RegisteredRange& range : offered) pool.known.insert(range.data);
    return true;
  });
}

void ProcessGroupArk::deregister_pool(const PoolId& id) {
  registering("deregister_mem_pool", [&](const CallSite&) {
    if (!may_register()) return;
    const auto side = core_->cuda();
    const auto communicator = side ? side->communicator() : nullptr;
    const auto found = pools_.find(id);
    registration().remove_all(found == pools_.end() ? nullptr : &found->second.ids,
                              communicator ? &communicator->windows() : nullptr,
                              [&] { return communicator->settle(); });
    pools_.erase(found);
  });
}

uint64_t ProcessGroupArk::cuda_registered_bytes() const {
  const auto side = core_->cuda();
  const auto communicator = side ? side->communicator() : nullptr;
  return communicator ? communicator->windows().bytes() : 0;
}

at::Tensor ProcessGroupArk::allocate_registered(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device) {
  if (cuda_registered_bytes() == 0 || !options_->allocate) return {};
  return options_->allocate(c10::multiply_integers(sizes), dtype, device).view(sizes);
}

void ProcessGroupArk::tell_of_copies() {
  if (!core_->shm) return;  // registered memory would not help
  if (told_of_copies_.exchange(true) || rank_ != 0 || !options_->log) return;
  options_->log(
      "group \"" + options_->group_name +
      "\": each result of a fused operator is copied once, since the group has no registered memory; "
      "backend.register_mem_pool(ark_torch.memory.pool()) on all ranks saves that (docs/registered-memory.md)");
}

bool ProcessGroupArk::supportsTensorAlloc(c10::DeviceIndex index) {
  if (const auto cuda = core_->cuda(); cuda && cuda->carrier) return cuda->carrier->supportsTensorAlloc(index);
  if (!core_->shm || !options_->allocate || !has_driver()) return false;
  try {
    if (index < 0) index = cuda_guard().getDevice().index();
    return device_attribute(index, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) != 0;
  } catch (const Error&) {
    return false;
  }
}

at::Tensor ProcessGroupArk::allocateTensor(long size, at::TensorOptions options) {
  return with_torch_errors([&] {
    const CallSite here = site("allocate_tensor");
    if (const auto cuda = core_->cuda(); cuda && cuda->carrier) return cuda->carrier->allocateTensor(size, options);
    c10::Device device = options.has_device() ? options.device() : c10::Device(c10::kCPU);
    if (!device.is_cuda()) {
      refuse(here, ErrorKind::invalid_argument,
             options.has_device() ? "device is " + device.str() : std::string("no device is given"),
             "Name a CUDA device.");
    }
    if (size < 0) refuse(here, ErrorKind::invalid_argument, "size is " + std::to_string(size), "Pass 0 or more.");
    if (!supportsTensorAlloc(device.index())) {
      refuse(here, ErrorKind::system, "no memory that ranks could share on " + device.str(),
             "Use torch.empty, and see `ark doctor`.");
    }
    if (!device.has_index()) device = getBoundDeviceId().value_or(cuda_guard().getDevice());
    return options_->allocate(size, c10::typeMetaToScalarType(options.dtype()), device);
  });
}

}  // namespace ark
