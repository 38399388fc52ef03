// A matrix product whose tiles leave for the rank that adds them as they are finished, or whose rows are multiplied as
// they come from their ranks: matmul_reduce_scatter, matmul_all_reduce, all_gather_matmul. For Hopper.
//
// One block an SM. Its first warp has the copy engine bring tiles of a and b through a ring in shared memory; groups of
// four warps multiply them (wgmma), 64 rows each, add in float32 and round once. What a block does in which order is
// fixed by its number, so that bits and waits are the same in every run.
//
// Sums. Each tile of the result has an owner. A block computes tiles of the peers' first, and stores them, rounded, in
// a slot of the owner's scratch memory: in the order in which threads hold them, since the same threads of the owner's
// block will load them. Tiles of its own come last: there a warp waits for the peers' shares of just its 16 rows, adds
// all ranks' in float32 in rank order, rounds once, and stores the result: in this rank's memory (reduce_scatter), or
// in every rank's (all_reduce). Peers computed those shares first of all, so the wait is short.
//
// Gathered rows. Three warps of each block copy this rank's rows to the peers, some rows at a time. Blocks multiply own
// rows first; before the copy engine reads others, its warp waits for their flags.
//
// Memory order. A warp's stores come before a barrier of the warp, and the flag is released at system scope behind it:
// for sums by a thread that stores nothing itself, since the release waits until the stores have arrived; the warp has
// told it by a word in shared memory (release and acquire in the block). Whoever waits for a flag acquires it. Between
// that and what the copy engine reads stands a fence of its proxy. Reuse: tiles.cuh; scratch is this launch's from a
// rank's announcement on, for which whoever stores there waits first.
//
// Liveness. Tiles of peers, and copies of rows, wait for announcements alone; what waits for flags comes behind those
// in every block, and all blocks are resident together (a cooperative launch). Waits for peers are bounded; what fails
// stores nothing more and raises no flag. Waits within a block are for its own warps, which always go on.
#pragma once

#include "cuda/bulk_copy.cuh"
#include "cuda/fused/tiles.cuh"
#if defined(__CUDACC__)
#include "cuda/loop/group.cuh"
#include "cuda/loop/ptx_group.cuh"
#endif

namespace ark::device {

enum class MatmulMode : int { all_reduce, reduce_scatter, all_gather };

// What the driver makes of a matrix for the copy engine (CUtensorMap).
struct alignas(64) TensorMap {
  uint64 words[16];
};

struct MatmulParams {
  TensorMap a, gathered, b;  // gathered: rows of all ranks, as they come
  TileLinks links;           // of all_reduce's result; else of scratch
  char* scratch[kMaxRanks];  // of every rank, as mapped here: slots for sums, or gathered rows
  const char* rows;          // all_gather: this rank's a
  char* out;                 // of reduce_scatter and all_gather
  uint64 row_bytes;          // from one row of a to the next; gathered ones stand side by side
  uint64 out_bytes;          // from one row of the result to the next
  uint32 part_rows;          // rows that a rank owns or sends; all_reduce: all rows
  uint32 columns, depth;
  uint32 row_tiles, column_tiles;  // of a part
  uint32 part_tiles;               // at most
  uint32 tiles;                    // of all parts
};

// Of an instantiation, for host and device.
struct MatmulShape {
  int rows, columns;  // of a tile

