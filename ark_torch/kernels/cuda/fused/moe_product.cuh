// The products of a rank's experts: rows sorted by expert times that expert's matrix. The number of rows per expert is
// read on the device. For Hopper.
//
// A block walks through the tiles of all experts that have rows (moe_tiles.cuh). Tiles that share a part of a matrix
// are adjacent, so that a matrix is read from memory once. As in matmul.cuh, one warp has the copy engine load tiles
// through a ring in shared memory, and warp groups multiply them (wgmma) and add in float32.
#pragma once

#include "cuda/fused/matmul.cuh"
#include "cuda/fused/moe_tiles.cuh"

namespace ark::device {

// Only existing rows are loaded, 16 at a time: experts usually have few rows, and then reading the matrices takes all
// the time. Whatever follows them in shared memory makes sums that are never stored. With gated experts a tile has some
// columns of the gate and the same ones of the factor, in the same threads, which finish both and store their product.
// Every step is rounded to the format, like PyTorch's sequence of operators.
//
// An element's sum is in depth order for any tile or part of one: bits do not depend on counts or shapes. No deadlock:
// blocks wait only for their own warps and the copy engine.

enum class MoeActivation : int { none, silu, gelu, gelu_tanh, relu };

struct MoeProductParams {
  TensorMap a, b;           // rows, in boxes of 16; [experts * lines, depth], in boxes of a tile's columns of each half
  TensorMap b_part;         // the same, in boxes of the columns of the narrowest part of a tile
  const long long* counts;  // rows per expert
  char* out;
  uint64 out_bytes;  // stride of rows
  uint32 experts;
  uint32 lines;           // of b, per expert
  uint32 columns, depth;  // of out; of a and b
};

// x / d, correctly rounded, for numbers x of half types and d of 1/4 to 2^126 or infinity. `about` is 1 / d within an
// ulp. The compiler's division has a branch, and a thread that divides 64 sums would wait for one after the other.
ARK_DEVICE_INLINE float quotient(float x, float d, float about) {
  const float inverse = multiply_add(about, multiply_add(-d, about, 1.0f), about);
  const float near = multiply(x, inverse), over = multiply_add(d, near, -x);
  return over == over ? multiply_add(-inverse, over, near) : multiply(x, about);  // infinities leave no remainder
}

// x / (1 + e), with both divided by 4, so that the reciprocal is a normal number.
template <class Reciprocal>
ARK_DEVICE_INLINE float divide_by_one_and(float e, float x, Reciprocal&& reciprocal) {
  const float d = multiply_add(e, 0.25f, 0.25f);
  return quotient(multiply(x, 0.25f), d, reciprocal(d));
}

#if defined(__CUDACC__)

template <MoeActivation kActivation>
__device__ __forceinline__ float activated(float x) {
  if constexpr (kActivation == MoeActivation::silu) {
    return divide_by_one_and(expf(-x), x, [](float d) {
      float about;
      asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(about) : "f"(d));
      return about;
    });
  }
  if constexpr (kActivation == MoeActivation::relu) return x < 0.0f ? 0.0f : x;
  if constexpr (kActivation == MoeActivation::gelu) return x * 0.5f * (1.0f + erff(x * 0.70710678118654752f));
  if constexpr (kActivation == MoeActivation::gelu_tanh)
    return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
  return x;
}

template <class Format, int kRows, int kColumns, bool kGated, MoeActivation kActivation>
struct MoeProduct {
  static constexpr MatmulShape kShape{kRows, kColumns};
  static constexpr int kStages = kShape.stages(), kWarps = kShape.warps(), kOver = kColumns / 8;
  static constexpr int kOut = kGated ? kColumns / 2 : kColumns;  // columns of the result
  static constexpr uint32 kBox = 16;                             // rows
  static constexpr int kMostAcross = static_cast<int>(moe_most_across(kShape));
  using Element = typename MatmulElement<Format>::Type;
  using Tiles = MoeTiles<kRows, kColumns, kOut, MoeCounts>;
  struct Shared {
    uint64 full[kStages], empty[kStages];
  };

  const MoeProductParams& p;
  Shared& shared;
  const uint32 ring;

  static __device__ __forceinline__ uint32 lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ uint32 steps() const { return (p.depth + MatmulShape::kDepth - 1) / MatmulShape::kDepth; }
  __device__ __forceinline__ uint32 laid_at(uint32 warp) const {
    return ring + kShape.ring_bytes() + warp * kShape.laid_bytes();
  }

