// Parameters, grids and streams. See the header.
#include "collectives/cuda/launcher.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <type_traits>

#include "shm/symmetric_memory.hpp"

namespace ark {

namespace {

constexpr uint32_t kAllRanks = ~uint32_t{0};  // of TwoShotParams::receivers

uint64_t nanoseconds_of(const OperationContext& context) {
  if (context.deadline == Clock::time_point::max()) return ~uint64_t{0};
  return std::max<int64_t>(context.timeout.count(), 1) * 1'000'000;
}

// Blocks of few lanes while there are SMs for all of them: a lane's loads then have more of an SM to themselves.
template <class Params>
void launch_lanes(const jit::Kernel& kernel, uint32_t lanes, int roles, const Operation& operation,
                  const Params& params) {
  const unsigned each = std::min<unsigned>((lanes + 127) / 128, device::ring_lanes(params.rings.ranks));
  const CurrentContext context(kernel.device);
  jit::launch(kernel, {(lanes + each - 1) / each}, {each * roles * 32}, 0, stream_of(operation), params,
              jit::LaunchMode::overlapped);
}

// What of a message of `bytes` goes in the launch that begins at `at`, and where that is.
uint64_t slice(uint64_t bytes, uint64_t at, uint64_t most = device::kMostMessageBytes) {
  return at < bytes ? std::min(bytes - at, most) : 0;
}
template <class Pointer>
Pointer slice(Pointer from, uint64_t at) {
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const char, char>;
  return from == nullptr ? from : static_cast<Byte*>(from) + at;
}

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

CudaLauncher::CudaLauncher(int rank, int size, GroupHealth& health, std::shared_ptr<KeyValueStore> store,
                           std::vector<DeviceMemory> memory, const Options& options)
    : rank_(rank),
      size_(size),
      device_(options.device),
      health_(health),
      store_(std::move(store)),
      timeout_(options.timeout),
      layout_(size, ring_blocks_of(*options.dispatch), options.device_each),
      memory_(std::move(memory)),
      status_(std::make_unique<PinnedMemory>(options.device, sizeof(Status))),
      watch_(health, &host_status()->group, options.log, options.note),
      device_each_(options.device_each),
      on_host_(options.on_host),
      chunks_from_(options.dispatch->chunks_from),
      landings_from_(options.dispatch->landings_from),
      bulk_from_(options.dispatch->bulk_from),
      in_line_to_(options.dispatch->in_line_to),
      part_bytes_(options.dispatch->part_bytes),
      buffer_bytes_(options.dispatch->buffer_bytes) {
  shared_bytes_ = memory_[rank].size();
}

bool CudaLauncher::settle() {
  // Kernels of this group may still run; they are bounded, and the watch ends those that wait for a lost peer, and
  // waits of copy engines: whatever lock the driver holds meanwhile, as the watch does not call it.
  try {
    const RelaxedCapture relaxed;
    const CurrentContext context(device_);
    return driver().ctx_synchronize() == CUDA_SUCCESS;
  } catch (const Error&) {  // at exit the driver may be gone already
    return false;
  }
}

CudaLauncher::~CudaLauncher() {
  const bool over = settle();
  watch_.forget_engine();
  if (over) return;
  // A capture is under way, or the context is gone: memory that may be in use is not taken away.
  new std::vector<DeviceMemory>(std::move(memory_));
  new std::vector<std::shared_ptr<void>>(windows_.clear());
  (void)engine_.release();
  (void)status_.release();  // which kernels and streams write
}

const jit::Kernel& CudaLauncher::moving() {
  std::lock_guard lock(mutex_);
  if (move_ == nullptr) move_ = &jit::KernelLibrary::of(device_).get(move_stub(), "move");
  return *move_;
}

const jit::Kernel& CudaLauncher::relaying() {
  std::lock_guard lock(mutex_);
  if (relay_ == nullptr) relay_ = &jit::KernelLibrary::of(device_).get(relay_stub(), "relay");
  return *relay_;
}

const CudaLauncher::Reduce& CudaLauncher::reducing(const Operation& operation) {
  const RuleKind rule = rule_of(operation.descriptor.dtype, operation.descriptor.op);
  std::lock_guard lock(mutex_);
  Reduce& reduce = reduces_[static_cast<int>(rule)];
  if (reduce.add == nullptr) {
    const std::string stub = reduce_stub(rule, size_, rank_);
    jit::KernelLibrary& library = jit::KernelLibrary::of(device_);
    reduce.one_shot = &library.get(stub, "one_shot");
    reduce.add = &library.get(stub, "add");
  }
  return reduce;
}

const jit::Kernel& CudaLauncher::adding_by_parts(const Operation& operation, bool chunked) {
  const RuleKind rule = rule_of(operation.descriptor.dtype, operation.descriptor.op);
  std::lock_guard lock(mutex_);
  const jit::Kernel*& kernel = reduces_[static_cast<int>(rule)].two_shot[chunked];
  if (kernel == nullptr)
    kernel = &jit::KernelLibrary::of(device_).get(two_shot_stub(rule, size_, rank_, chunked), "two_shot");
  return *kernel;
}

const jit::Kernel& CudaLauncher::adding_in_bulk(const Operation& operation) {
  const RuleKind rule = rule_of(operation.descriptor.dtype, operation.descriptor.op);
  std::lock_guard lock(mutex_);
  const jit::Kernel*& kernel = reduces_[static_cast<int>(rule)].bulk;
  if (kernel == nullptr) kernel = &jit::KernelLibrary::of(device_).get(bulk_stub(rule, size_, rank_), "bulk_two_shot");
  return *kernel;
}

device::Rings CudaLauncher::rings(const Operation& operation, const RingSet& set) const {
  device::Rings rings{};
  for (int r = 0; r < size_; ++r) rings.arena[r] = memory_[r].data();
  rings.lines = set.lines, rings.chunks = set.chunks, rings.bulk = set.bulk;
  rings.landing_words = set.landings;
  rings.landings_from = ~uint64_t{0};
  rings.chunks_from = chunks_from_;
  rings.status = &device_status()->group;
  rings.limit_ns = nanoseconds_of(operation.context);
  rings.rank = rank_, rings.ranks = size_;
  return rings;
}

// Where peers shall store what is for this rank, if that is registered memory. All ranks have as many windows, because
// registering is collective; but sends and recvs are not in order with it.
void CudaLauncher::find_landings(void* const* receive, const uint64_t* bytes, device::Rings& rings) const {
  if (windows_.size() == 0) return;
  rings.landings_from = landings_from_;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || bytes[r] < landings_from_) continue;
    if (const auto window = windows_.find(receive[r], bytes[r])) rings.landing[r] = window->seen[r] + window->offset;
  }
}

