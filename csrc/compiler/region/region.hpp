// A planned region as torch.compile calls it: tensors in, tensors out, the loop kernel in between. Only this folder of
// the compiler knows torch. A region is compiled for shapes, strides and types, and checks them at every call: a few
// nanoseconds per tensor guard against wrong results. Every call reads pointers again, so a parameter whose data was
// swapped is read at its new address, and looks up process groups by name, so a group that was destroyed and made again
// is found. On a GPU a call behaves like PyTorch's operators: it returns once the kernel is enqueued on the current
// stream of the region's device, and may be captured in a CUDA graph.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "compiler/graph/box.hpp"
#include "compiler/inspect/trace.hpp"
#include "compiler/region/region_ranks.hpp"
#include "compiler/runtime/cpu_loop.hpp"
#include "compiler/runtime/cuda_loop.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

struct RegionOptions {
  std::string name;                 // for profiles, traces and errors
  int device = -1;                  // GPU index; -1: the CPU
  int workers = 0;                  // threads; 0: as many as PyTorch uses (on a GPU: blocks, one per multiprocessor)
  std::vector<std::string> groups;  // the process groups' names in PyTorch, indexed by the graph's collectives
  // Runs a call whose group ark does not carry on GPUs. If empty, such a call is an error.
  std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> otherwise;
  bool multi_step = false;  // for run_steps()
  CacheChoice cache = CacheChoice::automatic;
  CacheCosts caches = {};       // as measured; `bytes` is set from the device
  std::string dump_passes;      // folder for the state after each pass; empty: none
  bool measured_costs = false;  // CPU: plan with this machine's measured costs instead of assumed ones
  // Figures of what work costs, by name (targets.hpp), in place of the target's own, and where they come from.
  std::map<std::string, double> costs;
  std::string costs_from;
  // From another process: planned for that target, and its kernel loaded without a compiler.
  struct Saved {
    Target target;
    SavedKernel kernel;
  };
  std::optional<Saved> saved;
};

// Compiles the measurement of this machine's costs if they are not known, so that the first region that needs them
// finds it compiled. Does nothing without a compiler; the region will report that.
void prepare_costs();

// Whether a written tensor, given by position, shares a byte with another tensor. Tensors without strided memory count
// as disjoint.
bool overlapping(const std::vector<at::Tensor>& tensors, const std::vector<size_t>& written);

class Region {
 public:
  // arguments[i] is the Value of input i; results[k] is the Value that spans output buffer k. Plans, validates,
  // compiles and loads. Throws Error.
  Region(Graph graph, std::vector<int> arguments, std::vector<int> results, const RegionOptions& options);

  // Runs a step and returns when its tasks happened, by task. Waits for the step on a GPU.
  StepStamps stamped(const std::vector<at::Tensor>& inputs);

  // Returns a new tensor for each output. Throws Error(invalid_argument) naming an argument that does not match what
  // was compiled, errors found by the kernel (an index out of range), and exceptions of a group's collective.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs);
  // The same, but returns nullopt without running anything if inputs share memory that the region writes.
  std::optional<std::vector<at::Tensor>> run_apart(const std::vector<at::Tensor>& inputs);

  // Runs a multi-step region without results: up to `most` steps in one launch, each on what the previous one left in
  // the inputs, or until the graph says stop. Returns the number of steps done. This thread polls `interrupted`; true
  // ends the launch within a step (on a GPU: after one) with Error(aborted), and aborts the groups, since their other
  // ranks would wait for this one.
  uint64_t run_steps(const std::vector<at::Tensor>& inputs, uint64_t most, const std::function<bool()>& interrupted);

  const Plan& plan() const { return plan_; }
  // For RegionOptions::saved.
  SavedKernel saved() const { return cuda_ ? cuda_->saved() : kernel_->saved(); }
  const std::string& source() const { return cuda_ ? cuda_->source() : kernel_->source(); }
  bool from_cache() const { return cuda_ ? cuda_->kernel().from_cache : kernel_->from_cache(); }
  const CudaLoop* cuda_kernel() const { return cuda_.get(); }  // nullptr: on the CPU
  const std::string& name() const { return options_.name; }
  // Duration of the last call's kernel; 0 before the first call, and on a GPU.
  double last_kernel_us() const { return static_cast<double>(last_kernel_ns_.load(std::memory_order_relaxed)) * 1e-3; }

 private:
  struct Spec {
    at::ScalarType type;
    std::vector<int64_t> sizes, strides;
    bool mutated = false;
    Box bytes;
  };
  // What every call compares an input with, kept compact. Sizes, then strides, start at extents_[first].
  struct Expected {
    at::ScalarType type;
    uint32_t dims, first;
  };
  at::Device device() const;
  bool is_as_expected(const at::Tensor& input, const Expected& spec) const;
  void check(size_t i, const at::Tensor& input) const;
  std::vector<void*> pointers_of(const std::vector<at::Tensor>& inputs) const;
  template <class Launch>
  void launch(const std::vector<at::Tensor>& inputs, Launch&& call);
  uint64_t run_cuda_steps(const std::vector<at::Tensor>& inputs, uint64_t most,
                          const std::function<bool()>& interrupted);
  void bump_versions(const std::vector<at::Tensor>& inputs) const;
  bool run_cuda(const std::vector<at::Tensor>& inputs, void* const* pointers, void* const* results);
  bool overlap(const std::vector<void*>& pointers) const;
  using Copies = std::vector<std::pair<size_t, at::Tensor>>;  // of inputs, by their indices
  Copies align(const std::vector<at::Tensor>& inputs, std::vector<void*>& pointers) const;
  bool write_back(const std::vector<at::Tensor>& inputs, const Copies& copies) const;
  [[noreturn]] void fail_overlap() const;
  [[noreturn]] void fail_carried() const;
  c10::intrusive_ptr<c10d::Backend> group(int64_t number) const;
  template <class Run>
  void traced(Run&& run);
  Spec spec_of(int value) const;
  void add_collective(int node, const CollectiveStage& ends);
  static bool run_collective(void* region, int32_t node, const void* input, void* output);

  const RegionOptions options_;
  Plan plan_;
  std::unique_ptr<CpuLoop> kernel_;  // one of the two is set
  std::unique_ptr<CudaLoop> cuda_;
  std::unique_ptr<RegionRanks> ranks_;  // for a region on a GPU with collectives
  std::vector<Spec> inputs_, outputs_;
  std::vector<Expected> expected_;  // per input
  std::vector<int64_t> extents_;
  std::vector<size_t> mutated_;       // indices of inputs
  mutable std::mutex apart_mutex_;    // guards apart_
  mutable std::vector<void*> apart_;  // addresses of the last call's inputs found disjoint
  std::atomic<uint64_t> last_kernel_ns_{0};
  std::once_flag traced_once_;
  std::shared_ptr<const TracedPlan> traced_;                                         // created when a trace needs it
  std::map<int, std::function<void(const void* input, void* output)>> collectives_;  // by node
};

}  // namespace ark::compiler
