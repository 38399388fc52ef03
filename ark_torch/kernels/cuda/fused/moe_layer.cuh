// A whole mixture of experts in one kernel: rows go to their experts' ranks, are multiplied by both matrices as they
// arrive, come back tile by tile, and are added. For Hopper.
//
// One block per multiprocessor. All warps but the first send the rows of the block's tokens. Then, as in matmul.cuh,
// the first warp has the copy engine load tiles through a ring in shared memory, warp groups multiply them (wgmma), and
// the second warp has the engine store their results: of the first product in this rank's memory, of the second in the
// slots of the tokens' ranks. The two warps that are left add the rows of the block's tokens. Bits are those of
// moe_dispatch, moe_product and moe_gather one after the other.
#pragma once

#include "cuda/fused/moe_layer_rows.cuh"
#include "cuda/fused/moe_product.cuh"

namespace ark::device {

// Tiles are tasks (moe_tasks.cuh) that blocks take one by one from a counter, so that none waits while others work.
// While a tile's rows have not arrived, its columns of the matrix are already loaded.
//
// Memory order. Whoever stores rows adds to a sum with release at system scope, after a warp barrier. Whoever reads
// waits for the sum with acquire, and a proxy fence precedes the copy engine's reads. Reuse: tiles.cuh. The first
// product's result and the sums belong to this rank until all its blocks have ended.
//
// No deadlock. All blocks are resident (a cooperative launch). Sending waits for announcements and counts only. A task
// waits for rows and for tasks with lower numbers; the lowest unfinished one is always in work, since a block works off
// its tasks in order. Adding rows waits for tasks, and nothing waits for it but the end of the kernel. Waits for peers
// are bounded; after a failure a block ends its task with whatever is there, stores nothing more and takes none.

#if defined(__CUDACC__)

// A sum of times of one warp, in cycles, and how often; nothing unless profiled.
template <bool kOn>
struct MoeTime {
  long long since = 0, sum = 0, count = 0;
  __device__ __forceinline__ void begin() {
    if constexpr (kOn) since = clock64();
  }
  __device__ __forceinline__ void end() {
    if constexpr (kOn) sum += clock64() - since, ++count;
  }
  __device__ __forceinline__ void tell(const MoeLayerParams& p, MoeStamp stamp) const {
    if constexpr (kOn) {
      if (threadIdx.x % 32 != 0) return;
      long long* const to = p.stamps + (blockIdx.x * kMoeStamps + static_cast<uint32>(stamp)) * 2;
      to[0] = sum, to[1] = count;
    }
  }
};

template <class Format, int kRows, int kColumns, bool kGated, MoeActivation kActivation, bool kProfiled>
struct MoeLayer {
  using Product = MoeProduct<Format, kRows, kColumns, kGated, kActivation>;
  static constexpr MatmulShape kShape{kRows, kColumns};
  static constexpr int kStages = kShape.stages(), kWarps = kShape.warps(), kOver = kColumns / 8;
  static constexpr int kOut = Product::kOut;  // columns of the first product's tile
  static constexpr uint32 kBox = Product::kBox, kQueue = 32, kStorers = 2, kAll = ~0u;
  // Tasks are taken one ahead of loads, which are at most kStages, so as many tasks, ahead of the groups, and these one
  // task ahead of stores.
  static_assert(kStages + 5 <= static_cast<int>(kQueue));
  using Rows = MoeLayerRows<Format, kRows, kShape.threads()>;
  using Element = typename MatmulElement<Format>::Type;
  using Time = MoeTime<kProfiled>;

  struct Shared {
    uint64 full[kStages], empty[kStages];
    MoeTask queue[kQueue];
    uint32 published;       // tasks in the queue so far
    uint32 ready;           // tasks whose rows are there
    uint32 begun;           // tasks that are being loaded, or have been
    uint32 laid[kWarps];    // tiles that each warp has written to its buffer
    uint32 left[kStorers];  // tiles that each storing warp has read from there
    uint32 lost;            // 1: give up
    uint32 added;           // parts of the block's tokens that warps have taken to add
    MoeTables tables;
  };

  const MoeLayerParams& p;
  TileExchange& exchange;
  Shared& shared;
  Rows& rows;
  const uint32 ring;  // address in shared memory; the warps' output buffers follow it

