// Life of a group's side on its device: creation by all ranks together, kernels at first use, later shared memory, and
// the end.
#include "collectives/cuda/cuda_communicator.hpp"

#include <algorithm>
#include <array>

#include "collectives/cuda/peer_test.hpp"
#include "collectives/cuda/tile_memory.hpp"
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

std::function<void()> ends_with(GroupHealth& health, std::chrono::milliseconds timeout) {
  const OperationContext context{"sharing GPU memory", 0, Clock::now() + timeout, timeout};
  return [&health, context] {
    health.check_alive(context);
    for (int peer = 0; peer < health.size(); ++peer) {
      if (peer == health.rank()) continue;
      if (const auto alarm = health.alarm(context, peer)) health.raise(*alarm, context, peer);
    }
  };
}

std::unique_ptr<CudaCommunicator> CudaCommunicator::create(int rank, int size, std::shared_ptr<KeyValueStore> store,
                                                           GroupHealth& health, const Options& given,
                                                           std::string& why) {
  Options options = given;
  if (!options.dispatch) options.dispatch = CudaDispatch::measured(size);
  if (size > device::kMaxRanks) {
    why = "a group of " + std::to_string(size) + " ranks on one node; kernels are made for up to " +
          std::to_string(device::kMaxRanks);
    return nullptr;
  }
  if (options.dispatch->step_blocks == 0) options.dispatch->leave_step_rings();
  for (uint64_t* const blocks :
       {&options.dispatch->ring_blocks, &options.dispatch->step_blocks, &options.dispatch->host_blocks})
    *blocks =
        std::clamp<uint64_t>(*blocks, 1, options.device_each ? device::kMostRingBlocks : blocks_of_a_sharer(size));
  options.dispatch->step_all_reduce_blocks =
      std::clamp<uint64_t>(options.dispatch->step_all_reduce_blocks, 1, options.dispatch->step_blocks);
  for (uint64_t* const blocks : {&options.dispatch->move_blocks, &options.dispatch->sum_blocks})
    *blocks = std::clamp<uint64_t>(*blocks, 1, CudaDispatch::kMostBlocks);
  options.dispatch->part_bytes = std::max(options.dispatch->part_bytes / 1024 * 1024, uint64_t{64} << 10);
  // Report an old device or a missing compiler before anything is shared.
  const int major = jit::KernelLibrary::of(options.device).target().major;
  if (size == 1 || major < 9 || major >= 12) options.dispatch->leave_bulk_rings();  // no TMA, no memory
  // Blocks of several transfers wait at once, each with much shared memory.
  if (!options.device_each) options.dispatch->bulk_send_from = options.dispatch->step_send_from = CudaDispatch::kNever;
  ArenaMemory::Options sharing;
  sharing.rank = rank;
  sharing.size = size;
  sharing.device = options.device;
  sharing.device_each = options.device_each;
  sharing.timeout = options.timeout;
  sharing.check = options.check ? options.check : ends_with(health, options.timeout);
  auto arena = ArenaMemory::share(*store, sharing, *options.dispatch, why);
  if (!arena) return nullptr;
  return std::unique_ptr<CudaCommunicator>(
      new CudaCommunicator(rank, size, health, std::move(store), std::move(*arena), options));
}

CudaCommunicator::CudaCommunicator(int rank, int size, GroupHealth& health, std::shared_ptr<KeyValueStore> store,
                                   ArenaMemory arena, const Options& options)
    : Communicator(rank, size),
      device_(options.device),
      health_(health),
      store_(std::move(store)),
      timeout_(options.timeout),
      dispatch_(*options.dispatch),
      arena_(std::move(arena)),
      layout_(size, bulk_blocks_of(dispatch_), options.device_each, arena_.on_host ? host_blocks_of(dispatch_) : 0),
      status_(std::make_unique<PinnedMemory>(options.device, sizeof(Status))),
      watch_(health, &host_status()->group, options.log, options.note),
      device_each_(options.device_each),
      shared_bytes_(arena_.parts[rank].size()) {}

