// Moves messages (move.cuh: same parameters) over bulk rings (bulk_lane.cuh): few blocks, one lane each, so that
// computation keeps its multiprocessors while a launch waits for peers. The warps of a block: one sends to every peer
// and copies this rank's own message, one tells, and one takes. Messages go to slots, or straight to the buffer that
// the peer has announced (landing.cuh). Both ends of every message must take this kernel.
//
// A transfer is a launch with one message, a send or a recv, and launches of several transfers run at once. So its
// blocks take less shared memory (two fit on a multiprocessor), and its lanes are not paced, because the pace is that
// of all of a rank's messages.
//
// No deadlock: takers wait for data only, and announce before that; so senders, which wait for addresses and credits,
// proceed.
#pragma once

#include "cuda/bulk_peers.cuh"
#include "cuda/move.cuh"

namespace ark::device {

inline constexpr int kBulkMoveThreads = 3 * 32;
// Shared memory of a block.
constexpr uint32 bulk_move_bytes(bool transfer) {
  return transfer ? 13 * kBulkChunk : kBulkSharedBytes;
}

#if defined(__CUDACC__)

template <bool kTransfer>
struct alignas(128) BulkMoveShared {
  static constexpr int kWays = kTransfer ? 1 : 2;  // stages of the sender, and of the taker
  static constexpr uint32 kMoved = kTransfer ? 12 : kBulkStages / 2;
  char stages[kWays][kMoved][kBulkChunk];
  uint64 full[kWays][kMoved];
  BulkWords words;

  // Called by one thread; a barrier of the block must follow.
  __device__ __forceinline__ void prepare() {
    for (uint32 i = 0; i < kWays * kMoved; i++) barrier_init(&full[i / kMoved][i % kMoved], 1);
    words = BulkWords{};
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_async_shared();
  }
};

template <bool kTransfer>
class BulkMove {
  using Shared = BulkMoveShared<kTransfer>;
  static_assert(sizeof(Shared) <= bulk_move_bytes(kTransfer));
  // Groups of stores that may be in flight before the sender publishes the oldest: latency times bandwidth.
  static constexpr uint32 kLag = 6;

 public:
  // Reads the counters before anyone advances them.
  __device__ __forceinline__ BulkMove(const MoveParams& params, Shared& memory)
      : p_(params),
        shared_(memory),
        ring_{params.rings, blockIdx.x},
        warp_(params.rings),
        rank_(params.rings.rank),
        ranks_(params.rings.ranks),
        thread_(BulkWarp::thread()),
        peer_(thread_ < ranks_ && thread_ != rank_) {
    if (peer_) state_ = *ring_.state(thread_);
    pace_ = *ring_.pace(blockIdx.x);
  }

  // Every warp calls one of these.
  __device__ __forceinline__ void send() {
    char* lands = nullptr;  // of this thread's peer
    if (!await_landings(
            p_.rings, rank_, ranks_, [&](int to) { return p_.send_bytes[to]; }, lands))
      return;
    const uint32 apart = __ballot_sync(~0u, lands != nullptr);
    if (warp_.leads()) shared_.words.apart = apart;
    if (thread_ == rank_) lands = static_cast<char*>(p_.receive[rank_]);
    const uint32 steps = most_steps(blockIdx.x), all = receivers();
    const uint32 each = has_one_source() ? 1 : all;  // chunks a step; one source: a chunk is loaded once for all
    BulkPace pace(ring_, shared_.words, pace_, most_steps(0));
    fence_async_global();
    const bool done = bulk_pump(
        warp_, shared_.stages[0], shared_.full[0], steps * each,
        [&](uint32 i) { return kTransfer || pace.may_begin(i / each); },
        [&](uint32 i) {
          warp_.publish<0>(shared_.words, i / each);
          return warp_.over();
        },
        [&](uint32 i, char* stage, uint64* full) {
          const int to = each == 1 ? first_receiver() : receiver_of(i % each);
          warp_.load(stage, full, static_cast<const char*>(p_.send[to]) + sent(to).at(i / each),
                     sent(to).size(i / each));
        },
        [&](uint32 i, const char* stage) {
          const uint32 step = i / each, from = each == 1 ? 0 : i % each;
#pragma unroll 1
          for (uint32 d = from; d < (each == 1 ? all : from + 1); d++) {
            if (!store(receiver_of(d), reinterpret_cast<uint64>(lands), step, stage)) return false;
          }
          if (warp_.leads()) bulk_commit();
          if (i + 1 >= kLag) warp_.publish<kLag>(shared_.words, (i + 1 - kLag) / each);
          return true;
        });
    if (!done) return;
    warp_.publish<0>(shared_.words, steps);
    if (!kTransfer) pace.close();
    if (peer_ && lands == nullptr) ring_.state(thread_)->sent = state_.sent + sent(thread_).steps();
    tell_landed(p_.rings, ranks_, apart);
  }
  __device__ __forceinline__ void tell() {
    bulk_tell(ring_, shared_.words, state_.sent, peer_ ? sent(thread_).steps() : 0, most_steps(blockIdx.x), [&] {
      if (!kTransfer) BulkPace::look(ring_, shared_.words, pace_);
    });
  }