  static __device__ __forceinline__ uint32 lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ TileControl* own() const { return p.links.control[p.links.rank]; }
  __device__ __forceinline__ uint32 laid_at(uint32 warp) const {
    return ring + kShape.ring_bytes() + warp * kShape.laid_bytes();
  }
  __device__ __forceinline__ uint32 steps_of(uint32 kind) const {
    return ((kind == MoeTask::first ? p.dim : p.ffn) + MatmulShape::kDepth - 1) / MatmulShape::kDepth;
  }

  // Waits for a block's n-th task.
  __device__ __forceinline__ const MoeTask& task_at(uint32 n) const {
    while (hear_block(shared.published) <= n) __nanosleep(40);
    return shared.queue[n % kQueue];
  }
  __device__ __forceinline__ void publish(const MoeTask& task, uint32 n) {
    if (lane() == 0) {
      shared.queue[n % kQueue] = task;
      tell_block(shared.published, n + 1);
    }
    __syncwarp();
  }

  // Waits for the rows that a task reads; false: give up.
  __device__ __forceinline__ bool await_rows(const MoeTask& task) {
    bool well = true;
    if (task.kind == MoeTask::first) {
      const uint32 expert = static_cast<uint32>(p.links.rank) * p.local + task.expert;
      const uint32 wanted = rows.pieces_from(task, rows.tables.starts[expert + 1] - rows.tables.starts[expert]);
      if (wanted != 0)
        well = exchange.await_sum(&own()->group_rows[lane()][task.group], wanted, static_cast<int>(lane()));
    } else if (lane() == 0) {
      well = exchange.await_sum(&own()->group_tiles[task.group], p.tiles[0] * kStorers, p.links.rank);
    }
    return __all_sync(kAll, well) != 0;
  }

  // Called by one thread before the choices are known: where experts have few rows, but probably some, this block's
  // first tile is known, too. Brings its columns to the second-level cache.
  static __device__ __forceinline__ void foresee(const MoeLayerParams& p) {
    const uint32 expected = p.max_rows / p.experts, expert = blockIdx.x / p.tiles[0];
    if (expected < 4 || expected > kRows / 2 || expert >= p.local) return;
    const int line = static_cast<int>(expert * p.lines + blockIdx.x % p.tiles[0] * kOut);
    const uint32 steps = min((p.dim + MatmulShape::kDepth - 1) / MatmulShape::kDepth, static_cast<uint32>(kStages));
    ARK_ROLLED for (uint32 step = 0; step < steps; ++step) {
      tensor_prefetch(p.w1, static_cast<int>(step * MatmulShape::kDepth), line);
      if constexpr (kGated)
        tensor_prefetch(p.w1, static_cast<int>(step * MatmulShape::kDepth), line + static_cast<int>(p.ffn));
    }
  }

  // The work of one warp: takes tasks, and waits for what they read.
  __device__ __forceinline__ void take_tasks() {
    const uint32 first = static_cast<uint32>(p.links.rank) * p.local;
    const MoeTaskShape order{rows.tables.starts + first,
                             rows.tables.starts[first],
                             p.local,
                             {p.tiles[0], p.tiles[1]},
                             {static_cast<uint32>(kOut), static_cast<uint32>(kColumns)},
                             gridDim.x};
    MoeTasks<static_cast<uint32>(kRows)> tasks(order);
    MoeTask task;
    uint32 number = blockIdx.x, n = 0;
    for (bool well = true; well && tasks.find(number, task);) {
      publish(task, n);
      uint32 taken = 0;
      if (lane() == 0) taken = atomicAdd(&own()->tasks, 1u);
      well = await_rows(task);
      asm volatile("fence.proxy.async.global;" ::: "memory");
      if (!well && lane() == 0) tell_block(shared.lost, 1);
      __syncwarp();
      ++n;
      if (lane() == 0) tell_block(shared.ready, n);
      number = gridDim.x + __shfl_sync(kAll, taken, 0);
      while (hear_block(shared.begun) < n) __nanosleep(40);
    }
    task.kind = MoeTask::none;
    publish(task, n);
  }

