// From an operation to the parameters of a kernel.
#include "collectives/cuda/cuda_communicator.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>

#include "collectives/cuda/arena.hpp"
#include "collectives/cuda/stubs.hpp"
#include "cuda/add.cuh"
#include "cuda/move.cuh"
#include "cuda/two_shot.cuh"
#include "dma/copy_engine.hpp"
#include "health/device_watch.hpp"
#include "jit/kernel.hpp"
#include "memory/device_memory.hpp"
#include "memory/symmetric_memory.hpp"

namespace ark {

namespace {

// Up to here every rank's whole input to every rank is faster than two steps (measured).
uint64_t most_one_shot_bytes(int ranks) {
  return ranks <= 2 ? kMostOneShotBytes : ranks <= 4 ? 160 * 1024 : 64 * 1024;
}

// From here copy engines carry all_reduce: as fast, and no SM is taken from what computes beside.
constexpr uint64_t kLeastBucketBytes = 16 << 20;

// In host memory that kernels and the host write.
struct Status {
  device::GroupStatus group;
  device::EngineStatus engine;
};

// While a group meets to share memory: ends as soon as the group does.
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

uint64_t nanoseconds_of(const OperationContext& context) {
  if (context.deadline == Clock::time_point::max()) return ~uint64_t{0};
  return std::max<int64_t>(context.timeout.count(), 1) * 1'000'000;
}

}  // namespace

struct CudaCommunicator::Impl {
  struct Reduce {
    const jit::Kernel* one_shot = nullptr;
    const jit::Kernel* two_shot = nullptr;
    const jit::Kernel* add = nullptr;
  };

  int rank, size, device;
  GroupHealth& health;
  const std::shared_ptr<KeyValueStore> store;
  const std::chrono::milliseconds timeout;
  ArenaLayout layout;
  std::vector<DeviceMemory> memory;  // by rank, as mapped here
  PinnedMemory status;
  DeviceWatch watch;
  std::mutex mutex;
  const jit::Kernel* move = nullptr;
  std::array<Reduce, kRuleKinds> reduces;
  std::unique_ptr<CopyEngine> engine;
  bool engine_refused = false;

  Impl(int rank_, int size_, GroupHealth& health_, std::shared_ptr<KeyValueStore> store_,
       std::vector<DeviceMemory> memory_, const Options& options)
      : rank(rank_),
        size(size_),
        device(options.device),
        health(health_),
        store(std::move(store_)),
        timeout(options.timeout),
        layout(size_),
        memory(std::move(memory_)),
        status(options.device, sizeof(Status)),
        watch(health, &static_cast<Status*>(status.host())->group, options.log) {}

  ~Impl() {
    // Kernels of this group may still run; they are bounded, and the watch ends those that wait for a lost peer.
    const RelaxedCapture relaxed;
    const CurrentContext context(device);
    const bool over = driver().ctx_synchronize() == CUDA_SUCCESS;
    watch.forget_engine();
    if (over) return;
    // A capture is under way, or the context is gone: memory that may be in use is not taken away.
    new std::vector<DeviceMemory>(std::move(memory));
    (void)engine.release();
  }

  // Null where it cannot be: under capture memory is not shared, and where it was refused once it is not asked again.
  // Alike on all ranks, as their calls are.
  CopyEngine* copy_engine(const Operation& operation) {
    if (engine || engine_refused) return engine.get();
    CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;
    ark::check(driver().stream_is_capturing(stream_of(operation), &capturing), "cuStreamIsCapturing");
    if (capturing != CU_STREAM_CAPTURE_STATUS_NONE) return nullptr;
    SymmetricMemory::Options sharing;
    sharing.rank = rank, sharing.size = size, sharing.device = device;
    sharing.name = "buckets";
    sharing.bytes = CopyEngine::memory_bytes(size);
    sharing.timeout = timeout;
    sharing.prepare = [&](const DeviceMemory& own) { CopyEngine::prepare(own, size); };
    sharing.check = ends_with(health, timeout);
    std::string why;
    std::vector<DeviceMemory> buckets = SymmetricMemory::create(*store, sharing, why);
    engine_refused = buckets.empty();
    if (engine_refused) return nullptr;
    engine =
        std::make_unique<CopyEngine>(rank, device, std::move(buckets), &static_cast<Status*>(status.device())->engine);
    watch.watch_engine(&static_cast<Status*>(status.host())->engine, [this] { engine->release_all(); });
    return engine.get();
  }

