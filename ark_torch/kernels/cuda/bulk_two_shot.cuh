// Reductions by parts (two_shot.cuh: same parameters, same bits) over bulk rings (bulk_lane.cuh): few blocks, one lane
// each. The warps of a block: one contributes to every peer, one loads all contributions to this rank's part to stages
// of shared memory, eight add, one hands the sums out, one takes results from every peer, one tells, and one fetches
// credits. Results go to slots, or straight to the buffer that the peer has announced (landing.cuh).
//
// No deadlock: takers wait for data only; so adders, which wait for contributions and for takers' credits, proceed; so
// contributors do. In place: a result overwrites what it was added from only after that was loaded.
#pragma once

#include "cuda/bulk_peers.cuh"
#include "cuda/two_shot.cuh"

namespace ark::device {

inline constexpr int kBulkAdders = 8;  // warps
inline constexpr int kBulkThreads = (6 + kBulkAdders) * 32;

#if defined(__CUDACC__)

template <int kRanks>
struct alignas(128) BulkShared {
  // A sum stays in its stage until all peers' stores have read it, as contributions do.
  static constexpr uint32 kParts = kRanks <= 2 ? 4 : 2;
  static constexpr uint32 kSums = kRanks <= 2 ? 6 : kRanks <= 4 ? 4 : 3;
  static constexpr uint32 kMoved = kBulkStages - kParts * kRanks - kSums;
  static constexpr uint32 kTaken = bulk_taken(kMoved), kSent = kMoved - kTaken;
  char parts[kParts][kRanks][kBulkChunk];
  char sums[kSums][kBulkChunk];
  char moved[kMoved][kBulkChunk];  // sent, then taken
  uint64 parts_full[kParts], parts_empty[kParts];
  uint64 sums_full[kSums], sums_empty[kSums];
  uint64 moved_full[kMoved];
  BulkWords contributions, results;

  // Called by one thread; a barrier of the block must follow.
  __device__ __forceinline__ void prepare() {
    for (uint32 i = 0; i < kParts; i++) barrier_init(&parts_full[i], 1), barrier_init(&parts_empty[i], kBulkAdders);
    for (uint32 i = 0; i < kSums; i++) barrier_init(&sums_full[i], kBulkAdders), barrier_init(&sums_empty[i], 1);
    for (uint32 i = 0; i < kMoved; i++) barrier_init(&moved_full[i], 1);
    contributions = BulkWords{}, results = BulkWords{};
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_async_shared();
  }
};

template <class Rule, int kRanks, int kRank>
class BulkTwoShot {
  using Shared = BulkShared<kRanks>;
  static_assert(sizeof(Shared) <= kBulkSharedBytes);
  static constexpr uint32 kPeers = kRanks - 1;
  // Steps whose stores may be in flight before the mover waits for the oldest: latency times bandwidth.
  static constexpr uint32 kLag = kRanks <= 2 ? 4 : kRanks <= 4 ? 3 : 2;

 public:
  // Reads the counters before anyone advances them.
  __device__ __forceinline__ BulkTwoShot(const TwoShotParams& params, Shared& memory)
      : p_(params),
        shared_(memory),
        contributions_{params.rings, blockIdx.x},
        results_{params.results, blockIdx.x},
        warp_(params.rings),
        thread_(BulkWarp::thread()),
        peer_(thread_ < kRanks && thread_ != kRank) {
    if (peer_) contribution_ = *contributions_.state(thread_), result_ = *results_.state(thread_);
    pace_ = *contributions_.pace(blockIdx.x);
  }

  // Every warp calls one of these.
  __device__ __forceinline__ void contribute() {
    const uint32 steps = most_steps(0);
    BulkPace pace(contributions_, shared_.contributions, pace_, most_steps(0, 0));
    fence_async_global();
    // The taker's warp decides in the same way that it needs no stages.
    const auto bytes_from = [&](int from) { return p_.bytes[from]; };
    const bool alone = !sends_to(kRank) || takes_nothing(p_.results, kRank, kRanks, bytes_from);
    if (!(alone ? contribute_all(shared_.moved, steps, pace)
                : contribute_all(first_stages<Shared::kSent>(shared_.moved), steps, pace)))
      return;
    warp_.publish<0>(shared_.contributions, steps);
    pace.close();
    if (peer_) contributions_.state(thread_)->sent = contribution_.sent + share(thread_).steps();
  }
  __device__ __forceinline__ void tell() {
    BulkTeller contributions = contribution_teller(), results = result_teller();
    for (;;) {
      const bool contributed = contributions.tell(), handed_out = results.tell();
      if ((contributed && handed_out) || warp_.over()) return;
    }
  }
  __device__ __forceinline__ void fetch_credits() {
    BulkTeller contributions = contribution_teller(), results = result_teller();
    for (;;) {
      const bool contributed = contributions.fetch(), handed_out = results.fetch();
      if ((contributed && handed_out) || warp_.over()) return;
      BulkPace::look(contributions_, shared_.contributions, pace_);
    }
  }