  __device__ __forceinline__ Tiles tiles() const {
    return {MoeCounts(p.counts, p.experts), p.columns, blockIdx.x, gridDim.x};
  }

  // A place in the ring.
  struct Stage {
    uint32 number, parity;
    __device__ __forceinline__ void next() {
      if (++number == kStages) number = 0, parity ^= 1;
    }
    __device__ __forceinline__ void await(uint64 (&barriers)[kStages]) const {
      while (!barrier_passed(&barriers[number], parity)) {
      }
    }
  };

  // The work of one warp: loads what the groups multiply, in their order.
  __device__ __forceinline__ void bring() {
    Tiles mine = tiles();
    MoeTile tile;
    Stage stage{0, 1};
    for (uint32 n = 0; mine.find(n, tile); ++n) {
      const uint32 boxes = (tile.rows + kBox - 1) / kBox, width = kOut / tile.across;
      const int line = static_cast<int>(tile.expert * p.lines + tile.column);
      ARK_ROLLED for (uint32 step = 0; step < steps(); ++step) {
        stage.await(shared.empty);
        if (lane() == 0) {
          uint64* const full = &shared.full[stage.number];
          const uint32 at = ring + stage.number * kShape.stage_bytes(), columns = at + kRows * 128;
          const int depth = static_cast<int>(step * MatmulShape::kDepth);
          barrier_expect(full, (boxes * kBox + kColumns / tile.across) * 128);
          load_columns(columns, tile.across, depth, line, full);
          if constexpr (kGated)
            load_columns(columns + width * 128, tile.across, depth, line + static_cast<int>(p.columns), full);
          ARK_ROLLED for (uint32 b = 0; b < boxes; ++b)
              tensor_load(at + b * (kBox * 128), p.a, depth, static_cast<int>(tile.row + b * kBox), full);
        }
        __syncwarp();
        stage.next();
      }
    }
  }

  __device__ __forceinline__ void load_columns(uint32 to, uint32 across, int depth, int line, uint64* full) const {
    if (across == 1) return tensor_load(to, p.b, depth, line, full);
    constexpr int kLines = kOut / kMostAcross;
    const int end = kOut / static_cast<int>(across);
    ARK_ROLLED for (int i = 0; i < end; i += kLines) tensor_load(to + i * 128, p.b_part, depth, line + i, full);
  }

  // The results of two sums, which are rounded.
  static __device__ __forceinline__ uint32 finished(float* x, const float* factor) {
    if constexpr (kActivation != MoeActivation::none) {
      ARK_UNROLL for (int i = 0; i < 2; ++i) x[i] = activated<kActivation>(x[i]);
    }
    if constexpr (kGated) {
      Format::round(x);
      ARK_UNROLL for (int i = 0; i < 2; ++i) x[i] = multiply(x[i], factor[i]);
    }
    return Format::encode(x);
  }

