// Memory of a group for kernels of others' making. See cuda_communicator.hpp.
#include <array>
#include <string>

#include "collectives/cuda/launcher.hpp"
#include "shm/symmetric_memory.hpp"

namespace ark {

namespace {

struct ShareCard {
  uint64_t fingerprint;
};
struct SeenCard {
  std::array<char*, device::kMaxRanks> memory;  // every rank's, as mapped by this one
};

}  // namespace

// Calls are in the same order on all ranks, as operations are: so are their names.
std::unique_ptr<CudaCommunicator::Shared> CudaLauncher::share(uint64_t bytes, uint64_t fingerprint, std::string& why) {
  const auto meeting = MemoryMeeting::join(
      *store_, {rank_, size_, timeout_, "share/" + std::to_string(shares_++), ends_with(health_, timeout_)}, why);
  if (!meeting) return nullptr;
  const auto tell = [&] { meeting->own_card<ShareCard>().fingerprint = fingerprint; };
  const auto compare = [&] {
    for (int peer = 0; peer < size_; ++peer) {
      if (meeting->card_of<ShareCard>(peer).fingerprint == fingerprint) continue;
      throw Error(ErrorKind::mismatch,
                  "rank " + std::to_string(peer) +
                      " compiled a region with other collectives, or gave a fused operator other sizes",
                  ErrorContext{rank_, peer, "", 0, "Run the same model, on the same sizes, on every rank."});
    }
  };
  meeting->step(tell);
  meeting->step(compare);
  SymmetricMemory::Options sharing;
  sharing.device = device_, sharing.device_each = device_each_, sharing.bytes = bytes;
  sharing.on_host = on_host_;
  auto memory = std::make_shared<std::vector<DeviceMemory>>(SymmetricMemory::create(*meeting, sharing, why));
  if (memory->empty()) return nullptr;
  meeting->step([&] {
    auto& card = meeting->own_card<SeenCard>();
    for (int r = 0; r < size_; ++r) card.memory[r] = (*memory)[r].data();
  });
  auto shared = std::make_unique<CudaCommunicator::Shared>();
  for (int r = 0; r < size_; ++r) shared->seen.push_back(meeting->card_of<SeenCard>(r).memory[rank_]);
  for (const DeviceMemory& one : *memory) shared->memory.push_back(one.data());
  shared->status = &device_status()->group;
  shared->keep = memory;
  shared_bytes_ += (*memory)[rank_].size();
  return shared;
}

}  // namespace ark
