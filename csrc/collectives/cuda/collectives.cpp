// Chooses the algorithm of an operation and launches its kernels: parameters, grid and stream from buffers and sizes.
//
// The caller serialises launches of a group in issue order. To add an algorithm, add a member to Launch, a line to the
// operation that uses it, its kernel to stubs.cpp and its size to cuda_dispatch.hpp.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <type_traits>

#include "collectives/cuda/cuda_communicator.hpp"
#include "cuda/bulk_move.cuh"
#include "cuda/bulk_two_shot.cuh"
#include "cuda/relay.cuh"
#include "cuda/rendezvous.cuh"

namespace ark {

namespace {

constexpr uint32_t kAllRanks = ~uint32_t{0};  // value of TwoShotParams::receivers

uint64_t nanoseconds_of(const OperationContext& context) {
  if (context.deadline == Clock::time_point::max()) return ~uint64_t{0};
  return std::max<int64_t>(context.timeout.count(), 1) * 1'000'000;
}

// Of a launch, which costs some 10 us. Lanes drift apart over a long message, and touch more pages at once than address
// translation caches, which is much slower (docs/measurements.md). Sends have no landings, so that their rings keep
// lanes closer together.
constexpr uint64_t kMostMessageBytes = uint64_t{64} << 20;
constexpr uint64_t kMostSentBytes = uint64_t{128} << 20;

// The bytes, and their address, of a message's slice in the launch that begins at offset `at`.
uint64_t slice(uint64_t bytes, uint64_t at, uint64_t most) {
  return at < bytes ? std::min(bytes - at, most) : 0;
}
template <class Pointer>
Pointer slice(Pointer from, uint64_t at) {
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const char, char>;
  return from == nullptr ? from : static_cast<Byte*>(from) + at;
}

// Whether the rings of captured steps carry an operation, which they do from a size on.
bool in_step(const Operation& operation, uint64_t bytes, uint64_t from) {
  return operation.captured_step && bytes >= from;
}

}  // namespace

// Which bulk rings of a set carry an operation; null: none do.
using BulkRings = device::RingTable RingSet::*;

struct CudaCommunicator::Launch {
  CudaCommunicator& group;
  const Operation& operation;
  const int rank = group.rank_, size = group.size_;
  const CudaDispatch& dispatch = group.dispatch_;
  const ArenaLayout& layout = group.layout_;

  const jit::Kernel& kernel(GroupKernel kind) const {
    return group.kernel(kind, rule_of(operation.descriptor.dtype, operation.descriptor.op));
  }

  // Uses few lanes per block while there are SMs for all blocks, so that a lane's loads get more of an SM.
  template <class Params>
  void by_lanes(const jit::Kernel& kernel, uint32_t lanes, uint32_t most, int roles, const Params& params) const {
    const unsigned each = std::min<unsigned>((lanes + most - 1) / most, device::ring_lanes(params.rings.ranks));
    const CurrentContext context(kernel.device);
    jit::launch(kernel, {(lanes + each - 1) / each}, {each * roles * 32}, 0, stream_of(operation), params,
                jit::LaunchMode::overlapped);
  }

  // Blocks of a launch. Fewer than all saturate a link, and a block on each SM keeps concurrent products waiting;
  // through host memory, where they would wait longer, always.
  uint32_t blocks_of(uint64_t in_chunks, bool chunked) const {
    if (group.on_host()) return host_blocks_of(dispatch);
    return static_cast<uint32_t>(chunked ? in_chunks : CudaDispatch::kMostBlocks);
  }
  uint32_t move_blocks(const RingSet& set, bool chunked) const {
    return blocks_of(&set == &layout.transfers ? CudaDispatch::kMostBlocks : dispatch.move_blocks, chunked);
  }
  uint32_t chunk_lanes(const RingSet& set, uint32_t blocks) const {
    return std::min<uint32_t>(set.chunks.lanes, blocks * device::ring_lanes(size));
  }

  // `from`, `in_steps`: sizes from which bulk rings carry such operations, always and in captured steps.
  BulkRings bulk_rings(uint64_t bytes, uint64_t from, uint64_t in_steps) const {
    if (in_step(operation, bytes, in_steps)) return &RingSet::step_bulk;
    return bytes >= from ? &RingSet::bulk : nullptr;
  }