  // Loads every rank's part to a stage.
  __device__ __forceinline__ void load() {
    const BulkShare<> mine = share(kRank);
    const uint32 steps = mine.steps();
    fence_async_global();
    uint64 there = 0;  // of this thread's peer
    uint32 step = 0;
#pragma unroll 1
    for (; step < steps; step++) {
      const uint32 stage = step % Shared::kParts, bytes = mine.size(step);
      if (!warp_.await(&shared_.parts_empty[stage], (step / Shared::kParts & 1) ^ 1)) break;
      if (!await_parts(there, step)) break;
      const char* const own = static_cast<const char*>(p_.in[kRank]) + mine.at(step);
      const uint32 whole = warp_.load_rest(shared_.parts[stage][kRank], own, bytes);
      if (warp_.leads()) {
        uint64* const full = &shared_.parts_full[stage];
        barrier_expect(full, whole + kPeers * padded(bytes));
        if (whole != 0) bulk_load(shared_.parts[stage][kRank], own, whole, full);
      }
      ARK_UNROLL
      for (int r = 0; r < kRanks; r++) {
        if (r == kRank) continue;
        const uint64 number = of_peer(contribution_.received, r) + step;
        if (warp_.leads())
          bulk_load(shared_.parts[stage][r], contributions_.slot(kRank, r, number), padded(bytes),
                    &shared_.parts_full[stage]);
      }
    }
    if (step == steps) {
      if (peer_) contributions_.state(thread_)->received = contribution_.received + steps;
      return;
    }
#pragma unroll 1
    for (uint32 i = step - min(step, Shared::kParts); i < step; i++) {  // wait for loads in flight, as in bulk_pump()
      while (!barrier_passed(&shared_.parts_full[i % Shared::kParts], i / Shared::kParts & 1)) {
      }
    }
  }

  __device__ __forceinline__ void add(int adder, Rule rule) {
    constexpr int kUnits = kBulkChunk / 16 / (32 * kBulkAdders);
    const BulkShare<> mine = share(kRank);
    const uint32 steps = mine.steps();
    double factors[kRanks];
    ARK_UNROLL
    for (int r = 0; r < kRanks; r++) factors[r] = p_.factors != nullptr ? p_.factors[2 * r] : 1.0;
#pragma unroll 1
    for (uint32 step = 0; step < steps; step++) {
      const uint32 in = step % Shared::kParts, out = step % Shared::kSums, units = padded(mine.size(step)) / 16;
      if (!warp_.await(&shared_.parts_full[in], step / Shared::kParts & 1)) return;
      if (adder == 0 && peer_)  // the slots have been read
        protocol::store_relaxed(*contributions_.credit(thread_, kRank), contribution_.received + step + 1);
      Unit sums[kUnits];
      ARK_UNROLL
      for (int j = 0; j < kUnits; j++) {
        const uint32 unit = (j * kBulkAdders + adder) * 32 + thread_;
        if (unit >= units) continue;
        typename Rule::Accumulator sum;
        ARK_UNROLL
        for (int r = 0; r < kRanks; r++) {
          const Unit part = *reinterpret_cast<const Unit*>(shared_.parts[in][r] + unit * 16);
          if (r == 0)
            sum = rule.first(part, factors[0]);
          else
            rule.add(sum, part, factors[r]);
        }
        sums[j] = rule.finish(sum, kRanks, p_.average != 0);
      }
      __syncwarp();
      if (warp_.leads()) barrier_arrive(&shared_.parts_empty[in]);
      if (!warp_.await(&shared_.sums_empty[out], (step / Shared::kSums & 1) ^ 1)) return;
      ARK_UNROLL
      for (int j = 0; j < kUnits; j++) {
        const uint32 unit = (j * kBulkAdders + adder) * 32 + thread_;
        if (unit < units) *reinterpret_cast<Unit*>(shared_.sums[out] + unit * 16) = sums[j];
      }
      fence_async_shared();
      __syncwarp();
      if (warp_.leads()) barrier_arrive(&shared_.sums_full[out]);
    }
  }

