// Allocates and shares a buffer in two steps of a meeting. Ranks check each other's size, GPU and peer access before
// they map, so the error names the rank and the reason instead of a failed driver call.
#include "shm/symmetric_memory.hpp"

#include <cstring>

namespace ark {

namespace {

struct BufferCard {
  uint64_t bytes;
  CUuuid device;
};

void check_sizes(MemoryMeeting& meeting) {
  const uint64_t own = meeting.card_of<BufferCard>(meeting.rank()).bytes;
  for (int peer = 0; peer < meeting.size(); ++peer) {
    const uint64_t theirs = meeting.card_of<BufferCard>(peer).bytes;
    if (theirs == own) continue;
    throw Error(ErrorKind::mismatch,
                "rank " + std::to_string(peer) + " shares " + std::to_string(theirs) +
                    " bytes of GPU memory, this rank " + std::to_string(own),
                ErrorContext{meeting.rank(), peer, "", 0,
                             "Give every rank the same version of ark_torch and the same ARK_SHARE_GPU."});
  }
}

// Checks that ranks use different devices and reach every peer's. A device that this process does not see
// (CUDA_VISIBLE_DEVICES) is left to the mapping, which fails if it is out of reach.
void check_devices(MemoryMeeting& meeting, int device, bool device_each, bool on_host) {
  const CUuuid own = meeting.card_of<BufferCard>(meeting.rank()).device;
  int count = 0;
  check(driver().device_get_count(&count), "cuDeviceGetCount");
  for (int peer = 0; peer < meeting.size(); ++peer) {
    if (peer == meeting.rank()) continue;
    const CUuuid theirs = meeting.card_of<BufferCard>(peer).device;
    if (device_each && std::memcmp(&own, &theirs, sizeof own) == 0) {
      throw Error(ErrorKind::invalid_argument,
                  "rank " + std::to_string(peer) + " uses the same GPU as rank " + std::to_string(meeting.rank()),
                  ErrorContext{meeting.rank(), peer, "", 0,
                               "Give every rank a GPU of its own (torch.cuda.set_device(local_rank)). To try a "
                               "program of several GPUs on one, slowly: ARK_SHARE_GPU=1."});
    }
    if (on_host || std::memcmp(&own, &theirs, sizeof own) == 0) continue;
    for (int ordinal = 0; ordinal < count; ++ordinal) {
      CUuuid seen;
      int reaches = 1;
      if (driver().device_get_uuid(&seen, ordinal) != CUDA_SUCCESS || std::memcmp(&seen, &theirs, sizeof seen) != 0)
        continue;
      if (driver().device_can_access_peer(&reaches, device, ordinal) == CUDA_SUCCESS && reaches == 0) {
        throw Error(ErrorKind::system, "device " + std::to_string(device) + " has no peer access to device " +
                                           std::to_string(ordinal) + ", of rank " + std::to_string(peer));
      }
    }
  }
}

}  // namespace

void SymmetricMemory::share(MemoryMeeting& meeting, const DeviceMemory& own,
                            const std::function<void(int peer, UniqueFd fd)>& take) {
  if (meeting.size() == 1) return;
  const UniqueFd fd = own.export_fd();
  for (int peer = 0; peer < meeting.size(); ++peer)
    if (peer != meeting.rank()) meeting.give(peer, fd);
  for (int peer = 0; peer < meeting.size(); ++peer)
    if (peer != meeting.rank()) take(peer, meeting.take(peer));
}

std::vector<DeviceMemory> SymmetricMemory::create(KeyValueStore& store, const Options& options, std::string& why) {
  const auto meeting =
      MemoryMeeting::join(store, {options.rank, options.size, options.timeout, options.name, options.check}, why);
  return meeting ? create(*meeting, options, why) : std::vector<DeviceMemory>();
}

std::vector<DeviceMemory> SymmetricMemory::create(MemoryMeeting& meeting, const Options& options, std::string& why,
                                                  bool* allocated) {
  std::vector<DeviceMemory> memory(meeting.size());
  DeviceMemory& own = memory[meeting.rank()];
  const auto allocate = [&] {
    own = options.on_host ? DeviceMemory::allocate_on_host(options.device, options.bytes)
                          : DeviceMemory::allocate(options.device, options.bytes);
    BufferCard& card = meeting.own_card<BufferCard>();
    card.bytes = own.size();
    check(driver().device_get_uuid(&card.device, options.device), "cuDeviceGetUuid");
  };
  const auto share = [&] {
    check_sizes(meeting);
    check_devices(meeting, options.device, options.device_each, options.on_host);
    SymmetricMemory::share(meeting, own, [&](int peer, UniqueFd fd) {
      memory[peer] = DeviceMemory::import(options.device, fd, meeting.card_of<BufferCard>(peer).bytes);
    });
  };
  const bool has = meeting.step(allocate, why);
  if (allocated != nullptr) *allocated = has;
  if (!has || !meeting.step(share, why)) return {};
  return memory;
}

}  // namespace ark