  // blocks: of a launch in chunks. Both ends of a message must have the same number.
  device::Rings rings(const RingSet& set, uint32_t blocks, BulkRings bulk = nullptr) const {
    device::Rings rings{};
    for (int r = 0; r < size; ++r) rings.arena[r] = group.arena_.parts[r].data();
    rings.lines = set.lines, rings.chunks = set.chunks, rings.bulk = bulk != nullptr ? set.*bulk : set.bulk;
    rings.landing_words = set.landings;
    // Kernels add offsets to the arena's address, but this rank's private data may be elsewhere.
    const uint64_t apart = reinterpret_cast<uint64_t>(group.own_base()) - reinterpret_cast<uint64_t>(rings.arena[rank]);
    for (uint64_t* const state : {&rings.lines.state, &rings.chunks.state, &rings.bulk.state}) *state += apart;
    rings.landing_words.state += apart;
    rings.landings_from = ~uint64_t{0};
    rings.chunks_from = dispatch.chunks_from;
    rings.chunk_lanes = chunk_lanes(set, blocks);
    rings.status = &group.device_status()->group;
    rings.limit_ns = nanoseconds_of(operation.context);
    rings.rank = rank, rings.ranks = size;
    return rings;
  }

  // Tells peers where to store into registered memory of this rank. All ranks have equally many windows, because
  // registering is collective; but sends and recvs are not ordered with it.
  void find_landings(void* const* receive, const uint64_t* bytes, device::Rings& rings) const {
    if (group.windows_.size() == 0) return;
    rings.landings_from = dispatch.landings_from;
    for (int r = 0; r < size; ++r) {
      if (r == rank || bytes[r] < dispatch.landings_from) continue;
      if (const auto window = group.windows_.find(receive[r], bytes[r]))
        rings.landing[r] = window->seen[r] + window->offset;
    }
  }

  // By few blocks. The next launch must not overlap with it, because it would occupy as many SMs all the while.
  template <class Params>
  void by_bulk_lanes(const jit::Kernel& kernel, uint32_t lanes, int threads, uint32_t shared_bytes,
                     const Params& params) const {
    const CurrentContext context(group.device_);
    jit::launch(kernel, {lanes}, {static_cast<unsigned>(threads)}, shared_bytes, stream_of(operation), params);
  }

  // Both ends of every message must choose this; everything except the rings is set.
  void bulk_move(const RingSet& set, device::MoveParams& params, BulkRings bulk) const {
    const bool transfer = &set == &layout.transfers;
    params.rings = rings(set, CudaDispatch::kMostBlocks, bulk);
    if (!transfer) find_landings(params.receive, params.receive_bytes, params.rings);
    by_bulk_lanes(group.kernel(transfer ? GroupKernel::bulk_transfer : GroupKernel::bulk_move, RuleKind::any),
                  params.rings.bulk.lanes, device::kBulkMoveThreads, device::bulk_move_bytes(transfer), params);
  }

  void launch_move(const RingSet& set, device::MoveParams& params) const {
    params.rings = rings(set, move_blocks(set, true));
    const bool transfer = &set == &layout.transfers;
    if (!transfer) find_landings(params.receive, params.receive_bytes, params.rings);
    uint32_t lanes = 0;
    const uint32_t most = params.rings.chunk_lanes;
    bool chunked = true;
    for (int r = 0; r < size; ++r) {
      for (const uint64_t bytes : {params.send_bytes[r], params.receive_bytes[r]}) {
        const bool in_chunks = r == rank || bytes >= dispatch.chunks_from;
        lanes = std::max(lanes, lanes_of(set, bytes, in_chunks, most));
        if (bytes >= params.rings.landings_from) lanes = std::max(lanes, lanes_of(set, bytes, true, most));
        chunked = chunked && (in_chunks || bytes == 0);
      }
    }
    params.first_role = 0, params.roles = device::ring_roles(size);
    for (int r = 0; r < size && transfer; ++r) {
      // A launch for one message only: more roles would take SMs from work that this rank waits for.
      if (params.send_bytes[r] != 0) params.first_role = (r - rank + size) % size, params.roles = 1;
      if (params.receive_bytes[r] != 0) params.first_role = size + (rank + size - 1 - r) % size, params.roles = 1;
    }
    if (lanes != 0)
      by_lanes(group.kernel(GroupKernel::move, RuleKind::any), lanes, move_blocks(set, chunked),
               static_cast<int>(params.roles), params);
  }

