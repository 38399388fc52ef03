// Sizes at which PyTorch's NCCL was measured to be faster than ark, by GPU model, number of ranks and collective.
//
// A group on such GPUs leaves them to NCCL by default; a rule of ARK_DISPATCH replaces this table. Measured in CUDA
// graphs, as NCCL carries them for a group, with the barrier before and in a communicator of its own
// (docs/measurements.md). What is not listed stays with ark: it is faster there, or was not measured.
#include "collectives/cuda/cuda_dispatch.hpp"

namespace ark {

namespace {

constexpr uint64_t kMB = 1 << 20;

struct Row {
  const char* model;  // as the CUDA driver names it
  int ranks;
  Kind kind;
  uint64_t from, to = CudaDispatch::kNever;
};
// Sums only count with Options::reduction "fast".
constexpr Row kFaster[] = {
    {"NVIDIA H200", 4, Kind::all_reduce, 64 * kMB},
};

}  // namespace

void CudaDispatch::give_nccl(const std::string& model, int ranks) {
  for (const Row& row : kFaster) {
    if (model != row.model || ranks != row.ranks) continue;
    for (const NcclSizes& sizes : kNcclSizes)
      if (sizes.kind == row.kind) this->*sizes.from = row.from, this->*sizes.to = row.to;
    nccl_of_model = true;
  }
}

}  // namespace ark