  // Finishes the words that this thread laid down from `to` on, some at a time: activations of all sums at once would
  // need more registers than there are.
  template <int kWidth>
  static __device__ __forceinline__ void finish(uint32 to) {
#pragma unroll 4
    for (int i = 0; i < kWidth / 4; ++i) {
      const uint32 at = to + 8 * (i % 2) * kShape.pitch() + i / 2 * 16;
      uint32 word, other = 0;
      float x[2], factor[2];
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at) : "memory");
      if constexpr (kGated) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(other) : "r"(at + kWidth * 2) : "memory");
      Format::decode(word, x), Format::decode(other, factor);
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(finished(x, factor)) : "memory");
    }
  }

  // Stores a warp's 16 rows, which pass through shared memory to become wide stores. The copy engine would store them
  // behind all loads that it has been given.
  template <int kAcross>
  __device__ __forceinline__ void store(const float (&sums)[kOver / kAcross][4], const MoeTile& tile,
                                        uint32 warp) const {
    constexpr int kWidth = kOut / kAcross;
    constexpr uint32 kLines = kWidth / 8;  // of 16 bytes, in a row
    __syncwarp();                          // all lanes have read the rows before these
    const uint32 to = laid_at(warp) + lane() / 4 * kShape.pitch() + lane() % 4 * 4;
    ARK_UNROLL for (int j = 0; j < kOver / kAcross; ++j) ARK_UNROLL for (int h = 0; h < 2; ++h) asm volatile(
        "st.shared.u32 [%0], %1;" ::"r"(to + 8 * h * kShape.pitch() + j * 16),
        "r"(Format::encode(&sums[j][2 * h])) : "memory");
    if constexpr (kGated || kActivation != MoeActivation::none) finish<kWidth>(to);
    __syncwarp();
    const uint32 rows = tile.rows - warp * 16, lines = min(static_cast<uint32>(kWidth), p.columns - tile.column) / 8;
    char* const out = p.out + uint64{tile.row + warp * 16} * p.out_bytes + tile.column * 2;
    ARK_UNROLL for (uint32 i = 0; i < kLines / 2; ++i) {
      const uint32 row = (i * 32 + lane()) / kLines, line = (i * 32 + lane()) % kLines;
      if (row < rows && line < lines)
        store_line(out + row * p.out_bytes + line * 16, laid_line(laid_at(warp) + row * kShape.pitch() + line * 16));
    }
  }

  // Multiplies a tile, or a part of one, whose columns are those of a tile divided by kAcross.
  template <int kAcross>
  __device__ __forceinline__ void multiply_tile(const MoeTile& tile, uint32 group, Stage& stage) {
    using namespace ark::loop;
    const uint32 warp = group * 4 + threadIdx.x / 32 % 4;
    const uint32 rows = shared_matrix(ring + group * 64 * 128, 8192);
    const uint32 columns = shared_matrix(ring + kRows * 128, 8192);
    float sums[kOver / kAcross][4];
    ARK_UNROLL for (int j = 0; j < kOver / kAcross; ++j) ARK_UNROLL for (int e = 0; e < 4; ++e) sums[j][e] = 0;
    uint32 before = 0;  // the stage being multiplied
    ARK_ROLLED for (uint32 step = 0; step < steps(); ++step) {
      stage.await(shared.full);
      begin_group_multiply();
      ARK_UNROLL for (int k = 0; k < 4; ++k) group_multiply_add<Element, false, false>(
          sums, moved_matrix(rows, stage.number * kShape.stage_bytes() + k * 32),
          moved_matrix(columns, stage.number * kShape.stage_bytes() + k * 32));
      end_group_multiply();
      wait_group_multiply<1>();
      if (step != 0 && lane() == 0) barrier_arrive(&shared.empty[before]);
      before = stage.number;
      stage.next();
    }
    wait_group_multiply(sums);
    if (steps() != 0 && lane() == 0) barrier_arrive(&shared.empty[before]);
    if (warp * 16 < tile.rows) store<kAcross>(sums, tile, warp);
  }

  // A group that has no rows of a tile leaves the tensor cores to the other.
  __device__ __forceinline__ void leave_out(Stage& stage) {
    ARK_ROLLED for (uint32 step = 0; step < steps(); ++step) {
      stage.await(shared.full);
      __syncwarp();
      if (lane() == 0) barrier_arrive(&shared.empty[stage.number]);
      stage.next();
    }
  }

  // The work of a warp group.
  __device__ __forceinline__ void multiply_tiles(uint32 group) {
    Tiles mine = tiles();
    MoeTile tile;
    Stage stage{0, 0};
    for (uint32 n = 0; mine.find(n, tile); ++n) {
      if (kRows > 64 && group * 64 >= tile.rows) {
        leave_out(stage);
      } else if (tile.across == 1) {
        multiply_tile<1>(tile, group, stage);
      } else if (kMostAcross == 2 || tile.across == 2) {
        multiply_tile<2>(tile, group, stage);
      } else {
        multiply_tile<kMostAcross>(tile, group, stage);
      }
    }
  }
};

// Launch with kShape.threads() threads in one dimension and kShape.shared_bytes() of dynamic shared memory.
template <class Format, int kRows, int kColumns, bool kGated, MoeActivation kActivation>
__device__ __forceinline__ void moe_product(const MoeProductParams& p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Kernel = MoeProduct<Format, kRows, kColumns, kGated, kActivation>;
  constexpr bool kMoves = kRows == 128;  // registers, from the first warp group to the others
  extern __shared__ char memory[];
  __shared__ typename Kernel::Shared shared;
  if (threadIdx.x < Kernel::kStages) {
    barrier_init(&shared.full[threadIdx.x], 1);
    barrier_init(&shared.empty[threadIdx.x], Kernel::kWarps);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  begin_kernel();
  Kernel kernel{p, shared, (shared_address(memory) + 1023) / 1024 * 1024};
  const uint32 group = threadIdx.x / 128;
  if (group == 0) {
    if constexpr (kMoves) give_registers<72>();
    if (threadIdx.x / 32 == 0) kernel.bring();
  } else {
    if constexpr (kMoves) take_registers<216>();
    kernel.multiply_tiles(group - 1);
  }
#endif
}

#endif

}  // namespace ark::device