void CudaLauncher::launch_move(const Operation& operation, const RingSet& set, device::MoveParams& params) {
  params.rings = rings(operation, set);
  if (&set == &layout_.collectives) find_landings(params.receive, params.receive_bytes, params.rings);
  uint32_t lanes = 0;
  for (int r = 0; r < size_; ++r) {
    for (const uint64_t bytes : {params.send_bytes[r], params.receive_bytes[r]}) {
      lanes = std::max(lanes, lanes_of(set, bytes, r == rank_ || bytes >= chunks_from_));
      if (bytes >= params.rings.landings_from) lanes = std::max(lanes, lanes_of(set, bytes, true));
    }
  }
  params.first_role = 0, params.roles = device::ring_roles(size_);
  if (&set == &layout_.transfers) {  // one message: more would take SMs from others that this rank waits for
    for (int r = 0; r < size_; ++r) {
      if (params.send_bytes[r] != 0) params.first_role = (r - rank_ + size_) % size_, params.roles = 1;
      if (params.receive_bytes[r] != 0) params.first_role = size_ + (rank_ + size_ - 1 - r) % size_, params.roles = 1;
    }
  }
  if (lanes != 0) launch_lanes(moving(), lanes, static_cast<int>(params.roles), operation, params);
}

void CudaLauncher::move(const Operation& operation, const RingSet& set, const device::MoveParams& whole) {
  uint64_t most = 0;
  for (int r = 0; r < size_; ++r) most = std::max({most, whole.send_bytes[r], whole.receive_bytes[r]});
  for (uint64_t at = 0; at < most; at += device::kMostMessageBytes) {
    device::MoveParams params = whole;
    for (int r = 0; r < size_; ++r) {
      params.send[r] = slice(whole.send[r], at);
      params.receive[r] = slice(whole.receive[r], at);
      params.send_bytes[r] = slice(whole.send_bytes[r], at);
      params.receive_bytes[r] = slice(whole.receive_bytes[r], at);
    }
    launch_move(operation, set, params);
  }
}

void CudaLauncher::relay(const Operation& operation, void* data, uint64_t bytes) {
  device::RelayParams params{};
  params.root = operation.descriptor.root;
  const uint64_t units = (bytes + 15) / 16, part = (units + size_ - 2) / (size_ - 1) * 16;
  const uint64_t each = std::min(part, part_bytes_);
  for (uint64_t at = 0; at < part; at += each) {
    params.rings = rings(operation, layout_.collectives);
    params.handed_on = rings(operation, layout_.results);
    params.data = static_cast<char*>(data);
    for (int r = 0, k = 0; r < size_; ++r) {
      params.at[r] = params.bytes[r] = 0;
      if (r == params.root) continue;
      const uint64_t from = std::min(k * part, bytes), to = std::min(from + part, bytes);
      params.at[r] = std::min(from + at, to);
      params.bytes[r] = std::min(each, to - params.at[r]);
      ++k;
    }
    const uint32_t lanes = lanes_of_parts(layout_.collectives, params.bytes, size_,
                                          params.bytes[params.root == 0 ? 1 : 0] >= chunks_from_);
    launch_lanes(relaying(), lanes, device::ring_roles(size_), operation, params);
  }
}

