// Which kernel an operation takes, and its buffers in that kernel's terms.
#include "collectives/cuda/cuda_communicator.hpp"

#include <algorithm>

#include "collectives/cuda/launcher.hpp"
#include "collectives/cuda/tile_memory.hpp"
#include "shm/symmetric_memory.hpp"

namespace ark {

CudaDispatch CudaDispatch::measured(int ranks) {
  // Measured on H200 (docs/measurements.md has the figures); what is not: relay_from, more than four ranks. Large sums
  // are taken beside computation, which rings of warps slow down more than what takes few multiprocessors or none: copy
  // engines on two ranks, rings in bulk on four, where copy engines gain from 512 MB on.
  const bool pair = ranks <= 2, four = ranks > 2 && ranks <= 4;
  return {.one_shot_to = uint64_t{pair   ? 512u
                                  : four ? 160u
                                         : 64u}
                         << 10,
          .chunks_from = 8 << 20,
          .landings_from = 8 << 20,
          .relay_from = 1 << 20,
          .bulk_from = four ? 24 << 20 : kNever,
          .ring_blocks = four ? 24u : 16u,
          .part_bytes = uint64_t{pair   ? 64u
                                 : four ? 8u
                                        : 4u}
                        << 20,
          .copy_engine_from = pair   ? 24 << 20
                              : four ? 512 << 20
                                     : kNever,
          .in_line_to = pair ? 64u << 20 : 0u,
          .reduce_scatter_engine_from = kNever,
          .all_gather_engine_from = pair ? 64 << 20 : kNever,
          .registered_all_gather_engine_from = pair ? 12 << 20 : kNever,
          .broadcast_engine_from = kNever,
          .all_to_all_engine_from = kNever,
          .buffer_bytes = 512 << 20};
}

CudaDispatch CudaDispatch::through_host() const {
  CudaDispatch dispatch = *this;
  dispatch.chunks_from = 0;  // lines rely on 128 bytes that arrive at once
  for (uint64_t CudaDispatch::*const from :
       {&CudaDispatch::landings_from, &CudaDispatch::relay_from, &CudaDispatch::bulk_from,
        &CudaDispatch::copy_engine_from, &CudaDispatch::reduce_scatter_engine_from,
        &CudaDispatch::all_gather_engine_from, &CudaDispatch::registered_all_gather_engine_from,
        &CudaDispatch::broadcast_engine_from, &CudaDispatch::all_to_all_engine_from})
    dispatch.*from = kNever;
  dispatch.buffer_bytes = 0;
  return dispatch;
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
  options.dispatch->ring_blocks = std::clamp<uint64_t>(
      options.dispatch->ring_blocks, 1, options.device_each ? device::kMostRingBlocks : blocks_of_a_sharer(size));
  options.dispatch->part_bytes = std::max(options.dispatch->part_bytes / 1024 * 1024, uint64_t{64} << 10);
  // A device that is too old, or no compiler: said before anything is shared.
  const int major = jit::KernelLibrary::of(options.device).target().major;
  if (size == 1 || major < 9 || major >= 12) options.dispatch->bulk_from = CudaDispatch::kNever;  // no TMA, no memory
  if (options.on_host) options.dispatch = options.dispatch->through_host();
  SymmetricMemory::Options sharing;
  sharing.rank = rank;
  sharing.size = size;
  sharing.device = options.device;
  sharing.device_each = options.device_each;
  sharing.on_host = options.on_host;
  sharing.bytes = ArenaLayout(size, ring_blocks_of(*options.dispatch), options.device_each).total;
  sharing.timeout = options.timeout;
  sharing.name = "arena";
  sharing.check = options.check ? options.check : ends_with(health, options.timeout);
  std::vector<DeviceMemory> memory = SymmetricMemory::create(*store, sharing, why);
  if (memory.empty()) return nullptr;
  auto launcher = std::make_unique<CudaLauncher>(rank, size, health, std::move(store), std::move(memory), options);
  return std::unique_ptr<CudaCommunicator>(new CudaCommunicator(rank, size, std::move(launcher), *options.dispatch));
}

CudaCommunicator::CudaCommunicator(int rank, int size, std::unique_ptr<CudaLauncher> launcher,
                                   const CudaDispatch& dispatch)
    : Communicator(rank, size), launcher_(std::move(launcher)), dispatch_(dispatch) {}

CudaCommunicator::~CudaCommunicator() {
  if (tiles_ && !launcher_->settle()) static_cast<void>(tiles_.release());  // it may be in use
}

int CudaCommunicator::device() const {
  return launcher_->device();
}

uint64_t CudaCommunicator::shared_bytes() const {
  return launcher_->shared_bytes();
}

void CudaCommunicator::all_reduce(const Operation& operation, const void* in, void* out, size_t count) {
  launcher_->watch().check(operation.context);
  const uint64_t bytes = count * size_of(operation.descriptor.dtype);
  if (bytes == 0) return;
  const bool factors = operation.descriptor.op == ReduceOp::premul_sum;  // only two_shot knows them
  if (size_ > 1 && bytes <= std::min(dispatch_.one_shot_to, most_one_shot_bytes(size_)) && !factors)
    return launcher_->one_shot(operation, in, out, bytes);
  if (size_ > 1 && bytes >= dispatch_.copy_engine_from && !factors &&
      launcher_->engine_all_reduce(operation, in, out, bytes))
    return;
  launcher_->two_shot(operation, launcher_->parts_of(in, out, bytes, ~uint32_t{0}));
}

void CudaCommunicator::reduce(const Operation& operation, const void* in, void* out, size_t count) {
  launcher_->watch().check(operation.context);
  const uint64_t bytes = count * size_of(operation.descriptor.dtype);
  if (bytes == 0) return;
  launcher_->two_shot(operation, launcher_->parts_of(in, rank_ == operation.descriptor.root ? out : nullptr, bytes,
                                                     uint32_t{1} << operation.descriptor.root));
}

void CudaCommunicator::reduce_scatter(const Operation& operation, const void* const* ins, void* out, size_t count) {
  launcher_->watch().check(operation.context);
  if (count == 0) return;
  const uint64_t bytes = count * size_of(operation.descriptor.dtype);
  if (size_ > 1 && bytes >= dispatch_.reduce_scatter_engine_from && operation.descriptor.op != ReduceOp::premul_sum &&
      launcher_->engine_reduce_scatter(operation, ins, out, bytes))
    return;
  device::TwoShotParams parts{};
  for (int r = 0; r < size_; ++r) {
    parts.in[r] = ins[r];
    parts.bytes[r] = bytes;
  }
  parts.out[rank_] = out;
  launcher_->two_shot(operation, parts);
}

void CudaCommunicator::all_gather(const Operation& operation, const void* in, void* const* outs, size_t bytes) {
  launcher_->watch().check(operation.context);
  const uint64_t engine_from = launcher_->windows().size() == 0 ? dispatch_.all_gather_engine_from
                                                                : std::min(dispatch_.all_gather_engine_from,
                                                                           dispatch_.registered_all_gather_engine_from);
  if (size_ > 1 && bytes >= engine_from && bytes != 0 && launcher_->engine_all_gather(operation, in, outs, bytes))
    return;
  device::MoveParams params{};
  for (int r = 0; r < size_; ++r) {
    params.send[r] = in;
    params.receive[r] = outs[r];
    params.send_bytes[r] = params.receive_bytes[r] = bytes;
  }
  launcher_->move(operation, params);
}

void CudaCommunicator::broadcast(const Operation& operation, void* data, size_t bytes) {
  launcher_->watch().check(operation.context);
  if (size_ > 1 && bytes >= dispatch_.broadcast_engine_from && bytes != 0 &&
      launcher_->engine_broadcast(operation, data, bytes))
    return;
  if (size_ > 2 && bytes >= dispatch_.relay_from) return launcher_->relay(operation, data, bytes);
  const int root = operation.descriptor.root;
  device::MoveParams params{};
  for (int r = 0; r < size_ && rank_ == root; ++r) {
    if (r == root) continue;
    params.send[r] = data;
    params.send_bytes[r] = bytes;
  }
  if (rank_ != root) {
    params.receive[root] = data;
    params.receive_bytes[root] = bytes;
  }
  launcher_->move(operation, params);
}

void CudaCommunicator::gather(const Operation& operation, const void* in, void* const* outs, size_t bytes) {
  launcher_->watch().check(operation.context);
  const int root = operation.descriptor.root;
  device::MoveParams params{};
  params.send[root] = in;
  params.send_bytes[root] = bytes;
  for (int r = 0; r < size_ && rank_ == root; ++r) {
    params.receive[r] = outs[r];
    params.receive_bytes[r] = bytes;
  }
  launcher_->move(operation, params);
}

void CudaCommunicator::scatter(const Operation& operation, const void* const* ins, void* out, size_t bytes) {
  launcher_->watch().check(operation.context);
  const int root = operation.descriptor.root;
  device::MoveParams params{};
  params.receive[root] = out;
  params.receive_bytes[root] = bytes;
  for (int r = 0; r < size_ && rank_ == root; ++r) {
    params.send[r] = ins[r];
    params.send_bytes[r] = bytes;
  }
  launcher_->move(operation, params);
}

void CudaCommunicator::all_to_all(const Operation& operation, const Bytes* ins, const MutableBytes* outs) {
  launcher_->watch().check(operation.context);
  device::MoveParams params{};
  for (int r = 0; r < size_; ++r) {
    params.send[r] = ins[r].data;
    params.send_bytes[r] = ins[r].size;
    params.receive[r] = outs[r].data;
    params.receive_bytes[r] = outs[r].size;
  }
  if (size_ > 1) launcher_->engine_all_to_all(operation, params, dispatch_.all_to_all_engine_from);
  launcher_->move(operation, params);
}

void CudaCommunicator::barrier(const Operation& operation) {
  launcher_->watch().check(operation.context);
  launcher_->gather_words(operation, 16);
}

void CudaCommunicator::send(const Operation& operation, const void* data, size_t bytes, int peer) {
  launcher_->watch().check(operation.context);
  device::MoveParams params{};
  params.send[peer] = data;
  params.send_bytes[peer] = bytes;
  launcher_->transfer(operation, params);
}

void CudaCommunicator::recv(const Operation& operation, void* data, size_t bytes, int peer) {
  launcher_->watch().check(operation.context);
  device::MoveParams params{};
  params.receive[peer] = data;
  params.receive_bytes[peer] = bytes;
  launcher_->transfer(operation, params);
}

std::unique_ptr<CudaCommunicator::Shared> CudaCommunicator::share(uint64_t bytes, uint64_t fingerprint,
                                                                  std::string& why) {
  return launcher_->share(bytes, fingerprint, why);
}

TileMemory* CudaCommunicator::tiles(bool capturing, std::string& why) {
  if (tiles_ || !tiles_refused_.empty()) return why = tiles_refused_, tiles_.get();
  // Blocks count themselves by atomic operations, which take 45 us each on memory of the host.
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

std::string CudaCommunicator::engine_refusal() const {
  return launcher_->engine_refusal().value_or("");
}

bool CudaCommunicator::on_host() const {
  return launcher_->on_host();
}

uint32_t CudaCommunicator::most_blocks() const {
  return launcher_->most_blocks();
}

Windows& CudaCommunicator::windows() {
  return launcher_->windows();
}

std::optional<std::string> CudaCommunicator::wait_told(Clock::time_point until) {
  return launcher_->watch().wait_told(until);
}

bool CudaCommunicator::settle() {
  return launcher_->settle();
}

void CudaCommunicator::check(const OperationContext& context) {
  launcher_->watch().check(context);
}

void CudaCommunicator::abort() {
  launcher_->watch().abort();
}

void CudaCommunicator::when_failed(std::function<void()> then) {
  launcher_->watch().when_failed(std::move(then));
}

}  // namespace ark