  // The work of one warp: loads what the groups multiply. While a task waits, it loads its columns.
  __device__ __forceinline__ void bring() {
    uint32 stage = 0, parity = 1;  // of the next columns
    uint32 rows_stage = 0;         // of the next rows
    Time rows_wait, stage_wait;
    for (uint32 n = 0;; ++n) {
      const MoeTask task = task_at(n);
      if (task.kind == MoeTask::none) break;
      if (lane() == 0) tell_block(shared.begun, n + 1);
      const bool is_first = task.kind == MoeTask::first;
      const uint32 steps = steps_of(task.kind), boxes = (task.rows + kBox - 1) / kBox;
      const int line = static_cast<int>(task.expert * (is_first ? p.lines : p.dim) + task.column);
      const auto load_columns = [&](uint32 step) {
        stage_wait.begin();
        while (!barrier_passed(&shared.empty[stage], parity)) {
        }
        stage_wait.end();
        if (lane() == 0) {
          uint64* const full = &shared.full[stage];
          const uint32 to = ring + stage * kShape.stage_bytes() + kRows * 128;
          const int depth = static_cast<int>(step * MatmulShape::kDepth);
          barrier_expect(full, (boxes * kBox + kColumns) * 128);
          if (is_first) {
            tensor_load(to, p.w1, depth, line, full);
            if constexpr (kGated) tensor_load(to + kOut * 128, p.w1, depth, line + static_cast<int>(p.ffn), full);
          } else {
            tensor_load(to, p.w2, depth, line, full);
          }
        }
        __syncwarp();
        if (++stage == kStages) stage = 0, parity ^= 1;
      };
      uint32 loaded = 0;
      if (hear_block(shared.ready) <= n) {
        const uint32 early = min(steps, static_cast<uint32>(kStages));
        ARK_ROLLED for (; loaded < early && hear_block(shared.ready) <= n; ++loaded) load_columns(loaded);
        rows_wait.begin();
        while (hear_block(shared.ready) <= n) __nanosleep(20);
        rows_wait.end();
      }
      const TensorMap& from = is_first ? p.rows : p.inner;
      ARK_ROLLED for (uint32 step = 0; step < steps; ++step) {
        if (step >= loaded) load_columns(step);
        if (lane() == 0) {
          const uint32 to = ring + rows_stage * kShape.stage_bytes();
          ARK_ROLLED for (uint32 b = 0; b < boxes; ++b)
              tensor_load(to + b * (kBox * 128), from, static_cast<int>(step * MatmulShape::kDepth),
                          static_cast<int>(task.row + b * kBox), &shared.full[rows_stage]);
        }
        __syncwarp();
        if (++rows_stage == kStages) rows_stage = 0;
      }
    }
    rows_wait.tell(p, MoeStamp::bring_rows), stage_wait.tell(p, MoeStamp::bring_stage);
  }

  // The work of the storing warps: store what the groups have written to shared memory, every second row, and count it.
  // They compute the activation, too, while the groups multiply. Plain stores: the copy engine works in order, so its
  // stores would wait for all loads ahead of them, and tiles for its stores.
  __device__ __forceinline__ void store(uint32 storer) {
    Time storing, telling;
    for (uint32 n = 0;; ++n) {
      const MoeTask task = task_at(n);
      if (task.kind == MoeTask::none) break;
      if (lane() < kWarps)
        while (hear_block(shared.laid[lane()]) <= n) __nanosleep(40);
      __syncwarp();
      const bool lost = hear_block(shared.lost) != 0;
      storing.begin();
      if (!lost) {
        if (task.kind == MoeTask::first)
          store_rows<true>(task, storer);
        else
          store_rows<false>(task, storer);
      }
      __syncwarp();
      if (lane() == 0) tell_block(shared.left[storer], n + 1);
      storing.end();
      if (lost) continue;
      telling.begin();
      if (task.kind == MoeTask::first) {
        if (lane() == 0) TileExchange::add_here(&own()->group_tiles[task.group]);
      } else {
        TileExchange::order_stores();
        ARK_ROLLED for (uint32 row = lane() * kStorers + storer; row < task.rows; row += 32 * kStorers) {
          uint32 source;
          const uint32 slot = rows.slot_of(task.expert, task.down + row, source);
          TileExchange::add_ordered(&p.links.control[source]->slot_tiles[slot]);
        }
      }
      telling.end();
    }
    if (storer == 0) storing.tell(p, MoeStamp::storing), telling.tell(p, MoeStamp::telling);
  }

