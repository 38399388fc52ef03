// A matrix product that sends each finished tile to the rank that adds it, or multiplies rows as they arrive from their
// ranks: matmul_reduce_scatter, matmul_all_reduce, all_gather_matmul. For Hopper.
//
// One block per SM. The first warp has the copy engine load tiles of a and b through a ring in shared memory. Warp
// groups multiply them (wgmma), 64 rows each, add in float32, round once, and write the tile to shared memory, from
// where the copy engine stores it on the second warp's request. So no multiplying warp waits for a store: blocks end
// tiles at about the same time, and a link takes longer for all of these than for one. The order of a block's work
// depends only on its number, so bits and waits are the same in every run.
#pragma once

#include "cuda/bulk_copy.cuh"
#include "cuda/fused/matmul_shape.cuh"
#if defined(__CUDACC__)
#include "cuda/loop/group.cuh"
#include "cuda/loop/ptx_group.cuh"
#endif

namespace ark::device {

// Sums. Each tile of the result has an owner. A block first computes the peers' tiles and stores them, rounded, in a
// slot of the owner's scratch memory, in the layout in which threads hold them, since the same threads of the owner's
// block will load them. Its own tiles come last: a warp waits for the peers' shares of just its 16 rows, adds all
// ranks' shares in float32 in rank order, rounds once, and stores the result in this rank's memory (reduce_scatter) or
// in every rank's (all_reduce). Peers compute those shares first, so the wait is short.
//
// Gathered rows. Two warps of each block copy this rank's rows to the peers, some rows at a time. Blocks multiply their
// own rows first; before the copy engine reads others, its warp waits for their flags.
//
// Memory order. A tile in shared memory is fenced for the copy engine's proxy, then announced by a word in shared
// memory (release and acquire within the block). The thread that starts a store waits for it, then releases the flag at
// system scope. A waiter acquires the flag, and a proxy fence precedes the copy engine's reads. Reuse: tiles.cuh;
// scratch belongs to this launch from a rank's announcement on, for which any storing warp waits first.
//
// No deadlock. Peers' tiles and copies of rows wait for announcements only. In every block, what waits for flags comes
// after those, and all blocks are resident (a cooperative launch). Waits for peers are bounded; after a failure nothing
// more is stored and no flag is raised. Waits within a block are for its own warps, which always proceed.

#if defined(__CUDACC__)

// Loads to shared memory, with lines swizzled as wgmma expects; outside the matrix it reads zeros.
__device__ __forceinline__ void tensor_load(uint32 to, const TensorMap& map, int at, int line, uint64* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(to),
      "l"(&map), "r"(at), "r"(line), "r"(shared_address(barrier))
      : "memory");
}

struct Line16 {
  uint32 words[4];
};
__device__ __forceinline__ Line16 load_line(const char* from) {
  Line16 line;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(line.words[0]), "=r"(line.words[1]), "=r"(line.words[2]), "=r"(line.words[3])
               : "l"(from)
               : "memory");
  return line;
}
__device__ __forceinline__ void lay_line(uint32 to, const Line16& line) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(line.words[0]), "r"(line.words[1]),
               "r"(line.words[2]), "r"(line.words[3])
               : "memory");
}
__device__ __forceinline__ Line16 laid_line(uint32 from) {
  Line16 line;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(line.words[0]), "=r"(line.words[1]), "=r"(line.words[2]), "=r"(line.words[3])
               : "r"(from)
               : "memory");
  return line;
}
__device__ __forceinline__ void engine_store(char* to, uint32 from, uint32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void store_line(char* to, const Line16& line) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(line.words[0]), "r"(line.words[1]),
               "r"(line.words[2]), "r"(line.words[3])
               : "memory");
}

// A block's words: the ring's barriers, the number of tiles that each warp has written, and of those that have left.
template <int kStages, int kWarps>
struct MatmulShared {
  static constexpr uint32 kLeft = ~0u;  // give up
  uint64 full[kStages], empty[kStages];
  uint32 laid[kWarps], left;
};

__device__ __forceinline__ void tell_block(uint32& word, uint32 value) {
  asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(shared_address(&word)), "r"(value) : "memory");
}
__device__ __forceinline__ uint32 hear_block(const uint32& word) {
  uint32 value;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(value) : "r"(shared_address(&word)) : "memory");
  return value;
}

