// A planned region as torch.compile calls it: tensors in, tensors out, the loop kernel between.
//
// This folder is what of the compiler knows torch. A region is compiled for shapes, strides and types; every call is
// held against them (a mistake of a guard would be a wrong number, and the check costs a few nanoseconds a tensor).
// Pointers are taken anew with each call, so that a parameter whose data was swapped is read where it lies now; process
// groups are looked up by name, so that one that was destroyed and made again is the new one.
//
// On a GPU a call is what PyTorch's own operators are: it returns when the kernel is enqueued on the current stream of
// the region's device, and may be captured in a CUDA graph.
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
  std::string name;                 // in profiles, traces and errors
  int device = -1;                  // which GPU; -1: the CPU
  int workers = 0;                  // threads; 0: as many as PyTorch uses (on a GPU: blocks, one a multiprocessor)
  std::vector<std::string> groups;  // what the graph's collectives number: names that PyTorch knows process groups by
  // What runs a call whose group ark does not carry on GPUs; none: such a call is an error.
  std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> otherwise;
  bool multi_step = false;  // for run_steps()
  CacheChoice cache = CacheChoice::automatic;
  CacheCosts caches = {};       // what was measured; `bytes` is the device's
  std::string dump_passes;      // a folder for what each pass leaves; empty: none
  bool measured_costs = false;  // planned with what work costs on this machine, instead of assumed figures
};

// Compiles what measures the costs of this machine, unless that was done before; so that the first region, which needs
// it, finds it compiled. Does nothing where there is no compiler: the region will say so.
void prepare_costs();

// Whether a tensor that is written, by its position, shares a byte with another of them. Those without strided memory
// count as apart.
bool overlapping(const std::vector<at::Tensor>& tensors, const std::vector<size_t>& written);

class Region {
 public:
  // arguments[i] is the Value that input i is; results[k] the Value that spans output buffer k. Plans, validates,
  // compiles and loads. Throws Error.
  Region(Graph graph, std::vector<int> arguments, std::vector<int> results, const RegionOptions& options);

  // One fresh tensor for every output. Throws Error(invalid_argument) for an argument that is not what was compiled
  // for, naming it, and what the kernel found (an index out of range); what a group's collective throws.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs);
  // The same, but where inputs share memory that the region writes, nothing is done and nothing given.
  std::optional<std::vector<at::Tensor>> run_apart(const std::vector<at::Tensor>& inputs);

  // A multi-step region without results: `most` steps in one launch, each on what the one before left in the inputs, or
  // until its graph says stop; how many were done. `interrupted` is asked now and then on this thread: true ends the
  // launch in the middle of a step (on a GPU after one), with Error(aborted), and aborts the groups, whose ranks would
  // wait for this one.
  uint64_t run_steps(const std::vector<at::Tensor>& inputs, uint64_t most, const std::function<bool()>& interrupted);

  const Plan& plan() const { return plan_; }
  const std::string& source() const { return cuda_ ? cuda_->source() : kernel_->source(); }
  bool from_cache() const { return cuda_ ? cuda_->kernel().from_cache : kernel_->from_cache(); }
  const CudaLoop* cuda_kernel() const { return cuda_.get(); }  // nullptr: on the CPU
  const std::string& name() const { return options_.name; }
  // How long the kernel of the last call ran; 0 before the first, and on a GPU.
  double last_kernel_us() const { return static_cast<double>(last_kernel_ns_.load(std::memory_order_relaxed)) * 1e-3; }

 private:
  struct Spec {
    at::ScalarType type;
    std::vector<int64_t> sizes, strides;
    bool mutated = false;
    Box bytes;
  };
  // What every call holds an input against, small and side by side. Sizes, then strides, begin at extents_[first].
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
  std::unique_ptr<CpuLoop> kernel_;  // one of the two
  std::unique_ptr<CudaLoop> cuda_;
  std::unique_ptr<RegionRanks> ranks_;  // of a region on a GPU with collectives
  std::vector<Spec> inputs_, outputs_;
  std::vector<Expected> expected_;  // of inputs_
  std::vector<int64_t> extents_;
  std::vector<size_t> mutated_;       // of inputs_
  mutable std::mutex apart_mutex_;    // guards the next
  mutable std::vector<void*> apart_;  // where the inputs of a call lay that was checked
  std::atomic<uint64_t> last_kernel_ns_{0};
  std::once_flag traced_once_;
  std::shared_ptr<const TracedPlan> traced_;                                         // made when a trace asks for it
  std::map<int, std::function<void(const void* input, void* output)>> collectives_;  // by node
};

}  // namespace ark::compiler