  template <bool kFirst>
  __device__ __forceinline__ void store_rows(const MoeTask& task, uint32 storer) const {
    constexpr uint32 kUnits = (kFirst ? kOut : kColumns) / 8;  // of 16 bytes
    // The error function takes many registers.
    constexpr uint32 kAhead = kFirst && kActivation == MoeActivation::gelu ? 1 : 2;
    const uint32 columns = kFirst ? p.ffn : p.dim, units = min(kUnits, (columns - task.column) / 8);
    const uint32 mine = (task.rows + kStorers - 1 - storer) / kStorers;
    ARK_ROLLED for (uint32 base = lane(); base < mine * kUnits; base += 32 * kAhead) {
      Line16 lines[kAhead], factors[kAhead];
      ARK_UNROLL for (uint32 a = 0; a < kAhead; ++a) {
        const uint32 row = (base + a * 32) / kUnits * kStorers + storer, unit = (base + a * 32) % kUnits;
        if (row >= task.rows) continue;
        const uint32 from = laid_at(row / 16) + row % 16 * kShape.pitch() + unit * 16;
        lines[a] = laid_line(from);
        if constexpr (kFirst && kGated) factors[a] = laid_line(from + kOut * 2);
      }
      ARK_UNROLL for (uint32 a = 0; a < kAhead; ++a) {
        const uint32 row = (base + a * 32) / kUnits * kStorers + storer, unit = (base + a * 32) % kUnits;
        if (row >= task.rows || unit >= units) continue;
        char* to;
        if constexpr (kFirst) {
          to = p.hidden + uint64{task.row + row} * columns * 2;
          ARK_UNROLL for (int w = 0; w < 4; ++w) {
            float sums[2], others[2] = {0.0f, 0.0f};
            Format::decode(lines[a].words[w], sums);
            if constexpr (kGated) Format::decode(factors[a].words[w], others);
            lines[a].words[w] = Product::finished(sums, others);
          }
        } else {
          uint32 source;
          const uint32 slot = rows.slot_of(task.expert, task.down + row, source);
          to = rows.tables.places[source] + p.slots + uint64{slot} * p.row_bytes();
        }
        store_line(to + task.column * 2 + unit * 16, lines[a]);
      }
    }
  }

  // Writes a warp's 16 rows to its buffer, rounded.
  __device__ __forceinline__ void lay(const float (&sums)[kOver][4], uint32 warp) const {
    const uint32 to = laid_at(warp) + lane() / 4 * kShape.pitch() + lane() % 4 * 4;
    ARK_UNROLL for (int j = 0; j < kOver; ++j) ARK_UNROLL for (int h = 0; h < 2; ++h) {
      const uint32 word = Format::encode(&sums[j][2 * h]);
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(to + 8 * h * kShape.pitch() + j * 16), "r"(word) : "memory");
    }
  }

  // The work of a warp group.
  __device__ __forceinline__ void multiply_tiles(uint32 group) {
    using namespace ark::loop;
    const uint32 warp = group * 4 + threadIdx.x / 32 % 4;
    const uint32 left = shared_matrix(ring + group * 64 * 128, 8192);
    const uint32 right = shared_matrix(ring + kRows * 128, 8192);
    uint32 stage = 0, parity = 0;
    float sums[kOver][4];
    Time task_wait, loads_wait, left_wait, firsts, seconds;
    for (uint32 n = 0;; ++n) {
      task_wait.begin();
      const MoeTask& task = task_at(n);
      task_wait.end();
      const uint32 kind = task.kind, height = task.rows;
      if (kind == MoeTask::none) break;
      if (kind == MoeTask::first)
        firsts.begin();
      else
        seconds.begin();
      const uint32 steps = steps_of(kind);
      ARK_UNROLL for (int j = 0; j < kOver; ++j) ARK_UNROLL for (int e = 0; e < 4; ++e) sums[j][e] = 0;
      uint32 before = 0;  // the stage being multiplied
      ARK_ROLLED for (uint32 step = 0; step < steps; ++step) {
        loads_wait.begin();
        while (!barrier_passed(&shared.full[stage], parity)) {
        }
        loads_wait.end();
        begin_group_multiply();
        ARK_UNROLL for (int k = 0; k < 4; ++k)
            group_multiply_add<Element, false, false>(sums, moved_matrix(left, stage * kShape.stage_bytes() + k * 32),
                                                      moved_matrix(right, stage * kShape.stage_bytes() + k * 32));
        end_group_multiply();
        wait_group_multiply<1>();
        if (step != 0 && lane() == 0) barrier_arrive(&shared.empty[before]);
        before = stage;
        if (++stage == kStages) stage = 0, parity ^= 1;
      }
      wait_group_multiply(sums);
      if (lane() == 0) barrier_arrive(&shared.empty[before]);
      if (warp * 16 < height) {
        left_wait.begin();
        while (hear_block(shared.left[lane() % kStorers]) < n) __nanosleep(40);
        __syncwarp();
        left_wait.end();
        lay(sums, warp);
      }
      __syncwarp();
      if (lane() == 0) tell_block(shared.laid[warp], n + 1);
      if (kind == MoeTask::first)
        firsts.end();
      else
        seconds.end();
    }
    if (warp != 0) return;
    task_wait.tell(p, MoeStamp::task_wait), loads_wait.tell(p, MoeStamp::loads_wait);
    left_wait.tell(p, MoeStamp::left_wait);
    firsts.tell(p, MoeStamp::firsts), seconds.tell(p, MoeStamp::seconds);
  }
};