// wgmma's name of the format.
template <class Format>
struct MatmulElement;
template <>
struct MatmulElement<BFloat16> {
  using Type = loop::bf16;
};
template <>
struct MatmulElement<Float16> {
  using Type = loop::f16;
};

// `kAcross`: b is contiguous along columns, else along its depth.
template <class Format, int kRows, int kColumns, bool kAcross, MatmulMode kMode>
struct Matmul {
  static constexpr MatmulShape kShape{kRows, kColumns};
  static constexpr int kStages = kShape.stages(), kGroups = kShape.groups(), kWarps = kShape.warps();
  static constexpr int kOver = kColumns / 8;
  static constexpr bool kSums = kMode != MatmulMode::all_gather;
  static constexpr uint32 kAll = ~0u;
  using Shared = MatmulShared<kStages, kWarps>;
  using Element = typename MatmulElement<Format>::Type;

  const MatmulParams& p;
  TileExchange& exchange;
  Shared& shared;
  const uint32 ring;  // address in shared memory; the warps' output buffers follow it

  static __device__ __forceinline__ uint32 lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ MatmulTile tile_at(uint32 v) const { return matmul_tile<kRows, kColumns, kMode>(p, v); }
  __device__ __forceinline__ uint32 steps() const { return (p.depth + MatmulShape::kDepth - 1) / MatmulShape::kDepth; }

  __device__ __forceinline__ uint32 laid_at(uint32 warp) const {
    return ring + kShape.ring_bytes() + warp * kShape.laid_bytes();
  }
  // Whether any of a warp's rows of the tile exist.
  __device__ __forceinline__ bool has_rows(const MatmulTile& tile, uint32 warp) const {
    return tile.row + warp * 16 < p.part_rows;
  }

  // Waits until each peer has announced itself; from then on this rank may store there. Lane r gets rank r's place.
  __device__ __forceinline__ bool meet(char*& place) {
    const int peer = static_cast<int>(lane());
    if (peer < p.links.ranks) place = exchange.place_of(peer);
    return __all_sync(kAll, peer >= p.links.ranks || place != nullptr) != 0;
  }

  // The work of one warp: loads what the groups multiply, in their order.
  __device__ __forceinline__ void bring() {
    uint32 stage = 0, parity = 1;
    for (uint32 v = blockIdx.x; v < p.tiles; v += gridDim.x) {
      const MatmulTile tile = tile_at(v);
      const TensorMap* a = &p.a;
      uint32 row = tile.row;
      if constexpr (kMode == MatmulMode::reduce_scatter) row += static_cast<uint32>(tile.part) * p.part_rows;
      if (kMode == MatmulMode::all_gather && tile.part != p.links.rank) {
        static_assert(kRows >> kPushShift <= 32, "a flag for each lane");
        const uint32 flag = (tile.row >> p.push_shift) + lane();
        if (flag << p.push_shift < min(tile.row + kRows, p.part_rows)) exchange.await(tile.part, flag);
        __syncwarp();
        asm volatile("fence.proxy.async.global;" ::: "memory");
        a = &p.gathered;
        row += static_cast<uint32>(tile.part) * p.part_rows;
      }
      ARK_ROLLED for (uint32 step = 0; step < steps(); ++step) {
        while (!barrier_passed(&shared.empty[stage], parity)) {
        }
        if (lane() == 0) {
          uint64* const full = &shared.full[stage];
          const uint32 at = ring + stage * kShape.stage_bytes(), columns = at + kRows * 128;
          const int depth = static_cast<int>(step * MatmulShape::kDepth);
          barrier_expect(full, kShape.stage_bytes());
          tensor_load(at, *a, depth, static_cast<int>(row), full);
          if constexpr (kAcross) {
            ARK_UNROLL for (int c = 0; c < kColumns; c += 64)
                tensor_load(columns + c * 128, p.b, static_cast<int>(tile.column) + c, depth, full);
          } else {
            tensor_load(columns, p.b, depth, static_cast<int>(tile.column), full);
          }
        }
        __syncwarp();
        if (++stage == kStages) stage = 0, parity ^= 1;
      }
    }
  }