  // Sends and receives messages; everything except the rings is set. Long messages take several launches. bulk: both
  // ends of every message know that it is long enough for these rings.
  void move(const RingSet& set, const device::MoveParams& whole, BulkRings bulk = nullptr) const {
    uint64_t most = 0;
    for (int r = 0; r < size; ++r) most = std::max({most, whole.send_bytes[r], whole.receive_bytes[r]});
    const bool sent = &set == &layout.transfers;
    const uint64_t each = sent ? kMostSentBytes : bulk != nullptr ? most : kMostMessageBytes;
    for (uint64_t at = 0; at < most; at += each) {
      device::MoveParams params = whole;
      for (int r = 0; r < size; ++r) {
        params.send[r] = slice(whole.send[r], at);
        params.receive[r] = slice(whole.receive[r], at);
        params.send_bytes[r] = slice(whole.send_bytes[r], at, each);
        params.receive_bytes[r] = slice(whole.receive_bytes[r], at, each);
      }
      if (bulk != nullptr)
        bulk_move(set, params, bulk);
      else
        launch_move(set, params);
    }
  }
  // A message of `bytes` to or from a peer, which both ends know.
  void transfer(const device::MoveParams& message, uint64_t bytes, int peer) const {
    // Loading a kernel waits for those that run, and a transfer's may wait for what both ranks post behind it.
    for (const GroupKernel kind : {GroupKernel::move, GroupKernel::rendezvous}) group.kernel(kind, RuleKind::any);
    if (layout.transfers.bulk.lanes != 0 || layout.transfers.step_bulk.lanes != 0)
      group.kernel(GroupKernel::bulk_transfer, RuleKind::any);
    if (peer != rank && bytes != 0 && bytes >= dispatch.rendezvous_from) {
      device::RendezvousParams params{};
      params.rings = rings(layout.transfers, 1);
      params.peer = peer;
      params.sends = message.send_bytes[peer] != 0 ? 1 : 0;
      const jit::Kernel& meeting = group.kernel(GroupKernel::rendezvous, RuleKind::any);
      const CurrentContext context(meeting.device);
      jit::launch(meeting, {1}, {32}, 0, stream_of(operation), params, jit::LaunchMode::overlapped);
    }
    move(layout.transfers, message, bulk_rings(bytes, dispatch.bulk_send_from, dispatch.step_send_from));
  }
  // Messages of `bytes` each, which all ranks know.
  void move_equal(const device::MoveParams& whole, uint64_t bytes) const {
    move(layout.collectives, whole, bulk_rings(bytes, dispatch.bulk_move_from, dispatch.step_move_from));
  }

  // Broadcasts by letting the receivers pass parts to each other, for more than two ranks.
  void relay(void* data, uint64_t bytes) const {
    device::RelayParams params{};
    params.root = operation.descriptor.root;
    const uint64_t units = (bytes + 15) / 16, part = (units + size - 2) / (size - 1) * 16;
    const uint64_t each = std::min(part, dispatch.part_bytes);
    for (uint64_t at = 0; at < part; at += each) {
      params.rings = rings(layout.collectives, move_blocks(layout.collectives, true));
      params.handed_on = rings(layout.results, move_blocks(layout.results, true));
      params.data = static_cast<char*>(data);
      for (int r = 0, k = 0; r < size; ++r) {
        params.at[r] = params.bytes[r] = 0;
        if (r == params.root) continue;
        const uint64_t from = std::min(k * part, bytes), to = std::min(from + part, bytes);
        params.at[r] = std::min(from + at, to);
        params.bytes[r] = std::min(each, to - params.at[r]);
        ++k;
      }
      const bool chunked = params.bytes[params.root == 0 ? 1 : 0] >= dispatch.chunks_from;
      by_lanes(group.kernel(GroupKernel::relay, RuleKind::any),
               lanes_of_parts(layout.collectives, params.bytes, size, chunked, params.rings.chunk_lanes),
               move_blocks(layout.collectives, chunked), device::ring_roles(size), params);
    }
  }