  __device__ __forceinline__ void take() {
    const uint32 landed = announce_landings(p_.rings, rank_, ranks_, [&](int from) { return p_.receive_bytes[from]; });
    const auto share = [&](int from) { return taken(from, landed); };
    uint32 steps = 0;
#pragma unroll 1
    for (int r = 0; r < ranks_; r++) {
      if (r != rank_) steps = max(steps, share(r).steps());
    }
    constexpr int kOwn = Shared::kWays - 1;
    if (!bulk_take(warp_, ring_, shared_.stages[kOwn], shared_.full[kOwn], rank_, ranks_, state_.received, steps, share,
                   [&](int from) { return static_cast<char*>(p_.receive[from]); }))
      return;
    if (peer_ && (landed >> thread_ & 1) == 0)
      ring_.state(thread_)->received = state_.received + taken(thread_, landed).steps();
    await_landed(p_.rings, ranks_, landed);
  }

 private:
  // What this rank sends; its own message only if it is not in place.
  __device__ __forceinline__ BulkShare sent(int to) const {
    return sent(to, blockIdx.x);
  }
  __device__ __forceinline__ BulkShare sent(int to, uint32 block) const {
    const bool in_place = to == rank_ && p_.send[to] == p_.receive[to];
    return {in_place ? 0 : p_.send_bytes[to], block, gridDim.x};
  }
  __device__ __forceinline__ BulkShare taken(int from, uint32 landed) const {
    return {(landed >> from & 1) != 0 ? 0 : p_.receive_bytes[from], blockIdx.x, gridDim.x};
  }
  __device__ __forceinline__ uint32 most_steps(uint32 block) const {
    uint32 most = 0;
#pragma unroll 1
    for (int r = 0; r < ranks_; r++) most = max(most, sent(r, block).steps());
    return most;
  }
  // Peers in rank order starting after this rank, and this rank last if it copies its own message.
  __device__ __forceinline__ int receiver_of(uint32 i) const {
    return (rank_ + 1 + i) % ranks_;
  }
  __device__ __forceinline__ uint32 receivers() const {
    return ranks_ - (sent(rank_).bytes == 0 ? 1 : 0);
  }
  __device__ __forceinline__ int first_receiver() const {
    int i = 0;
#pragma unroll 1
    while (i < ranks_ - 1 && sent(receiver_of(i)).bytes == 0) i++;
    return receiver_of(i);
  }
  // Whether every receiver gets the same bytes.
  __device__ __forceinline__ bool has_one_source() const {
    const int first = first_receiver();
    bool one = true;
#pragma unroll 1
    for (int r = 0; r < ranks_; r++) {
      const uint64 bytes = sent(r).bytes;
      one = one && (bytes == 0 || (bytes == sent(first).bytes && p_.send[r] == p_.send[first]));
    }
    return one;
  }

  // `lands`: what this thread's receiver announced.
  __device__ __forceinline__ bool store(int to, uint64 lands, uint32 step, const char* stage) {
    const uint32 bytes = sent(to).size(step);
    char* const place = reinterpret_cast<char*>(of_peer(lands, to));
    const uint64 number = of_peer(state_.sent, to) + step;
    if (bytes == 0) return true;
    if (place != nullptr) {
      warp_.store(place + sent(to).at(step), stage, bytes);
      return true;
    }
    if (!warp_.await_room(shared_.words, to, number, step)) return false;
    if (warp_.leads()) bulk_store(ring_.slot(to, rank_, number), stage, padded(bytes));
    return true;
  }

  const MoveParams& p_;
  Shared& shared_;
  const BulkRing ring_;
  BulkWarp warp_;
  const int rank_, ranks_, thread_;
  const bool peer_;  // whether this thread's number is a peer's rank; it then holds that peer's state
  RingState state_{};
  uint64 pace_ = 0;
};

template <bool kTransfer>
__device__ __forceinline__ void bulk_move(const MoveParams& p) {
  extern __shared__ __align__(128) char bulk_memory[];
  auto& shared = *reinterpret_cast<BulkMoveShared<kTransfer>*>(bulk_memory);
  begin_kernel();
  if (threadIdx.x == 0) shared.prepare();
  BulkMove<kTransfer> work(p, shared);
  __syncthreads();
  const int task = threadIdx.x / 32;
  if (task == 0) return work.send();
  if (task == 1) return work.tell();
  work.take();
}

#endif

}  // namespace ark::device