  // The work of one warp: stores what the groups have written to shared memory at its destination, and tells owners.
  __device__ __forceinline__ void store() {
    uint32 count = 0;
    char* place = nullptr;
    bool met = !kSums;
    for (uint32 v = blockIdx.x; v < p.tiles; v += gridDim.x) {
      const MatmulTile tile = tile_at(v);
      const bool share = kSums && tile.part != p.links.rank;
      ++count;
      bool well = true;
      if (lane() < kWarps) {
        uint32 laid;
        while ((laid = hear_block(shared.laid[lane()])) < count) __nanosleep(40);
        well = laid != Shared::kLeft;
      }
      well = __all_sync(kAll, well) != 0;
      if (well && !met) well = meet(place), met = true;
      if (!well) break;
      const bool mine = lane() < kWarps && has_rows(tile, lane());
      if (share) {
        if (mine)
          engine_store(slot(tile.part, p.links.rank, tile, lane()), laid_at(lane()), kShape.tile_bytes() / kWarps);
      } else {
        store_rows(tile, place);
      }
      bulk_commit();
      bulk_wait_read<0>();
      __syncwarp();
      if (lane() == 0) tell_block(shared.left, count);
      if (share) {
        bulk_wait_written<0>();
        if (mine) exchange.raise(tile.part, tile.number * kWarps + lane());
      }
    }
    if (lane() == 0) tell_block(shared.left, Shared::kLeft);  // no one waits for this warp any more
    bulk_wait_written<0>();
    __syncwarp();
  }

  // Stores a tile of the result row by row.
  __device__ __forceinline__ void store_rows(const MatmulTile& tile, char* place) const {
    const uint32 first = kMode == MatmulMode::all_gather ? static_cast<uint32>(tile.part) * p.part_rows : 0;
    const uint32 bytes = min(static_cast<uint32>(kColumns), p.columns - tile.column) * 2;
    ARK_ROLLED for (uint32 row = lane(); row < kRows; row += 32) {
      const bool wanted = tile.row + row < p.part_rows;
      const uint32 from = laid_at(row / 16) + row % 16 * kShape.pitch();
      const uint64 to = uint64{first + tile.row + row} * p.out_bytes + tile.column * 2;
      if constexpr (kMode == MatmulMode::all_reduce) {
        ARK_ROLLED for (int r = 0; r < p.links.ranks; ++r) {
          char* const theirs = reinterpret_cast<char*>(__shfl_sync(kAll, reinterpret_cast<uint64>(place), r));
          if (wanted) engine_store(theirs + to, from, bytes);
        }
      } else if (wanted) {
        engine_store(p.out + to, from, bytes);
      }
    }
  }

  // The work of two warps: this rank's rows to all peers.
  __device__ __forceinline__ void push() {
    constexpr int kAhead = 4;
    const uint32 pieces = (p.part_rows + (1u << p.push_shift) - 1) >> p.push_shift, lines = p.depth / 8;
    char* place = nullptr;
    bool met = false;
    for (uint32 piece = blockIdx.x * 2 + threadIdx.x / 32 - 2; piece < pieces; piece += gridDim.x * 2) {
      if (!met && !meet(place)) return;
      met = true;
      const uint32 end = min((piece + 1) << p.push_shift, p.part_rows);
      for (uint32 row = piece << p.push_shift; row < end; ++row) {
        const char* const from = p.rows + row * p.row_bytes;
        const uint64 to = (uint64{static_cast<uint32>(p.links.rank)} * p.part_rows + row) * p.depth * 2;
        ARK_ROLLED for (uint32 line = lane(); line < lines; line += 32 * kAhead) {
          Line16 ahead[kAhead];
          ARK_UNROLL for (int i = 0; i < kAhead; ++i) if (line + i * 32 < lines) ahead[i] =
              load_line(from + (line + i * 32) * 16);
          ARK_ROLLED for (int r = 0; r < p.links.ranks; ++r) {
            if (r == p.links.rank) continue;
            ARK_UNROLL for (int i = 0; i < kAhead; ++i) if (line + i * 32 < lines)
                store_line(p.scratch[r] + to + (line + i * 32) * 16, ahead[i]);
          }
        }
      }
      __syncwarp();
      if (static_cast<int>(lane()) < p.links.ranks && static_cast<int>(lane()) != p.links.rank)
        exchange.raise(static_cast<int>(lane()), piece);
    }
  }