void CudaLauncher::gather_words(const Operation& operation, uint64_t bytes) {
  device::MoveParams params{};
  for (int r = 0; r < size_; ++r) {
    params.send[r] = reinterpret_cast<const void*>(own_word());
    params.receive[r] = reinterpret_cast<void*>(words() + 16 * r);
    params.send_bytes[r] = params.receive_bytes[r] = bytes;
  }
  move(operation, params);
}

void CudaLauncher::set_rings(const Operation& operation, device::TwoShotParams& params) const {
  params.rings = rings(operation, layout_.collectives);
  params.results = rings(operation, layout_.results);
  if (params.receivers == kAllRanks) find_landings(params.out, params.bytes, params.results);
}

// Its lanes keep step (BulkPace): no message is too long for one launch. Nor does the next launch begin before its end:
// it would hold as many SMs again all the while.
void CudaLauncher::launch_bulk(const Operation& operation, device::TwoShotParams& params) {
  set_rings(operation, params);
  const jit::Kernel& kernel = adding_in_bulk(operation);
  const CurrentContext context(device_);
  jit::launch(kernel, {layout_.collectives.bulk.lanes}, {device::kBulkThreads}, device::kBulkSharedBytes,
              stream_of(operation), params);
}

void CudaLauncher::launch_two_shot(const Operation& operation, device::TwoShotParams& params) {
  set_rings(operation, params);
  const uint64_t most = *std::max_element(params.bytes, params.bytes + size_);
  const bool chunked = most >= chunks_from_;
  launch_lanes(adding_by_parts(operation, chunked), lanes_of_parts(layout_.collectives, params.bytes, size_, chunked),
               device::ring_roles(size_), operation, params);
}

void CudaLauncher::two_shot(const Operation& operation, device::TwoShotParams whole) {
  describe_reduction(operation, whole);
  if (operation.descriptor.op == ReduceOp::premul_sum) {  // every rank needs every rank's factor
    uint32_t halves[2];
    std::memcpy(halves, &operation.factor, sizeof halves);
    const CurrentContext context(device_);
    for (int i = 0; i < 2; ++i)
      check(driver().memset_d32_async(own_word() + 4 * i, halves[i], 1, stream_of(operation)), "cuMemsetD32Async");
    gather_words(operation, sizeof(double));
    whole.factors = reinterpret_cast<const double*>(words());
  }
  if (std::accumulate(whole.bytes, whole.bytes + size_, uint64_t{0}) >= bulk_from_)
    return launch_bulk(operation, whole);
  const uint64_t most = *std::max_element(whole.bytes, whole.bytes + size_);
  // With one receiver ranks have unequal work and their lanes drift apart sooner (256 MB: 0.8 ms instead of 1.1).
  const uint64_t each = whole.receivers == 0           ? device::kMostMessageBytes
                        : whole.receivers == kAllRanks ? part_bytes_
                                                       : part_bytes_ / 2;
  for (uint64_t at = 0; at < most; at += each) {
    device::TwoShotParams params = whole;
    for (int r = 0; r < size_; ++r) {
      params.in[r] = slice(whole.in[r], at);
      params.out[r] = slice(whole.out[r], at);
      params.bytes[r] = slice(whole.bytes[r], at, each);
    }
    launch_two_shot(operation, params);
  }
}

device::TwoShotParams CudaLauncher::parts_of(const void* in, void* out, uint64_t bytes, uint32_t receivers) const {
  device::TwoShotParams params{};
  const uint64_t units = (bytes + 15) / 16, part = (units + size_ - 1) / size_ * 16;
  for (int r = 0; r < size_; ++r) {
    const uint64_t from = std::min<uint64_t>(r * part, bytes);
    params.in[r] = static_cast<const char*>(in) + from;
    params.out[r] = out == nullptr ? nullptr : static_cast<char*>(out) + from;
    params.bytes[r] = std::min(part, bytes - from);
  }
  params.receivers = receivers;
  return params;
}

void CudaLauncher::one_shot(const Operation& operation, const void* in, void* out, uint64_t bytes) {
  device::OneShotParams params{};
  params.in = in, params.out = out, params.bytes = bytes;
  for (int r = 0; r < size_; ++r) params.slots[r] = memory_[r].data() + layout_.one_shot;
  params.capacity = layout_.one_shot_capacity;
  params.control = reinterpret_cast<device::GroupControl*>(memory_[rank_].data() + layout_.control);
  params.status = &device_status()->group;
  params.limit_ns = nanoseconds_of(operation.context);
  describe_reduction(operation, params);
  const uint64_t units = (bytes + 15) / 16;
  const unsigned threads = units <= 64 * 128 ? 128 : 256;
  const uint64_t most_blocks = device_each_ ? 64 : blocks_of_a_sharer(size_);
  const unsigned blocks = static_cast<unsigned>(std::min<uint64_t>((units + threads - 1) / threads, most_blocks));
  const jit::Kernel& kernel = *reducing(operation).one_shot;
  const CurrentContext context(device_);
  jit::launch(kernel, {blocks}, {threads}, 0, stream_of(operation), params, jit::LaunchMode::overlapped);
}

}  // namespace ark