// Launch with kShape.threads() threads in one dimension and kShape.shared_bytes() of dynamic shared memory.
template <class Format, int kRows, int kColumns, bool kGated, MoeActivation kActivation, bool kProfiled = false>
__device__ __forceinline__ void moe_layer(const MoeLayerParams& p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Kernel = MoeLayer<Format, kRows, kColumns, kGated, kActivation, kProfiled>;
  using Time = MoeTime<kProfiled>;
  constexpr bool kMoves = kRows == 128;  // registers, from the first warp group to the others
  static_assert(sizeof(MoeScratch) <= Kernel::kShape.ring_bytes());
  extern __shared__ char memory[];
  __shared__ typename Kernel::Shared shared;
  begin_kernel();
  Time whole, prepared, sent, multiplied, added;
  whole.begin(), prepared.begin();
  TileExchange exchange(p.links);
  if (threadIdx.x < Kernel::kStages) {
    barrier_init(&shared.full[threadIdx.x], 1);
    barrier_init(&shared.empty[threadIdx.x], Kernel::kWarps);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (threadIdx.x < Kernel::kWarps) shared.laid[threadIdx.x] = 0;
  if (threadIdx.x < Kernel::kStorers) shared.left[threadIdx.x] = 0;
  if (threadIdx.x == 0) shared.published = shared.ready = shared.begun = shared.lost = shared.added = 0;
  typename Kernel::Rows rows{p, exchange, shared.tables};
  const uint32 offset = (shared_address(memory) + 1023) / 1024 * 1024 - shared_address(memory);
  if (threadIdx.x == 32) Kernel::foresee(p);
  const bool well = rows.prepare(*reinterpret_cast<MoeScratch*>(memory + offset));
  if (!well) return exchange.refuse_other();
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();  // the ring takes the scratch memory's place
  Kernel kernel{p, exchange, shared, rows, shared_address(memory) + offset};
  const uint32 group = threadIdx.x / 128, warp = threadIdx.x / 32;
  // The first and the third already load weights.
  prepared.end(), sent.begin();
  if (warp != 0 && warp != 2) rows.send(warp == 1 ? 0 : warp - 2, blockDim.x / 32 - 2);
  sent.end(), multiplied.begin();
  if (group == 0) {
    if constexpr (kMoves) give_registers<72>();
    if (warp == 0)
      kernel.bring();
    else if (warp == 2)
      kernel.take_tasks();
    else
      kernel.store(warp / 2);
    rows.add_rows(shared.added);
  } else {
    if constexpr (kMoves) take_registers<216>();
    kernel.multiply_tiles(group - 1);
    multiplied.end(), added.begin();
    rows.add_rows(shared.added);
    added.end();
  }
  // Another object, so that none of its registers is kept while tiles are multiplied.
  TileExchange end(p.links, 0, false);
  end.finish(true, [&] { rows.clear(); });
  if constexpr (kProfiled) {
    whole.end();
    if (warp == 4) {
      whole.tell(p, MoeStamp::whole), prepared.tell(p, MoeStamp::prepared), sent.tell(p, MoeStamp::sent);
      multiplied.tell(p, MoeStamp::multiplied), added.tell(p, MoeStamp::added);
    }
  }
#endif
}

#endif

}  // namespace ark::device