  // The address of a warp's share of a tile in the owner's scratch, as rank `source` stores it.
  __device__ __forceinline__ char* slot(int owner, int source, const MatmulTile& tile, uint32 warp) const {
    return p.scratch[owner] + (uint64{static_cast<uint32>(source)} * p.part_tiles + tile.number) * kShape.tile_bytes() +
           warp * (16 * kColumns * 2);
  }

  // Sums 4 * q to 4 * q + 3 of row lane / 4 (h: plus 8) in the format of transfer.
  static __device__ __forceinline__ Line16 line_of(const float (&sums)[kOver][4], int q, int h) {
    Line16 line;
    ARK_UNROLL for (int i = 0; i < 4; ++i) line.words[i] = Format::encode(&sums[4 * q + i][2 * h]);
    return line;
  }

  // Writes a share for the owner.
  __device__ __forceinline__ void lay_share(const float (&sums)[kOver][4], uint32 warp) const {
    const uint32 to = laid_at(warp) + lane() * 16;
    ARK_UNROLL for (int q = 0; q < kOver / 4; ++q) ARK_UNROLL for (int h = 0; h < 2; ++h)
        lay_line(to + (2 * q + h) * 512, line_of(sums, q, h));
  }

  // Writes rows of the result.
  __device__ __forceinline__ void lay_rows(const float (&sums)[kOver][4], uint32 warp) const {
    const uint32 to = laid_at(warp) + lane() / 4 * kShape.pitch() + lane() % 4 * 4;
    ARK_UNROLL for (int j = 0; j < kOver; ++j) ARK_UNROLL for (int h = 0; h < 2; ++h) asm volatile(
        "st.shared.u32 [%0], %1;" ::"r"(to + 8 * h * kShape.pitch() + j * 16),
        "r"(Format::encode(&sums[j][2 * h])) : "memory");
  }

  // Adds the peers' shares in rank order.
  __device__ __forceinline__ void add_peers(float (&sums)[kOver][4], const MatmulTile& tile, uint32 warp) const {
    constexpr int kLines = kOver == 32 ? 2 : 4;  // in flight together; registers hold no more besides the sums
    ARK_UNROLL for (int l = 0; l < kOver / 2; l += kLines) {
      float total[kLines][8];
      ARK_ROLLED for (int r = 0; r < p.links.ranks; ++r) {
        Line16 lines[kLines];
        if (r == p.links.rank) {
          ARK_UNROLL for (int i = 0; i < kLines; ++i) lines[i] = line_of(sums, (l + i) / 2, (l + i) % 2);
        } else {
          const char* const from = slot(p.links.rank, r, tile, warp) + lane() * 16;
          ARK_UNROLL for (int i = 0; i < kLines; ++i) lines[i] = load_line(from + (l + i) * 512);
        }
        ARK_UNROLL for (int i = 0; i < kLines; ++i) ARK_UNROLL for (int w = 0; w < 4; ++w) {
          float pair[2];
          Format::decode(lines[i].words[w], pair);
          ARK_UNROLL for (int e = 0; e < 2; ++e) total[i][2 * w + e] =
              r == 0 ? pair[e] : add(total[i][2 * w + e], pair[e]);
        }
      }
      ARK_UNROLL for (int i = 0; i < kLines; ++i) ARK_UNROLL for (int w = 0; w < 4; ++w)
          ARK_UNROLL for (int e = 0; e < 2; ++e) sums[4 * ((l + i) / 2) + w][2 * ((l + i) % 2) + e] =
              total[i][2 * w + e];
    }
  }

  // Sums start from the bias, which ranks may have or not.
  __device__ __forceinline__ void begin(float (&sums)[kOver][4], uint32 v) const {
    ARK_UNROLL for (int j = 0; j < kOver; ++j) ARK_UNROLL for (int e = 0; e < 4; ++e) sums[j][e] = 0;
    if (p.bias == nullptr) return;
    const uint32 column = tile_at(v).column + lane() % 4 * 2;
    ARK_UNROLL for (int j = 0; j < kOver; ++j) {
      if (column + j * 8 >= p.columns) continue;
      float pair[2];
      Format::decode(*reinterpret_cast<const uint32*>(p.bias + (column + j * 8) * 2), pair);
      ARK_UNROLL for (int e = 0; e < 4; ++e) sums[j][e] = pair[e % 2];
    }
  }

