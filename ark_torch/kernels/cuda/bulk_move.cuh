// Moves messages (move.cuh: same parameters) over bulk rings (bulk_lane.cuh): few blocks, one lane each, so that
// computation keeps its multiprocessors while a launch waits for peers. The warps of a block: one sends to every peer
// and copies this rank's own message, one tells, one fetches credits, and one takes. Messages go to slots, or straight
// to the buffer that the peer has announced (landing.cuh). Both ends of every message must take this kernel.
//
// A thread starts only so many copies a second, and here a single one starts all of a direction. So a chunk takes two
// slots, and starts at an even one.
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

inline constexpr int kBulkMoveThreads = 4 * 32;
inline constexpr uint32 kMoveSlots = 2;
// Shared memory of a block.
ARK_HOST_DEVICE constexpr uint32 bulk_move_bytes(bool transfer) {
  return transfer ? 13 * kBulkChunk : kBulkSharedBytes;
}

#if defined(__CUDACC__)

template <bool kTransfer>
struct alignas(128) BulkMoveShared {
  // A transfer only sends, or only takes.
  static constexpr uint32 kStages = (kTransfer ? 12 : kBulkStages) / kMoveSlots;
  static constexpr uint32 kTaken = kTransfer ? kStages : bulk_taken(kStages);
  static constexpr uint32 kSent = kTransfer ? kStages : kStages - kTaken;
  char stages[kStages][kMoveSlots * kBulkChunk];
  uint64 full[kStages];
  BulkWords words;

  // Called by one thread; a barrier of the block must follow.
  __device__ __forceinline__ void prepare() {
    for (uint32 i = 0; i < kStages; i++) barrier_init(&full[i], 1);
    words = BulkWords{};
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_async_shared();
  }
};