bool CudaCommunicator::settle() {
  // Kernels of this group may still run. They are bounded, and the watch ends kernels and copy engine waits for a lost
  // peer. It makes no driver calls, so locks of the driver cannot block it.
  if (is_stuck(device_)) return false;
  try {
    const RelaxedCapture relaxed;
    const CurrentContext context(device_);
    return driver().ctx_synchronize() == CUDA_SUCCESS;
  } catch (const Error&) {  // at exit the driver may be gone
    return false;
  }
}

CudaCommunicator::~CudaCommunicator() {
  const bool over = settle();
  watch_.forget_engine();
  if (over) return;
  // During a capture, or if the context is gone, memory may still be in use, so leak it.
  new ArenaMemory(std::move(arena_));
  new std::vector<std::shared_ptr<void>>(windows_.clear());
  (void)tiles_.release();
  (void)engine_.release();
  (void)status_.release();  // kernels and streams write to it
}

const jit::Kernel& CudaCommunicator::kernel(GroupKernel kind, RuleKind rule) {
  const std::lock_guard lock(mutex_);
  const jit::Kernel*& kernel = kernels_[static_cast<int>(kind)][static_cast<int>(rule)];
  if (kernel == nullptr) {
    const GroupStub stub = group_stub(kind, rule, size_, rank_);
    kernel = &jit::KernelLibrary::of(device_).get(stub.text, stub.entry);
  }
  return *kernel;
}

// Calls are in the same order on all ranks, so their names match.
std::unique_ptr<CudaCommunicator::Shared> CudaCommunicator::share(uint64_t bytes, uint64_t fingerprint,
                                                                  std::string& why) {
  const auto meeting = MemoryMeeting::join(
      *store_, {rank_, size_, timeout_, "share/" + std::to_string(shares_++), ends_with(health_, timeout_)}, why);
  if (!meeting) return nullptr;
  const auto tell = [&] { meeting->own_card<ShareCard>().fingerprint = fingerprint; };
  const auto compare = [&] {
    for (int peer = 0; peer < size_; ++peer) {
      if (meeting->card_of<ShareCard>(peer).fingerprint == fingerprint) continue;
      throw Error(
          ErrorKind::mismatch,
          "rank " + std::to_string(peer) +
              " compiled a region with other collectives or other costs of work, or gave a fused operator other sizes",
          ErrorContext{rank_, peer, "", 0,
                       "Run the same model, on the same sizes, on every rank, with one cache folder or "
                       "ARK_COSTS=assumed."});
    }
  };
  meeting->step(tell);
  meeting->step(compare);
  SymmetricMemory::Options sharing;
  sharing.device = device_, sharing.device_each = device_each_, sharing.bytes = bytes;
  sharing.on_host = arena_.on_host;
  auto memory = std::make_shared<std::vector<DeviceMemory>>(SymmetricMemory::create(*meeting, sharing, why));
  if (memory->empty()) return nullptr;
  meeting->step([&] {
    auto& card = meeting->own_card<SeenCard>();
    for (int r = 0; r < size_; ++r) card.memory[r] = (*memory)[r].data();
  });
  auto shared = std::make_unique<Shared>();
  for (int r = 0; r < size_; ++r) shared->seen.push_back(meeting->card_of<SeenCard>(r).memory[rank_]);
  for (const DeviceMemory& one : *memory) shared->memory.push_back(one.data());
  shared->status = &device_status()->group;
  shared->keep = memory;
  shared_bytes_ += (*memory)[rank_].size();
  return shared;
}

TileMemory* CudaCommunicator::tiles(bool capturing, std::string& why) {
  if (tiles_ || !tiles_refused_.empty()) return why = tiles_refused_, tiles_.get();
  // Blocks count themselves with atomic operations, which take tens of microseconds on host memory.
  if (on_host()) return why = "its ranks share memory of the host alone", nullptr;
  if (capturing) {
    throw Error(ErrorKind::invalid_argument,
                "the group's first fused operator is under graph capture, where ranks cannot meet",
                ErrorContext{rank_, -1, "", 0, "Call it once, on all ranks, before the capture begins."});
  }
  tiles_ = TileMemory::create(*this, why);
  if (!tiles_) tiles_refused_ = why;
  return tiles_.get();
}

}  // namespace ark