  // The work of a warp group.
  __device__ __forceinline__ void multiply(uint32 group) {
    using namespace ark::loop;
    const uint32 warp = group * 4 + threadIdx.x / 32 % 4;
    const uint32 rows = shared_matrix(ring + group * 64 * 128, 8192);
    const uint32 columns = shared_matrix(ring + kRows * 128, 8192);
    uint32 stage = 0, parity = 0, count = 0;
    bool well = true;
    float sums[kOver][4];
    for (uint32 v = blockIdx.x; v < p.tiles; v += gridDim.x) {
      begin(sums, v);
      uint32 before = 0;  // the stage being multiplied
      ARK_ROLLED for (uint32 step = 0; step < steps(); ++step) {
        while (!barrier_passed(&shared.full[stage], parity)) {
        }
        begin_group_multiply();
        ARK_UNROLL for (int k = 0; k < 4; ++k) group_multiply_add<Element, false, kAcross>(
            sums, moved_matrix(rows, stage * kShape.stage_bytes() + k * 32),
            moved_matrix(columns, stage * kShape.stage_bytes() + k * (kAcross ? 2048 : 32)));
        end_group_multiply();
        wait_group_multiply<1>();
        if (step != 0 && lane() == 0) barrier_arrive(&shared.empty[before]);
        before = stage;
        if (++stage == kStages) stage = 0, parity ^= 1;
      }
      wait_group_multiply(sums);
      if (steps() != 0 && lane() == 0) barrier_arrive(&shared.empty[before]);
      const MatmulTile tile = tile_at(v);
      ++count;
      const bool share = kSums && tile.part != p.links.rank;
      if (well && has_rows(tile, warp)) {
        if (kSums && !share) {
          const int peer = static_cast<int>(lane());
          const bool awaited =
              peer >= p.links.ranks || peer == p.links.rank || exchange.await(peer, tile.number * kWarps + warp);
          well = __all_sync(kAll, awaited) != 0;
          if (well) add_peers(sums, tile, warp);
        }
        while (hear_block(shared.left) < count - 1) __nanosleep(40);
        if (share)
          lay_share(sums, warp);
        else
          lay_rows(sums, warp);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      }
      __syncwarp();
      if (lane() == 0) tell_block(shared.laid[warp], well ? count : Shared::kLeft);
    }
  }
};

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Launch with kShape.threads() threads in one dimension and kShape.shared_bytes() of dynamic shared memory.
template <class Format, int kRows, int kColumns, bool kAcross, MatmulMode kMode>
__device__ __forceinline__ void matmul(const MatmulParams& p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Kernel = Matmul<Format, kRows, kColumns, kAcross, kMode>;
  constexpr bool kMoves = kRows == 128;  // registers, from the first warp group to the others
  extern __shared__ char memory[];
  __shared__ typename Kernel::Shared shared;
  begin_kernel();
  TileExchange exchange(p.links);
  if (threadIdx.x < Kernel::kStages) {
    barrier_init(&shared.full[threadIdx.x], 1);
    barrier_init(&shared.empty[threadIdx.x], Kernel::kWarps);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (threadIdx.x < Kernel::kWarps) shared.laid[threadIdx.x] = 0;
  if (threadIdx.x == 0) shared.left = 0;
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  Kernel kernel{p, exchange, shared, (shared_address(memory) + 1023) / 1024 * 1024};
  const uint32 group = threadIdx.x / 128, warp = threadIdx.x / 32;
  if (group == 0) {
    if constexpr (kMoves) give_registers<72>();
    if (warp == 0)
      kernel.bring();
    else if (warp == 1)
      kernel.store();
    else if constexpr (!Kernel::kSums)
      kernel.push();
  } else {
    if constexpr (kMoves) take_registers<216>();
    kernel.multiply(group - 1);
  }
  exchange.finish(kMode == MatmulMode::all_reduce);
#endif
}

#endif

}  // namespace ark::device