  __device__ __forceinline__ void hand_out() {
    char* lands = nullptr;  // where this thread's peer wants the results; null: in the ring
    const auto bytes_to = [&](int to) { return sends_to(to) ? p_.bytes[kRank] : 0; };
    if (!await_landings(p_.results, kRank, kRanks, bytes_to, lands)) return;
    const uint32 apart = __ballot_sync(~0u, lands != nullptr), steps = share(kRank).steps();
    if (warp_.leads()) shared_.results.apart = apart;
    const bool done = hand_out_all(steps, reinterpret_cast<uint64>(lands));
    if (warp_.leads()) bulk_wait_written<0>();
    if (!done) return;
    warp_.publish<0>(shared_.results, steps);
    if (peer_ && sends_to(thread_) && lands == nullptr) results_.state(thread_)->sent = result_.sent + steps;
    tell_landed(p_.results, kRanks, apart);
  }

  __device__ __forceinline__ void take() {
    if (!sends_to(kRank)) return;
    const uint32 landed = announce_landings(p_.results, kRank, kRanks, [&](int from) { return p_.bytes[from]; });
    const auto taken = [&](int from) {
      return BulkShare<>{(landed >> from & 1) != 0 ? 0 : p_.bytes[from], blockIdx.x, gridDim.x};
    };
    if (!bulk_take(warp_, results_, last_stages<Shared::kTaken>(shared_.moved), &shared_.moved_full[Shared::kSent],
                   kRank, kRanks, result_.received, most_steps(landed), taken,
                   [&](int from) { return static_cast<char*>(p_.out[from]); }))
      return;
    if (peer_ && (landed >> thread_ & 1) == 0)
      results_.state(thread_)->received = result_.received + share(thread_).steps();
    await_landed(p_.results, kRanks, landed);
  }

 private:
  __device__ __forceinline__ BulkTeller<> contribution_teller() {
    return {contributions_, shared_.contributions, contribution_.sent, peer_ ? share(thread_).steps() : 0,
            most_steps(0)};
  }
  __device__ __forceinline__ BulkTeller<> result_teller() {
    const uint32 steps = share(kRank).steps();
    return {results_, shared_.results, result_.sent, peer_ && sends_to(thread_) ? steps : 0, steps};
  }
  __device__ __forceinline__ BulkShare<> share(int part) const {
    return share(part, blockIdx.x);
  }
  __device__ __forceinline__ BulkShare<> share(int part, uint32 block) const {
    return {p_.bytes[part], block, gridDim.x};
  }
  __device__ __forceinline__ bool sends_to(int rank) const {
    return (p_.receivers >> rank & 1) != 0;
  }
  // Steps of the longest part of the peers that are not in `without`.
  __device__ __forceinline__ uint32 most_steps(uint32 without) const {
    return most_steps(without, blockIdx.x);
  }
  __device__ __forceinline__ uint32 most_steps(uint32 without, uint32 block) const {
    uint32 most = 0;
#pragma unroll 1
    for (int r = 0; r < kRanks; r++) {
      if (r != kRank && (without >> r & 1) == 0) most = max(most, share(r, block).steps());
    }
    return most;
  }
  // A mover's chunks go step by step, one per peer in each step, in rank order starting after this rank.
  static __device__ __forceinline__ int receiver_of(uint32 chunk) {
    return (kRank + 1 + chunk % kPeers) % kRanks;
  }
  // Waits until every peer's contribution to the step has arrived.
  __device__ __forceinline__ bool await_parts(uint64& there, uint32 step) {
    const uint64 number = contribution_.received + step;
    if (__all_sync(~0u, !peer_ || there > number)) return true;
    for (;;) {
      const bool found = !peer_ || has_arrived(*contributions_.arrived(kRank, thread_), there, number);
      const uint32 missing = __ballot_sync(~0u, !found);
      if (missing == 0) break;
      if (warp_.over(__ffs(missing) - 1)) return false;
    }
    fence_async_global();
    return true;
  }