  bool reduce_bucket(const Operation& operation, const void* in, void* out, uint64_t bytes) {
    CopyEngine* const copies = copy_engine(operation);
    if (copies == nullptr) return false;
    watch.engine_used(operation.context.timeout);
    const RuleKind rule = rule_of(operation.descriptor.dtype, operation.descriptor.op);
    const jit::Kernel& kernel = *reducing(rule).add;
    const auto add = [&](const void* const* parts, void* sum, uint64_t part_bytes, CUstream stream) {
      device::AddParams params{};
      std::copy_n(parts, size, params.parts);
      params.out = sum;
      params.bytes = part_bytes;
      params.progress = &static_cast<Status*>(status.device())->engine.progress;
      params.average = operation.descriptor.op == ReduceOp::avg;
      params.dtype = static_cast<device::DType>(operation.descriptor.dtype);
      params.op = static_cast<device::ReduceOp>(operation.descriptor.op);
      const uint64_t each = 256 * device::kAddUnits * 16;
      jit::launch(kernel, {static_cast<unsigned>((part_bytes + each - 1) / each)}, {256}, 0, stream, params);
    };
    copies->all_reduce(in, out, bytes, size_of(operation.descriptor.dtype), stream_of(operation), add);
    return true;
  }

  const jit::Kernel& moving() {
    std::lock_guard lock(mutex);
    if (move == nullptr) move = &jit::KernelLibrary::of(device).get(move_stub(), "move");
    return *move;
  }

  const Reduce& reducing(RuleKind rule) {
    std::lock_guard lock(mutex);
    Reduce& reduce = reduces[static_cast<int>(rule)];
    if (reduce.two_shot == nullptr) {
      const std::string stub = reduce_stub(rule, size, rank);
      reduce.one_shot = &jit::KernelLibrary::of(device).get(stub, "one_shot");
      reduce.add = &jit::KernelLibrary::of(device).get(stub, "add");
      reduce.two_shot = &jit::KernelLibrary::of(device).get(stub, "two_shot");
    }
    return reduce;
  }

  device::GroupStatus* device_status() const { return &static_cast<Status*>(status.device())->group; }

  void begin(const Operation& operation) { watch.check(operation.context); }

  device::Rings rings(const Operation& operation, const RingPlace& place) const {
    device::Rings rings{};
    for (int r = 0; r < size; ++r) rings.arena[r] = memory[r].data();
    rings.slots_at = place.slots, rings.credits_at = place.credits, rings.state_at = place.state;
    rings.status = device_status();
    rings.limit_ns = nanoseconds_of(operation.context);
    rings.lanes = place.lanes;
    rings.rank = rank, rings.ranks = size;
    return rings;
  }

  static CUstream stream_of(const Operation& operation) { return static_cast<CUstream>(operation.stream); }

  // Blocks of few warps while there are SMs for all of them: a lane's loads then have more of an SM to themselves.
  template <class Params>
  static void launch_lanes(const jit::Kernel& kernel, uint32_t lanes, const Operation& operation,
                           const Params& params) {
    const unsigned warps = lanes <= 256 ? 4 : 8;
    const CurrentContext context(kernel.device);
    jit::launch(kernel, {(std::max(lanes, 1u) + warps - 1) / warps}, {warps * 32}, 0, stream_of(operation), params);
  }

  void launch_move(const Operation& operation, const RingPlace& place, device::MoveParams& params) {
    params.rings = rings(operation, place);
    params.most_lanes = place.lanes;
    uint32_t lanes = 0;
    for (int r = 0; r < size; ++r) {
      lanes = std::max(lanes, device::spread_of(params.send_bytes[r], place.lanes).lanes);
      lanes = std::max(lanes, device::spread_of(params.receive_bytes[r], place.lanes).lanes);
    }
    if (lanes == 0) return;
    launch_lanes(moving(), lanes, operation, params);
  }

  // All ranks' multipliers, on the device.
  const double* gather_factors(const Operation& operation) {
    const CUdeviceptr own = reinterpret_cast<CUdeviceptr>(memory[rank].data() + layout.scratch);
    uint32_t words[2];
    std::memcpy(words, &operation.factor, sizeof words);
    const CurrentContext context(device);
    for (int i = 0; i < 2; ++i)
      ark::check(driver().memset_d32_async(own + 4 * i, words[i], 1, stream_of(operation)), "cuMemsetD32Async");
    device::MoveParams params{};
    params.same = 1;
    for (int r = 0; r < size; ++r) {
      params.send[r] = reinterpret_cast<const void*>(own);
      params.receive[r] = reinterpret_cast<void*>(own + 16 * (r + 1));
      params.send_bytes[r] = params.receive_bytes[r] = sizeof(double);
    }
    launch_move(operation, layout.collectives, params);
    return reinterpret_cast<const double*>(own + 16);
  }