  static constexpr int kDepth = 64;        // of a stage: lines of 128 bytes
  static constexpr int kRing = 192 << 10;  // bytes
  ARK_HOST_DEVICE constexpr int groups() const { return rows / 64; }
  ARK_HOST_DEVICE constexpr int warps() const { return groups() * 4; }  // that multiply
  ARK_HOST_DEVICE constexpr int threads() const { return groups() * 128 + 128; }
  ARK_HOST_DEVICE constexpr int stage_bytes() const { return (rows + columns) * 128; }
  ARK_HOST_DEVICE constexpr int stages() const { return kRing / stage_bytes(); }
  ARK_HOST_DEVICE constexpr int shared_bytes() const { return 1024 + kRing + warps() * 2048; }
  ARK_HOST_DEVICE constexpr uint32 tile_bytes() const { return static_cast<uint32>(rows * columns * 2); }
};

inline constexpr uint32 kPushRows = 4;  // that a warp sends at a time, and a flag stands for

#if defined(__CUDACC__)

struct MatmulTile {
  int part;            // of which rank
  uint32 number;       // in the part
  uint32 row, column;  // where it begins, in the part (all_reduce: in the matrix)
};

// The v-th tile of this rank's order: sums, peers' parts first; gathered rows, the own part first.
template <int kRows, int kColumns, MatmulMode kMode>
__device__ __forceinline__ MatmulTile matmul_tile(const MatmulParams& p, uint32 v) {
  constexpr uint32 kBand = 1024 / kRows;  // rows of tiles that are computed together, for the second-level cache
  const uint32 ranks = static_cast<uint32>(p.links.ranks);
  MatmulTile tile;
  uint32 part = static_cast<uint32>(p.links.rank) + (kMode == MatmulMode::all_gather ? 0 : 1), in;
  if (part >= ranks) part -= ranks;
  if constexpr (kMode == MatmulMode::all_reduce) {
    const auto first = [&](uint32 of) { return static_cast<uint32>(uint64{p.tiles} * of / ranks); };
    for (;;) {
      const uint32 count = first(part + 1) - first(part);
      if (v < count) break;
      v -= count;
      if (++part == ranks) part = 0;
    }
    in = first(part) + v;
  } else {
    part += v / p.part_tiles;
    if (part >= ranks) part -= ranks;
    in = v = v % p.part_tiles;
  }
  tile.part = static_cast<int>(part), tile.number = v;
  const uint32 band = in / (kBand * p.column_tiles);
  in -= band * kBand * p.column_tiles;
  const uint32 height = min(kBand, p.row_tiles - band * kBand);
  tile.row = (band * kBand + in % height) * kRows, tile.column = in / height * kColumns;
  return tile;
}

// To shared memory, lines exchanged as wgmma wants them; outside of the matrix are zeros.
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
__device__ __forceinline__ void store_line(char* to, const Line16& line) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(line.words[0]), "r"(line.words[1]),
               "r"(line.words[2]), "r"(line.words[3])
               : "memory");
}

// Words of a block: the ring's barriers, and how many tiles for peers each warp has stored.
template <int kStages, int kWarps>
struct MatmulShared {
  static constexpr uint32 kLeft = ~0u;
  uint64 full[kStages], empty[kStages];
  uint32 stored[kWarps];
};

__device__ __forceinline__ void tell_stored(uint32& word, uint32 value) {
  asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(shared_address(&word)), "r"(value) : "memory");
}
__device__ __forceinline__ uint32 hear_stored(const uint32& word) {
  uint32 value;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(value) : "r"(shared_address(&word)) : "memory");
  return value;
}

// What wgmma calls a format.
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