  // Gathers every rank's word of `bytes` (at most 16) from own_word() into words().
  CUdeviceptr own_word() const { return reinterpret_cast<CUdeviceptr>(group.own_base() + layout.scratch); }
  CUdeviceptr words() const { return own_word() + 16; }
  void gather_words(uint64_t bytes) const {
    device::MoveParams params{};
    for (int r = 0; r < size; ++r) {
      params.send[r] = reinterpret_cast<const void*>(own_word());
      params.receive[r] = reinterpret_cast<void*>(words() + 16 * r);
      params.send_bytes[r] = params.receive_bytes[r] = bytes;
    }
    move(layout.collectives, params);
  }

  // Equal parts of whole units, one per rank; the last ones may be short or empty. Bit r of `receivers`: rank r gets
  // the result, in `out`.
  device::TwoShotParams parts_of(const void* in, void* out, uint64_t bytes, uint32_t receivers) const {
    device::TwoShotParams params{};
    const uint64_t units = (bytes + 15) / 16, part = (units + size - 1) / size * 16;
    for (int r = 0; r < size; ++r) {
      const uint64_t from = std::min<uint64_t>(r * part, bytes);
      params.in[r] = static_cast<const char*>(in) + from;
      params.out[r] = out == nullptr ? nullptr : static_cast<char*>(out) + from;
      params.bytes[r] = std::min(part, bytes - from);
    }
    params.receivers = receivers;
    return params;
  }

  void launch_two_shot(device::TwoShotParams& params, BulkRings bulk = nullptr) const {
    const bool chunked = *std::max_element(params.bytes, params.bytes + size) >= dispatch.chunks_from;
    const uint32_t blocks = blocks_of(dispatch.sum_blocks, chunked);
    params.rings = rings(layout.collectives, blocks, bulk);
    params.results = rings(layout.results, blocks, bulk);
    if (params.receivers == kAllRanks) find_landings(params.out, params.bytes, params.results);
    if (bulk != nullptr) {  // its lanes stay in step (BulkPace), so one launch handles any length
      const bool fewer = bulk == &RingSet::step_bulk && params.receivers == kAllRanks;
      const auto lanes = static_cast<uint32_t>(fewer ? dispatch.step_all_reduce_blocks : params.rings.bulk.lanes);
      return by_bulk_lanes(kernel(GroupKernel::bulk), lanes, device::kBulkThreads, device::kBulkSharedBytes, params);
    }
    by_lanes(kernel(chunked ? GroupKernel::chunks : GroupKernel::lines),
             lanes_of_parts(layout.collectives, params.bytes, size, chunked, params.rings.chunk_lanes), blocks,
             device::ring_roles(size), params);
  }

  // in, out, bytes and receivers are set.
  void two_shot(device::TwoShotParams whole) const {
    describe_reduction(operation, whole);
    if (operation.descriptor.op == ReduceOp::premul_sum) {  // every rank needs every rank's factor
      uint32_t halves[2];
      std::memcpy(halves, &operation.factor, sizeof halves);
      const CurrentContext context(group.device_);
      for (int i = 0; i < 2; ++i)
        ark::check(driver().memset_d32_async(own_word() + 4 * i, halves[i], 1, stream_of(operation)),
                   "cuMemsetD32Async");
      gather_words(sizeof(double));
      whole.factors = reinterpret_cast<const double*>(words());
    }
    const uint64_t in_steps = whole.receivers == kAllRanks ? dispatch.step_all_reduce_from
                              : whole.receivers == 0       ? dispatch.step_reduce_scatter_from
                                                           : CudaDispatch::kNever;
    const uint64_t all = std::accumulate(whole.bytes, whole.bytes + size, uint64_t{0});
    if (const BulkRings bulk = bulk_rings(all, dispatch.bulk_from, in_steps); bulk != nullptr)
      return launch_two_shot(whole, bulk);
    const uint64_t most = *std::max_element(whole.bytes, whole.bytes + size);
    // With one receiver the ranks' work is unequal and their lanes drift apart sooner, so take smaller slices.
    const uint64_t each = whole.receivers == 0           ? kMostMessageBytes
                          : whole.receivers == kAllRanks ? dispatch.part_bytes
                                                         : dispatch.part_bytes / 2;
    for (uint64_t at = 0; at < most; at += each) {
      device::TwoShotParams params = whole;
      for (int r = 0; r < size; ++r) {
        params.in[r] = slice(whole.in[r], at);
        params.out[r] = slice(whole.out[r], at);
        params.bytes[r] = slice(whole.bytes[r], at, each);
      }
      launch_two_shot(params);
    }
  }