template <bool kTransfer>
class BulkMove {
  using Shared = BulkMoveShared<kTransfer>;
  using Share = BulkShare<kMoveSlots>;
  static_assert(sizeof(Shared) <= bulk_move_bytes(kTransfer));

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
    if (peer_) {
      const RingState state = *ring_.state(thread_);
      sent_ = even(state.sent), received_ = even(state.received);
    }
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
    const bool by_ring = __any_sync(~0u, peer_ && lands == nullptr && sent(thread_).bytes != 0);
    if (thread_ == rank_) lands = static_cast<char*>(p_.receive[rank_]);
    const uint32 steps = most_steps(blockIdx.x), first = first_receiver();
    // With one source, a chunk is loaded once for all receivers.
    const uint32 receivers = ranks_ - (sent(rank_).bytes == 0 ? 1 : 0), each = has_one_source(first) ? 1 : receivers;
    const uint32 lag = by_ring ? bulk_lag(p_.rings.bulk.depth / kMoveSlots, each) : kBulkMostLag;
    BulkPace pace(ring_, shared_.words, pace_, most_steps(0));
    fence_async_global();
    // The taker's warp decides in the same way that it needs no stages.
    const auto bytes_from = [&](int from) { return p_.receive_bytes[from]; };
    const bool alone = takes_nothing(p_.rings, rank_, ranks_, bytes_from);
    const Sends sends{steps, each, first, receivers, lag, reinterpret_cast<uint64>(lands)};
    if (!(alone ? send_all(shared_.stages, sends, pace)
                : send_all(first_stages<Shared::kSent>(shared_.stages), sends, pace)))
      return;
    warp_.publish<0>(shared_.words, steps);
    if (!kTransfer) pace.close();
    // A transfer from the peer may run at once and advance the other count, so only what has changed is stored.
    const uint32 own = peer_ && lands == nullptr ? sent(thread_).steps() : 0;
    if (own != 0) ring_.state(thread_)->sent = sent_ + own * kMoveSlots;
    tell_landed(p_.rings, ranks_, apart);
  }
  __device__ __forceinline__ void tell() {
    Teller teller = this->teller();
    while (!teller.tell() && !warp_.over()) {
    }
  }
  __device__ __forceinline__ void fetch_credits() {
    Teller teller = this->teller();
    while (!teller.fetch() && !warp_.over()) {
      if (!kTransfer) BulkPace::look(ring_, shared_.words, pace_);
    }
  }

  __device__ __forceinline__ void take() {
    const uint32 landed = announce_landings(p_.rings, rank_, ranks_, [&](int from) { return p_.receive_bytes[from]; });
    const auto taken = [&](int from) {
      return Share{(landed >> from & 1) != 0 ? 0 : p_.receive_bytes[from], blockIdx.x, gridDim.x};
    };
    uint32 steps = 0;
#pragma unroll 1
    for (int r = 0; r < ranks_; r++) {
      if (r != rank_) steps = max(steps, taken(r).steps());
    }
    constexpr uint32 kOwn = Shared::kStages - Shared::kTaken;
    if (!bulk_take<kMoveSlots>(warp_, ring_, last_stages<Shared::kTaken>(shared_.stages), &shared_.full[kOwn], rank_,
                               ranks_, received_, steps, taken,
                               [&](int from) { return static_cast<char*>(p_.receive[from]); }))
      return;
    const uint32 own = peer_ ? taken(thread_).steps() : 0;
    if (own != 0) ring_.state(thread_)->received = received_ + own * kMoveSlots;
    await_landed(p_.rings, ranks_, landed);
  }

 private:
  using Teller = BulkTeller<kMoveSlots>;
  __device__ __forceinline__ Teller teller() {
    return {ring_, shared_.words, sent_, peer_ ? sent(thread_).steps() : 0, most_steps(blockIdx.x)};
  }
  // The first slot that a chunk may take.
  static __device__ __forceinline__ uint64 even(uint64 slots) {
    return (slots + kMoveSlots - 1) / kMoveSlots * kMoveSlots;
  }
  // What this rank sends; its own message only if it is not in place.
  __device__ __forceinline__ Share sent(int to) const {
    return sent(to, blockIdx.x);
  }
  __device__ __forceinline__ Share sent(int to, uint32 block) const {
    const bool in_place = to == rank_ && p_.send[to] == p_.receive[to];
    return {in_place ? 0 : p_.send_bytes[to], block, gridDim.x};
  }
  __device__ __forceinline__ uint32 most_steps(uint32 block) const {
    uint32 most = 0;
#pragma unroll 1
    for (int r = 0; r < ranks_; r++) most = max(most, sent(r, block).steps());
    return most;
  }
  // Peers in rank order starting after this rank, and this rank last if it copies its own message.
  __device__ __forceinline__ int receiver_of(uint32 i) const {
    const int to = rank_ + 1 + static_cast<int>(i);
    return to < ranks_ ? to : to - ranks_;
  }
  // The first that gets anything.
  __device__ __forceinline__ uint32 first_receiver() const {
    uint32 i = 0;
#pragma unroll 1
    while (i < ranks_ - 1 && sent(receiver_of(i)).bytes == 0) i++;
    return i;
  }
  // Whether every receiver gets the same bytes.
  __device__ __forceinline__ bool has_one_source(uint32 first) const {
    const int of = receiver_of(first);
    bool one = true;
#pragma unroll 1
    for (int r = 0; r < ranks_; r++) {
      const uint64 bytes = sent(r).bytes;
      one = one && (bytes == 0 || (bytes == sent(of).bytes && p_.send[r] == p_.send[of]));
    }
    return one;
  }

  // What a launch sends: in `each` chunks a step, one for each of `receivers`, or one for all from `first` on.
  struct Sends {
    uint32 steps, each, first, receivers, lag;
    uint64 lands;  // what this thread's receiver announced
  };
  template <uint32 kStages>
  __device__ __forceinline__ bool send_all(char (&stages)[kStages][kMoveSlots * kBulkChunk], const Sends& s,
                                           BulkPace& pace) {
    const auto step_of = [&](uint32 i) { return s.each == 1 ? i : i / s.each; };
    return bulk_pump<bulk_ahead(kStages, true)>(
        warp_, stages, shared_.full, s.steps * s.each,
        [&](uint32 i) { return kTransfer || pace.may_begin(step_of(i)); },
        [&](uint32 i) {
          warp_.publish<0>(shared_.words, step_of(i));
          return warp_.over();
        },
        [&](uint32 i, char* stage, uint64* full) {
          const int to = receiver_of(s.each == 1 ? s.first : i % s.each);
          warp_.load(stage, full, static_cast<const char*>(p_.send[to]) + sent(to).at(step_of(i)),
                     sent(to).size(step_of(i)));
        },
        [&](uint32 i, const char* stage) {
          const uint32 step = step_of(i), from = s.each == 1 ? s.first : i % s.each;
          const uint32 end = s.each == 1 && !kTransfer ? s.receivers : from + 1;
#pragma unroll 1
          for (uint32 d = from; d < end; d++) {
            if (!store(receiver_of(d), s.lands, step, stage)) return false;
          }
          if (warp_.leads()) bulk_commit();
          if (i + 1 >= s.lag) warp_.publish(s.lag, shared_.words, step_of(i + 1 - s.lag));
          return true;
        });
  }

  // `lands`: what this thread's receiver announced.
  __device__ __forceinline__ bool store(int to, uint64 lands, uint32 step, const char* stage) {
    const uint32 bytes = sent(to).size(step);
    char* const place = reinterpret_cast<char*>(of_peer(lands, to));
    const uint64 number = of_peer(sent_, to) + step * kMoveSlots;
    if (bytes == 0) return true;
    if (place != nullptr) {
      warp_.store(place + sent(to).at(step), stage, bytes);
      return true;
    }
    if (!warp_.await_room<kMoveSlots>(shared_.words, to, number, step)) return false;
    if (warp_.leads()) bulk_store(ring_.slot(to, rank_, number), stage, padded(bytes));
    return true;
  }

  const MoveParams& p_;
  Shared& shared_;
  const BulkRing ring_;
  BulkWarp warp_;
  const int rank_, ranks_, thread_;
  const bool peer_;  // whether this thread's number is a peer's rank; it then holds that peer's counts, of slots
  uint64 sent_ = 0, received_ = 0, pace_ = 0;
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
  if (task == 2) return work.fetch_credits();
  work.take();
}

#endif

}  // namespace ark::device