  // Called when `step` has been stored, in kEach stores: publishes the step that may be written by now.
  template <uint32 kEach>
  __device__ __forceinline__ void publish_before(BulkWords& words, uint32 step) {
    constexpr uint32 kShort = kLag / 2;
    if (p_.rings.bulk.depth >= 2 * kLag) {
      if (step >= kLag) warp_.publish<kLag * kEach>(words, step + 1 - kLag);
    } else if (step >= kShort) {
      warp_.publish<kShort * kEach>(words, step + 1 - kShort);
    }
  }
  template <uint32 kStages>
  __device__ __forceinline__ bool contribute_all(char (&stages)[kStages][kBulkChunk], uint32 steps, BulkPace& pace) {
    return bulk_pump<bulk_ahead(kStages, true)>(
        warp_, stages, shared_.moved_full, steps * kPeers, [&](uint32 i) { return pace.may_begin(i / kPeers); },
        [&](uint32 i) {
          warp_.publish<0>(shared_.contributions, i / kPeers);
          return warp_.over();
        },
        [&](uint32 i, char* stage, uint64* full) {
          const int to = receiver_of(i);
          warp_.load(stage, full, static_cast<const char*>(p_.in[to]) + share(to).at(i / kPeers),
                     share(to).size(i / kPeers));
        },
        [&](uint32 i, const char* stage) {
          const int to = receiver_of(i);
          const uint32 step = i / kPeers, bytes = share(to).size(step);
          const uint64 number = of_peer(contribution_.sent, to) + step;
          if (bytes != 0) {
            if (!warp_.await_room(shared_.contributions, to, number, step)) return false;
            if (warp_.leads()) bulk_store(contributions_.slot(to, kRank, number), stage, padded(bytes));
          }
          if (warp_.leads()) bulk_commit();
          if (i % kPeers == kPeers - 1) publish_before<kPeers>(shared_.contributions, step);
          return true;
        });
  }
  __device__ __forceinline__ bool hand_out_all(uint32 steps, uint64 lands) {
    constexpr uint32 kUnread = Shared::kSums - 2;  // stores that may not have read their stage yet
    const BulkShare<> mine = share(kRank);
#pragma unroll 1
    for (uint32 step = 0; step < steps; step++) {
      const uint32 stage = step % Shared::kSums, bytes = mine.size(step);
      const char* const sum = shared_.sums[stage];
      if (!warp_.await(&shared_.sums_full[stage], step / Shared::kSums & 1)) return false;
#pragma unroll 1
      for (uint32 d = 0; d < kPeers; d++) {
        const int to = receiver_of(d);
        char* const place = reinterpret_cast<char*>(of_peer(lands, to));
        const uint64 number = of_peer(result_.sent, to) + step;
        if (!sends_to(to)) continue;
        if (place != nullptr) {
          warp_.store(place + mine.at(step), sum, bytes);
        } else {
          if (!warp_.await_room(shared_.results, to, number, step)) return false;
          if (warp_.leads()) bulk_store(results_.slot(to, kRank, number), sum, padded(bytes));
        }
      }
      if (p_.out[kRank] != nullptr) warp_.store(static_cast<char*>(p_.out[kRank]) + mine.at(step), sum, bytes);
      if (warp_.leads()) {
        bulk_commit();
        bulk_wait_read<kUnread>();
        if (step >= kUnread) barrier_arrive(&shared_.sums_empty[(step - kUnread) % Shared::kSums]);
      }
      publish_before<1>(shared_.results, step);
    }
    return true;
  }

  const TwoShotParams& p_;
  Shared& shared_;
  const BulkRing contributions_, results_;
  BulkWarp warp_;
  const int thread_;
  const bool peer_;  // whether this thread's number is a peer's rank; it then holds that peer's state
  RingState contribution_{}, result_{};
  uint64 pace_ = 0;
};

template <class Rule, int kRanks, int kRank>
__device__ __forceinline__ void bulk_two_shot(const TwoShotParams& p, Rule rule) {
  extern __shared__ __align__(128) char bulk_memory[];
  auto& shared = *reinterpret_cast<BulkShared<kRanks>*>(bulk_memory);
  begin_kernel();
  if (threadIdx.x == 0) shared.prepare();
  BulkTwoShot<Rule, kRanks, kRank> work(p, shared);
  __syncthreads();
  const int task = threadIdx.x / 32;
  if (task == 0) return work.contribute();
  if (task == 1) return work.tell();
  if (task == 2) return work.load();
  if (task == 3) return work.hand_out();
  if (task == 4) return work.fetch_credits();
  if (task == 5) return work.take();
  work.add(task - 6, rule);
}

#endif

}  // namespace ark::device