  void one_shot(const void* in, void* out, uint64_t bytes) const {
    device::OneShotParams params{};
    params.in = in, params.out = out, params.bytes = bytes;
    for (int r = 0; r < size; ++r) params.slots[r] = group.arena_.parts[r].data() + layout.one_shot;
    params.capacity = layout.one_shot_capacity;
    params.control = reinterpret_cast<device::GroupControl*>(group.own_base() + layout.control);
    params.status = &group.device_status()->group;
    params.limit_ns = nanoseconds_of(operation.context);
    describe_reduction(operation, params);
    const uint64_t units = (bytes + 15) / 16;
    const unsigned threads = units <= 64 * 128 ? 128 : 256;
    const uint64_t most_blocks = group.device_each_ ? 64 : blocks_of_a_sharer(size);
    const unsigned blocks = static_cast<unsigned>(std::min<uint64_t>((units + threads - 1) / threads, most_blocks));
    const jit::Kernel& adding = kernel(GroupKernel::one_shot);
    const CurrentContext context(group.device_);
    jit::launch(adding, {blocks}, {threads}, 0, stream_of(operation), params, jit::LaunchMode::overlapped);
  }
};

void CudaCommunicator::all_reduce(const Operation& operation, const void* in, void* out, size_t count) {
  watch_.check(operation.context);
  const uint64_t bytes = count * size_of(operation.descriptor.dtype);
  if (bytes == 0) return;
  const bool factors = operation.descriptor.op == ReduceOp::premul_sum;  // only two_shot supports factors
  if (size_ > 1 && bytes <= std::min(dispatch_.one_shot_to, layout_.most_one_shot) && !factors)
    return Launch{*this, operation}.one_shot(in, out, bytes);
  if (size_ > 1 && !factors && bytes >= std::min(dispatch_.copy_engine_from, dispatch_.step_copy_engine_from)) {
    const bool by_engines =
        operation.captured_step ? bytes < dispatch_.step_all_reduce_from : bytes >= dispatch_.copy_engine_from;
    copy_engine(operation);  // for a captured step, too, during which no memory can be shared
    if (by_engines && engine_all_reduce(operation, in, out, bytes)) return;
  }
  const Launch launch{*this, operation};
  launch.two_shot(launch.parts_of(in, out, bytes, kAllRanks));
}

void CudaCommunicator::reduce(const Operation& operation, const void* in, void* out, size_t count) {
  watch_.check(operation.context);
  const uint64_t bytes = count * size_of(operation.descriptor.dtype);
  if (bytes == 0) return;
  const Launch launch{*this, operation};
  const int root = operation.descriptor.root;
  launch.two_shot(launch.parts_of(in, rank_ == root ? out : nullptr, bytes, uint32_t{1} << root));
}

void CudaCommunicator::reduce_scatter(const Operation& operation, const void* const* ins, void* out, size_t count) {
  watch_.check(operation.context);
  if (count == 0) return;
  const uint64_t bytes = count * size_of(operation.descriptor.dtype);
  const bool by_engines = bytes >= dispatch_.reduce_scatter_engine_from &&
                          !in_step(operation, bytes * size_, dispatch_.step_reduce_scatter_from);
  if (size_ > 1 && by_engines && operation.descriptor.op != ReduceOp::premul_sum &&
      engine_reduce_scatter(operation, ins, out, bytes))
    return;
  device::TwoShotParams parts{};
  for (int r = 0; r < size_; ++r) {
    parts.in[r] = ins[r];
    parts.bytes[r] = bytes;
  }
  parts.out[rank_] = out;
  Launch{*this, operation}.two_shot(parts);
}

void CudaCommunicator::all_gather(const Operation& operation, const void* in, void* const* outs, size_t bytes) {
  watch_.check(operation.context);
  const bool by_engines =
      bytes >= dispatch_.all_gather_engine_from && !in_step(operation, bytes, dispatch_.step_move_from);
  if (size_ > 1 && by_engines && bytes != 0 && engine_all_gather(operation, in, outs, bytes)) return;
  device::MoveParams params{};
  for (int r = 0; r < size_; ++r) {
    params.send[r] = in;
    params.receive[r] = outs[r];
    params.send_bytes[r] = params.receive_bytes[r] = bytes;
  }
  Launch{*this, operation}.move_equal(params, bytes);
}

void CudaCommunicator::broadcast(const Operation& operation, void* data, size_t bytes) {
  watch_.check(operation.context);
  const bool by_engines =
      bytes >= dispatch_.broadcast_engine_from && !in_step(operation, bytes, dispatch_.step_move_from);
  if (size_ > 1 && by_engines && bytes != 0 && engine_broadcast(operation, data, bytes)) return;
  if (size_ > 2 && bytes >= dispatch_.relay_from) return Launch{*this, operation}.relay(data, bytes);
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
  Launch{*this, operation}.move_equal(params, bytes);
}

void CudaCommunicator::gather(const Operation& operation, const void* in, void* const* outs, size_t bytes) {
  watch_.check(operation.context);
  const int root = operation.descriptor.root;
  device::MoveParams params{};
  params.send[root] = in;
  params.send_bytes[root] = bytes;
  for (int r = 0; r < size_ && rank_ == root; ++r) {
    params.receive[r] = outs[r];
    params.receive_bytes[r] = bytes;
  }
  Launch{*this, operation}.move_equal(params, bytes);
}

void CudaCommunicator::scatter(const Operation& operation, const void* const* ins, void* out, size_t bytes) {
  watch_.check(operation.context);
  const int root = operation.descriptor.root;
  device::MoveParams params{};
  params.receive[root] = out;
  params.receive_bytes[root] = bytes;
  for (int r = 0; r < size_ && rank_ == root; ++r) {
    params.send[r] = ins[r];
    params.send_bytes[r] = bytes;
  }
  Launch{*this, operation}.move_equal(params, bytes);
}

void CudaCommunicator::all_to_all(const Operation& operation, const Bytes* ins, const MutableBytes* outs) {
  watch_.check(operation.context);
  device::MoveParams params{};
  for (int r = 0; r < size_; ++r) {
    params.send[r] = ins[r].data;
    params.send_bytes[r] = ins[r].size;
    params.receive[r] = outs[r].data;
    params.receive_bytes[r] = outs[r].size;
  }
  if (size_ > 1) engine_all_to_all(operation, params, dispatch_.all_to_all_engine_from);
  Launch{*this, operation}.move(layout_.collectives, params);
}

void CudaCommunicator::barrier(const Operation& operation) {
  watch_.check(operation.context);
  Launch{*this, operation}.gather_words(16);
}

void CudaCommunicator::send(const Operation& operation, const void* data, size_t bytes, int peer) {
  watch_.check(operation.context);
  device::MoveParams params{};
  params.send[peer] = data;
  params.send_bytes[peer] = bytes;
  Launch{*this, operation}.transfer(params, bytes, peer);
}

void CudaCommunicator::recv(const Operation& operation, void* data, size_t bytes, int peer) {
  watch_.check(operation.context);
  device::MoveParams params{};
  params.receive[peer] = data;
  params.receive_bytes[peer] = bytes;
  Launch{*this, operation}.transfer(params, bytes, peer);
}

}  // namespace ark