  void launch_two_shot(const Operation& operation, device::TwoShotParams& params) {
    params.rings = rings(operation, layout.collectives);
    params.most_lanes = layout.collectives.lanes;
    params.average = operation.descriptor.op == ReduceOp::avg;
    params.dtype = static_cast<device::DType>(operation.descriptor.dtype);
    params.op = static_cast<device::ReduceOp>(operation.descriptor.op);
    if (operation.descriptor.op == ReduceOp::premul_sum) params.factors = gather_factors(operation);
    uint32_t lanes = 0;
    for (int r = 0; r < size; ++r) lanes = std::max(lanes, device::spread_of(params.bytes[r], params.most_lanes).lanes);
    const RuleKind rule = rule_of(operation.descriptor.dtype, operation.descriptor.op);
    launch_lanes(*reducing(rule).two_shot, lanes, operation, params);
  }

  // Equal parts of whole units; the last ones may be short or empty.
  void reduce_in_parts(const Operation& operation, const void* in, void* out, uint64_t bytes, uint32_t receivers) {
    device::TwoShotParams params{};
    const uint64_t units = (bytes + 15) / 16, part = (units + size - 1) / size * 16;
    for (int r = 0; r < size; ++r) {
      const uint64_t from = std::min<uint64_t>(r * part, bytes);
      params.in[r] = static_cast<const char*>(in) + from;
      params.out[r] = out == nullptr ? nullptr : static_cast<char*>(out) + from;
      params.bytes[r] = std::min(part, bytes - from);
    }
    params.receivers = receivers;
    launch_two_shot(operation, params);
  }

