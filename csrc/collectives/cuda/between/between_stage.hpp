// The stage between nodes of a group's collectives on CUDA tensors: launches the kernels of cuda/between.cuh.
//
// All ranks open it together and agree whether they have it. Operations are enqueued on the operation's stream, in the
// same order on all ranks that exchange, and may be captured. There are as many rails as the smallest node has ranks; a
// rank whose place is beyond them has the scratch memory, and exchanges nothing.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "collectives/node_plan.hpp"
#include "collectives/operation.hpp"
#include "collectives/sum_order.hpp"
#include "cuda/between.cuh"
#include "cuda/device_memory.hpp"
#include "dma/rdma/gpu_window.hpp"
#include "shm/key_value.hpp"

namespace ark {

class BetweenStage {
 public:
  // Launches a kernel of so many blocks.
  using Launch =
      std::function<void(const Operation&, const device::BetweenParams&, device::BetweenForm, uint32_t blocks)>;
  struct Setup {
    int rank = 0, size = 1;
    int device = 0;
    std::shared_ptr<rdma::Messages> messages;
    device::GroupStatus* status = nullptr;        // of this node's kernels
    SumOrder sums;                                // the user's settings, alike on all ranks
    std::string refused;                          // why this rank has no such stage; empty: it may
    std::string prefix;                           // of keys in the store, of this call alone
    std::chrono::milliseconds timeout{0};         // of open()
    std::function<void(const Error&)> fail;       // a request of a kernel has failed; on another thread
    Launch launch;                                // empty: on the device
    std::optional<rdma::GpuWindow::Shape> shape;  // alike on all ranks; empty: by the number of nodes
    std::optional<rdma::GpuPath> path;            // empty: what the driver and the NIC offer
    size_t scratch_bytes = 32 << 20;              // alike on all ranks
    std::shared_ptr<KeyValueStore> store;         // of region_window(); may be null if that is not called
  };
  // Numbers of the windows of Messages that the stage uses: its first, and the first of regions, of which each has
  // some.
  static constexpr int32_t kWindows = 1 << 20, kRegionWindows = kWindows + (1 << 10), kWindowsOfRegion = 1 << 8;

  // Collective over the group's ranks. Returns null on all ranks, and sets `why`, if one refuses. Throws
  // Error(mismatch) if ranks have different settings.
  static std::unique_ptr<BetweenStage> open(Setup setup, const NodePlan& plan, KeyValueStore& store, std::string& why);
  // Why no group of this shape has the stage; empty: it may.
  static std::string why_not(const NodePlan& plan);

  // What each node brings to a sum: its own sum in the tensor's type, or in float32, or the inputs of its ranks, to be
  // added in the order of all ranks. Alike on all ranks.
  enum class Brings { sum, wide_sum, inputs };
  // What a sum takes of this node: one input, at `send`, or one of each of its ranks, of which this rank's is at
  // `send`.
  struct Parts {
    Brings brings = Brings::sum;
    int count = 1;
    const void* others = nullptr;  // that of place i for node n: at others + i * stride + at[n]
    uint64_t stride = 0;
    std::vector<uint64_t> at;
  };
  // By node, whom this rank exchanges with there. [own]: what this rank keeps, which is copied unless both are one.
  struct Blocks {
    explicit Blocks(int nodes) : send(nodes), receive(nodes), send_bytes(nodes), receive_bytes(nodes) {}
    std::vector<const void*> send;
    std::vector<void*> receive;
    std::vector<uint64_t> send_bytes, receive_bytes;
    Parts parts;
  };
  // Of ranks with a rail alone, as add().
  void move(const Operation& operation, const Blocks& blocks);
  // receive[own] = the sum of what all send to this node, in the order of nodes or of `parts`; with send_bytes[own] =
  // receive_bytes[own], and the same of each node, 0 where nothing comes here. average: divided by the group's size.
  void add(const Operation& operation, const Blocks& blocks, bool average);

  // Of PREMUL_SUM: what add() multiplies the input of that place by. set_factor() enqueues a write of this rank's.
  std::byte* factor(int node, int place) const;
  void set_factor(const Operation& operation) const;

  // Why regions of such a group have no window; empty: they may.
  static std::string no_regions(const NodePlan& plan);
  // A window for kernels of a compiled region, whose tasks use it as cuda/loop/between.cuh says. Collective, not during
  // capture. `why`: of this rank, why it has none; empty: it may. Returns null on all ranks, and sets `why`, if one has
  // none. Throws Error(mismatch) on all ranks if their fingerprints differ. `failed`: what has ended the meeting on
  // this rank, which throws it when all others know.
  std::unique_ptr<rdma::GpuWindow> region_window(const rdma::GpuWindow::Shape& shape, uint64_t fingerprint,
                                                 const std::exception_ptr& failed, std::string& why);

  // Memory of the device between the stages of an operation; larger tensors go in slices.
  std::byte* scratch() const { return reinterpret_cast<std::byte*>(scratch_.data()); }
  size_t scratch_bytes() const { return scratch_of(setup_.scratch_bytes); }
  static constexpr size_t scratch_of(size_t all) { return all - kFactors; }

  const rdma::GpuPath& path() const { return window_->path(); }      // of a rank with a rail
  uint64_t bytes() const { return window_ ? window_->bytes() : 0; }  // of memory that the NIC uses
  uint64_t requests() const { return window_ ? window_->requests() : 0; }
  const SumOrder& sums() const { return setup_.sums; }

 private:
  static constexpr size_t kFactorBytes = device::kFactorStride * sizeof(double);
  static constexpr size_t kFactors = kFactorBytes * device::kMostNodes * device::kMostPlaces;  // behind the scratch

  BetweenStage(Setup setup, const NodePlan& plan);
  void launch(const Operation& operation, const Blocks& blocks, device::BetweenForm form, bool average);
  void set_parts(const Operation& operation, const Parts& parts, device::BetweenParams& params) const;
  std::unique_ptr<rdma::GpuWindow> make_window(const rdma::GpuWindow::Shape& shape, int32_t number) const;

  const Setup setup_;
  const NodePlan plan_;
  const DeviceMemory scratch_;
  const std::unique_ptr<rdma::GpuWindow> window_;  // null beyond the rails
  uint32_t regions_ = 0;                           // calls of region_window()
};

}  // namespace ark