// `kAcross`: columns of b are adjacent elements, else its depth is.
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
  const uint32 ring;  // address in shared memory

  static __device__ __forceinline__ uint32 lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ MatmulTile tile_at(uint32 v) const { return matmul_tile<kRows, kColumns, kMode>(p, v); }
  __device__ __forceinline__ uint32 steps() const { return (p.depth + MatmulShape::kDepth - 1) / MatmulShape::kDepth; }

  // Until each peer has announced itself: from then on this rank may store there. Lane r has the place of rank r.
  __device__ __forceinline__ bool meet(char*& place) {
    const int peer = static_cast<int>(lane());
    if (peer < p.links.ranks) place = exchange.place_of(peer);
    return __all_sync(kAll, peer >= p.links.ranks || place != nullptr) != 0;
  }

  // One warp: everything that the groups multiply, in their order.
  __device__ __forceinline__ void bring() {
    uint32 stage = 0, parity = 1;
    for (uint32 v = blockIdx.x; v < p.tiles; v += gridDim.x) {
      const MatmulTile tile = tile_at(v);
      const TensorMap* a = &p.a;
      uint32 row = tile.row;
      if constexpr (kMode == MatmulMode::reduce_scatter) row += static_cast<uint32>(tile.part) * p.part_rows;
      if (kMode == MatmulMode::all_gather && tile.part != p.links.rank) {
        const uint32 flag = tile.row / kPushRows + lane();
        if (lane() < kRows / kPushRows && flag * kPushRows < p.part_rows) exchange.await(tile.part, flag);
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

  // One warp: tells owners what the warps that multiply have stored for them, a lane for each.
  __device__ __forceinline__ void tell() {
    uint32 count = 0;
    bool left = false;
    for (uint32 v = blockIdx.x; v < p.tiles; v += gridDim.x) {
      const MatmulTile tile = tile_at(v);
      if (tile.part == p.links.rank) break;  // so are all that follow
      ++count;
      if (lane() >= kWarps || left) continue;
      uint32 seen;
      while ((seen = hear_stored(shared.stored[lane()])) < count) __nanosleep(100);
      left = seen == Shared::kLeft;
      if (!left) exchange.raise(tile.part, tile.number * kWarps + lane());
    }
  }

  // Three warps: this rank's rows to all peers.
  __device__ __forceinline__ void push() {
    constexpr int kAhead = 4;
    const uint32 pieces = (p.part_rows + kPushRows - 1) / kPushRows, lines = p.depth / 8;
    char* place = nullptr;
    bool met = false;
    for (uint32 piece = blockIdx.x * 3 + threadIdx.x / 32 - 1; piece < pieces; piece += gridDim.x * 3) {
      if (!met && !meet(place)) return;
      met = true;
      const uint32 end = min((piece + 1) * kPushRows, p.part_rows);
      for (uint32 row = piece * kPushRows; row < end; ++row) {
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

  // Where this warp's share of a tile lies in the owner's scratch, as rank `source` stores it.
  __device__ __forceinline__ char* slot(int owner, int source, const MatmulTile& tile, uint32 warp) const {
    return p.scratch[owner] + (uint64{static_cast<uint32>(source)} * p.part_tiles + tile.number) * kShape.tile_bytes() +
           warp * (16 * kColumns * 2) + lane() * 16;
  }

  // Sums 4 * q to 4 * q + 3 of row lane / 4 (h: and 8) as they travel.
  static __device__ __forceinline__ Line16 line_of(const float (&sums)[kOver][4], int q, int h) {
    Line16 line;
    ARK_UNROLL for (int i = 0; i < 4; ++i) line.words[i] = Format::encode(&sums[4 * q + i][2 * h]);
    return line;
  }

  // To the owner. What fails is not told.
  __device__ __forceinline__ void send(const float (&sums)[kOver][4], const MatmulTile& tile, uint32 warp) const {
    char* const to = slot(tile.part, p.links.rank, tile, warp);
    ARK_UNROLL for (int q = 0; q < kOver / 4; ++q) ARK_UNROLL for (int h = 0; h < 2; ++h)
        store_line(to + (2 * q + h) * 512, line_of(sums, q, h));
  }

  // Adds the peers' shares, in rank order.
  __device__ __forceinline__ void add_peers(float (&sums)[kOver][4], const MatmulTile& tile, uint32 warp) const {
    constexpr int kLines = kOver == 32 ? 2 : 4;  // under way together; more do not fit beside the sums
    ARK_UNROLL for (int l = 0; l < kOver / 2; l += kLines) {
      float total[kLines][8];
      ARK_ROLLED for (int r = 0; r < p.links.ranks; ++r) {
        Line16 lines[kLines];
        if (r == p.links.rank) {
          ARK_UNROLL for (int i = 0; i < kLines; ++i) lines[i] = line_of(sums, (l + i) / 2, (l + i) % 2);
        } else {
          const char* const from = slot(p.links.rank, r, tile, warp);
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

  // To the result, a line of 128 bytes of a row at a time: through shared memory, 64 columns after the other.
  __device__ __forceinline__ void store(const float (&sums)[kOver][4], const MatmulTile& tile, uint32 warp,
                                        char* place) const {
    const uint32 staged = ring + MatmulShape::kRing + warp * 2048, line = lane() / 4;
    uint32 row = tile.row + warp * 16 + lane() / 8;
    const uint32 end = p.part_rows;
    const uint32 first = kMode == MatmulMode::all_gather ? static_cast<uint32>(tile.part) * p.part_rows : 0;
    ARK_UNROLL for (int group = 0; group < kColumns / 64; ++group) {
      __syncwarp();  // all have loaded what stood there before
      ARK_UNROLL for (int j = 0; j < 8; ++j) ARK_UNROLL for (int h = 0; h < 2; ++h) {
        const uint32 at = staged + (line + 8 * h) * 128 + ((j ^ (line & 7)) * 16) + lane() % 4 * 4;
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(Format::encode(&sums[8 * group + j][2 * h])) : "memory");
      }
      __syncwarp();
      const uint32 column = tile.column + group * 64 + lane() % 8 * 8;
      ARK_UNROLL for (int i = 0; i < 4; ++i) {
        const uint32 of = i * 4 + lane() / 8, at = staged + of * 128 + ((lane() % 8 ^ (of & 7)) * 16);
        Line16 chunk;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(chunk.words[0]), "=r"(chunk.words[1]), "=r"(chunk.words[2]), "=r"(chunk.words[3])
                     : "r"(at)
                     : "memory");
        const bool wanted = row + i * 4 < end && column < p.columns;
        const uint64 to = uint64{first + row + i * 4} * p.out_bytes + column * 2;
        if constexpr (kMode == MatmulMode::all_reduce) {
          ARK_ROLLED for (int r = 0; r < p.links.ranks; ++r) {
            char* const theirs = reinterpret_cast<char*>(__shfl_sync(kAll, reinterpret_cast<uint64>(place), r));
            if (wanted) store_line(theirs + to, chunk);
          }
        } else if (wanted) {
          store_line(p.out + to, chunk);
        }
      }
    }
  }

  // A group of four warps.
  __device__ __forceinline__ void multiply(uint32 group) {
    using namespace ark::loop;
    const uint32 warp = group * 4 + threadIdx.x / 32 % 4;
    const uint32 rows = shared_matrix(ring + group * 64 * 128, 8192);
    const uint32 columns = shared_matrix(ring + kRows * 128, 8192);
    uint32 stage = 0, parity = 0, count = 0;
    bool met = false, well = true;
    char* place = nullptr;
    float sums[kOver][4];
    for (uint32 v = blockIdx.x; v < p.tiles; v += gridDim.x) {
      ARK_UNROLL for (int j = 0; j < kOver; ++j) ARK_UNROLL for (int e = 0; e < 4; ++e) sums[j][e] = 0;
      uint32 before = 0;  // the stage that is multiplied
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
      if constexpr (kSums) {
        if (!met) well = meet(place), met = true;
        if (tile.part != p.links.rank) {
          if (well) send(sums, tile, warp);
          __syncwarp();
          if (lane() == 0) tell_stored(shared.stored[warp], well ? ++count : Shared::kLeft);
          continue;
        }
        const int peer = static_cast<int>(lane());
        if (well) {
          const bool awaited =
              peer >= p.links.ranks || peer == p.links.rank || exchange.await(peer, tile.number * kWarps + warp);
          well = __all_sync(kAll, awaited) != 0;
        }
        if (!well) continue;
        add_peers(sums, tile, warp);
      }
      store(sums, tile, warp, place);
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

// `block`: kShape.threads() of one dimension, kShape.shared_bytes() of dynamic shared memory.
template <class Format, int kRows, int kColumns, bool kAcross, MatmulMode kMode>
__device__ __forceinline__ void matmul(const MatmulParams& p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Kernel = Matmul<Format, kRows, kColumns, kAcross, kMode>;
  constexpr bool kMoves = kRows == 128;  // registers, from the first group to the others
  extern __shared__ char memory[];
  __shared__ typename Kernel::Shared shared;
  begin_kernel();
  TileExchange exchange(p.links);
  if (threadIdx.x < Kernel::kStages) {
    barrier_init(&shared.full[threadIdx.x], 1);
    barrier_init(&shared.empty[threadIdx.x], Kernel::kWarps);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (threadIdx.x < Kernel::kWarps) shared.stored[threadIdx.x] = 0;
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  Kernel kernel{p, exchange, shared, (shared_address(memory) + 1023) / 1024 * 1024};
  const uint32 group = threadIdx.x / 128, warp = threadIdx.x / 32;
  if (group == 0) {
    if constexpr (kMoves) give_registers<72>();
    if (warp == 0)
      kernel.bring();
    else if constexpr (Kernel::kSums) {
      if (warp == 1) kernel.tell();
    } else {
      kernel.push();
    }
  } else {
    if constexpr (kMoves) take_registers<216>();
    kernel.multiply(group - 1);
  }
  exchange.finish(kMode == MatmulMode::all_reduce);
#endif
}

#endif

}  // namespace ark::device