  void launch_one_shot(const Operation& operation, const void* in, void* out, uint64_t bytes) {
    device::OneShotParams params{};
    params.in = in, params.out = out, params.bytes = bytes;
    for (int r = 0; r < size; ++r) params.slots[r] = memory[r].data() + layout.one_shot;
    params.capacity = layout.one_shot_capacity;
    params.control = reinterpret_cast<device::GroupControl*>(memory[rank].data() + layout.control);
    params.status = device_status();
    params.limit_ns = nanoseconds_of(operation.context);
    params.average = operation.descriptor.op == ReduceOp::avg;
    params.dtype = static_cast<device::DType>(operation.descriptor.dtype);
    params.op = static_cast<device::ReduceOp>(operation.descriptor.op);
    const uint64_t units = (bytes + 15) / 16;
    const unsigned threads = units <= 64 * 128 ? 128 : 256;
    const unsigned blocks = static_cast<unsigned>(std::min<uint64_t>((units + threads - 1) / threads, 64));
    const RuleKind rule = rule_of(operation.descriptor.dtype, operation.descriptor.op);
    const jit::Kernel& kernel = *reducing(rule).one_shot;
    const CurrentContext context(device);
    jit::launch(kernel, {blocks}, {threads}, 0, stream_of(operation), params);
  }
};

std::unique_ptr<CudaCommunicator> CudaCommunicator::create(int rank, int size, std::shared_ptr<KeyValueStore> store,
                                                           GroupHealth& health, const Options& options,
                                                           std::string& why) {
  if (size > device::kMaxRanks) {
    why = "a group of " + std::to_string(size) + " ranks on one node; kernels are made for up to " +
          std::to_string(device::kMaxRanks);
    return nullptr;
  }
  jit::KernelLibrary::of(options.device);  // a device that is too old, or no compiler: said before anything is shared
  SymmetricMemory::Options sharing;
  sharing.rank = rank;
  sharing.size = size;
  sharing.device = options.device;
  sharing.bytes = ArenaLayout(size).total;
  sharing.timeout = options.timeout;
  sharing.name = "arena";
  sharing.check = ends_with(health, options.timeout);
  std::vector<DeviceMemory> memory = SymmetricMemory::create(*store, sharing, why);
  if (memory.empty()) return nullptr;
  auto impl = std::make_unique<Impl>(rank, size, health, std::move(store), std::move(memory), options);
  return std::unique_ptr<CudaCommunicator>(new CudaCommunicator(rank, size, std::move(impl)));
}

CudaCommunicator::CudaCommunicator(int rank, int size, std::unique_ptr<Impl> impl)
    : Communicator(rank, size), impl_(std::move(impl)) {}
CudaCommunicator::~CudaCommunicator() = default;

int CudaCommunicator::device() const {
  return impl_->device;
}

void CudaCommunicator::all_reduce(const Operation& operation, const void* in, void* out, size_t count) {
  impl_->begin(operation);
  const uint64_t bytes = count * size_of(operation.descriptor.dtype);
  if (bytes == 0) return;
  if (size_ > 1 && bytes <= most_one_shot_bytes(size_) && operation.descriptor.op != ReduceOp::premul_sum)
    return impl_->launch_one_shot(operation, in, out, bytes);
  if (size_ > 1 && bytes >= kLeastBucketBytes && operation.descriptor.op != ReduceOp::premul_sum &&
      impl_->reduce_bucket(operation, in, out, bytes))
    return;
  impl_->reduce_in_parts(operation, in, out, bytes, ~uint32_t{0});
}

void CudaCommunicator::reduce(const Operation& operation, const void* in, void* out, size_t count) {
  impl_->begin(operation);
  const uint64_t bytes = count * size_of(operation.descriptor.dtype);
  if (bytes == 0) return;
  impl_->reduce_in_parts(operation, in, rank_ == operation.descriptor.root ? out : nullptr, bytes,
                         uint32_t{1} << operation.descriptor.root);
}

void CudaCommunicator::reduce_scatter(const Operation& operation, const void* const* ins, void* out, size_t count) {
  impl_->begin(operation);
  if (count == 0) return;
  device::TwoShotParams params{};
  for (int r = 0; r < size_; ++r) {
    params.in[r] = ins[r];
    params.bytes[r] = count * size_of(operation.descriptor.dtype);
  }
  params.out[rank_] = out;
  impl_->launch_two_shot(operation, params);
}

void CudaCommunicator::all_gather(const Operation& operation, const void* in, void* const* outs, size_t bytes) {
  impl_->begin(operation);
  device::MoveParams params{};
  params.same = 1;
  for (int r = 0; r < size_; ++r) {
    params.send[r] = in;
    params.receive[r] = outs[r];
    params.send_bytes[r] = params.receive_bytes[r] = bytes;
  }
  impl_->launch_move(operation, impl_->layout.collectives, params);
}

void CudaCommunicator::broadcast(const Operation& operation, void* data, size_t bytes) {
  impl_->begin(operation);
  const int root = operation.descriptor.root;
  device::MoveParams params{};
  params.same = 1;
  for (int r = 0; r < size_ && rank_ == root; ++r) {
    if (r == root) continue;
    params.send[r] = data;
    params.send_bytes[r] = bytes;
  }
  if (rank_ != root) {
    params.receive[root] = data;
    params.receive_bytes[root] = bytes;
  }
  impl_->launch_move(operation, impl_->layout.collectives, params);
}

void CudaCommunicator::gather(const Operation& operation, const void* in, void* const* outs, size_t bytes) {
  impl_->begin(operation);
  const int root = operation.descriptor.root;
  device::MoveParams params{};
  params.send[root] = in;
  params.send_bytes[root] = bytes;
  for (int r = 0; r < size_ && rank_ == root; ++r) {
    params.receive[r] = outs[r];
    params.receive_bytes[r] = bytes;
  }
  impl_->launch_move(operation, impl_->layout.collectives, params);
}

void CudaCommunicator::scatter(const Operation& operation, const void* const* ins, void* out, size_t bytes) {
  impl_->begin(operation);
  const int root = operation.descriptor.root;
  device::MoveParams params{};
  params.receive[root] = out;
  params.receive_bytes[root] = bytes;
  for (int r = 0; r < size_ && rank_ == root; ++r) {
    params.send[r] = ins[r];
    params.send_bytes[r] = bytes;
  }
  impl_->launch_move(operation, impl_->layout.collectives, params);
}

void CudaCommunicator::all_to_all(const Operation& operation, const Bytes* ins, const MutableBytes* outs) {
  impl_->begin(operation);
  device::MoveParams params{};
  for (int r = 0; r < size_; ++r) {
    params.send[r] = ins[r].data;
    params.send_bytes[r] = ins[r].size;
    params.receive[r] = outs[r].data;
    params.receive_bytes[r] = outs[r].size;
  }
  impl_->launch_move(operation, impl_->layout.collectives, params);
}

void CudaCommunicator::barrier(const Operation& operation) {
  impl_->begin(operation);
  char* const scratch = impl_->memory[rank_].data() + impl_->layout.scratch;
  device::MoveParams params{};
  params.same = 1;
  for (int r = 0; r < size_; ++r) {
    params.send[r] = scratch;
    params.receive[r] = scratch + 16 * (r + 1);
    params.send_bytes[r] = params.receive_bytes[r] = 16;
  }
  impl_->launch_move(operation, impl_->layout.collectives, params);
}

void CudaCommunicator::send(const Operation& operation, const void* data, size_t bytes, int peer) {
  impl_->begin(operation);
  device::MoveParams params{};
  params.send[peer] = data;
  params.send_bytes[peer] = bytes;
  impl_->launch_move(operation, impl_->layout.transfers, params);
}

void CudaCommunicator::recv(const Operation& operation, void* data, size_t bytes, int peer) {
  impl_->begin(operation);
  device::MoveParams params{};
  params.receive[peer] = data;
  params.receive_bytes[peer] = bytes;
  impl_->launch_move(operation, impl_->layout.transfers, params);
}

void CudaCommunicator::check(const OperationContext& context) {
  impl_->watch.check(context);
}

void CudaCommunicator::abort() {
  impl_->watch.abort();
}

}  // namespace ark
