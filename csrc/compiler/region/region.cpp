// Construction of a region (region.hpp): plans, compiles, and binds collectives to their groups. Calls are in
// region_calls.cpp, input checks in region_inputs.cpp.
#include "compiler/region/region.hpp"
#include "compiler/inspect/dump_passes.hpp"
#include "compiler/passes/pipeline.hpp"

#include <ATen/Parallel.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <unistd.h>

#include <cstring>
#include <map>
#include <utility>

#include "compiler/runtime/costs.hpp"
#include "compiler/schedule/targets.hpp"
#include "jit/host_compiler.hpp"
#include "jit/kernel.hpp"
#include "process_group/work.hpp"
#include "util/error.hpp"

namespace ark::compiler {

namespace {

at::ScalarType to_torch(ScalarType type) {
  switch (type) {
    case ScalarType::f32: return at::kFloat;
    case ScalarType::bf16: return at::kBFloat16;
    case ScalarType::f16: return at::kHalf;
    case ScalarType::i64: return at::kLong;
    case ScalarType::i32: return at::kInt;
    case ScalarType::boolean: return at::kBool;
    case ScalarType::i8: return at::kChar;
    case ScalarType::u8: return at::kByte;
    case ScalarType::e4m3: return at::kFloat8_e4m3fn;
  }
  return at::kFloat;
}

// The process's compiler, with the settings in force when the first region is compiled. Never destroyed: the settings
// hold a Python function, and Python has exited by then.
jit::HostCompiler& host_compiler() {
  static auto* instance = new jit::HostCompiler(jit::settings());
  return *instance;
}

Target costs_of(const RegionOptions& options) {
  if (options.device >= 0) {
    const auto& library = jit::KernelLibrary::of(options.device);
    Target target =
        gpu_target(library.target().arch, options.workers > 0 ? options.workers : library.multiprocessors());
    target.caches = options.caches;
    target.caches.bytes = library.cache_bytes();
    return with_costs(std::move(target), options.costs, options.costs_from);
  }
  Target target;
  if (const long bytes = ::sysconf(_SC_LEVEL3_CACHE_SIZE); bytes > 0)
    target.caches.bytes = target.caches.stream_bytes = bytes;
  if (const long bytes = ::sysconf(_SC_LEVEL2_CACHE_SIZE); bytes > 0) target.caches.worker_bytes = bytes;
  target.workers = options.workers > 0 ? options.workers : at::get_num_threads();
  if (!options.costs.empty()) return with_costs(std::move(target), options.costs, options.costs_from);
  return options.measured_costs ? with_measured_costs(target, host_compiler(), jit::settings().log) : target;
}

// A region that was loaded needs its binary no longer.
RegionOptions without_saved(RegionOptions options) {
  options.saved.reset();
  return options;
}

Target target_of(const RegionOptions& options) {
  if (options.saved) {
    const Target& target = options.saved->target;
    const std::string here = options.device >= 0 ? jit::KernelLibrary::of(options.device).target().arch : "cpu";
    if (target.name != here)
      throw Error(ErrorKind::compile_failed,
                  options.name + ": a saved region for " + target.name + " does not run on " + here,
                  ErrorContext{-1, -1, "", 0, "Save the program on a machine of this kind."});
    return target;
  }
  Target target = costs_of(options);
  target.caching = options.cache;
  return target;
}

c10d::ReduceOp reduce_op(const std::string& name) {
  static const std::map<std::string, c10d::ReduceOp::RedOpType> known = {
      {"sum", c10d::ReduceOp::SUM}, {"avg", c10d::ReduceOp::AVG},   {"product", c10d::ReduceOp::PRODUCT},
      {"min", c10d::ReduceOp::MIN}, {"max", c10d::ReduceOp::MAX},   {"band", c10d::ReduceOp::BAND},
      {"bor", c10d::ReduceOp::BOR}, {"bxor", c10d::ReduceOp::BXOR},
  };
  const auto found = known.find(name);
  if (found == known.end()) throw Error(ErrorKind::invalid_argument, "there is no reduce_op '" + name + "'");
  return found->second;
}

}  // namespace

void prepare_costs() {
  prepare_costs(host_compiler());
}

Region::Region(Graph graph, std::vector<int> arguments, std::vector<int> results, const RegionOptions& options)
    : options_(without_saved(options)) {
  PassObserver observer;
  if (!options.dump_passes.empty()) observer = pass_dumper(options.dump_passes, options.name);
  plan_ = make_plan(std::move(graph), target_of(options), options.multi_step, observer);
  for (const int value : arguments) inputs_.push_back(spec_of(value));
  for (const int value : results) outputs_.push_back(spec_of(value));
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const Spec& spec = inputs_[i];
    expected_.push_back({spec.type, static_cast<uint32_t>(spec.sizes.size()), static_cast<uint32_t>(extents_.size())});
    extents_.insert(extents_.end(), spec.sizes.begin(), spec.sizes.end());
    extents_.insert(extents_.end(), spec.strides.begin(), spec.strides.end());
    if (spec.mutated) mutated_.push_back(i);
  }
  if (options.device >= 0) {
    cuda_ = std::make_unique<CudaLoop>(plan_, options.device, options.saved ? &options.saved->kernel : nullptr);
    if (const Exchanges& all = cuda_->exchanges(); all.ranks > 0)
      ranks_ = std::make_unique<RegionRanks>(options.name, options.groups.at(static_cast<size_t>(all.group)), device(),
                                             *cuda_);
    return;
  }
  for (const Stage& stage : plan_.stages)
    if (const auto* ends = std::get_if<CollectiveStage>(&stage.body)) add_collective(stage.node, *ends);
  kernel_ = options.saved ? std::make_unique<CpuLoop>(plan_, options.saved->kernel)
                          : std::make_unique<CpuLoop>(plan_, host_compiler());
  kernel_->set_collective(&Region::run_collective, this);
}

c10::intrusive_ptr<c10d::Backend> Region::group(int64_t number) const {
  const std::string& name = options_.groups.at(static_cast<size_t>(number));
  try {
    return c10d::resolve_process_group(name)->getBackend(c10::DeviceType::CPU);
  } catch (const c10::Error&) {
    throw Error(ErrorKind::closed,
                options_.name + ": there is no process group '" + name + "' for CPU tensors any more",
                ErrorContext{-1, -1, "", 0, "Make it again, or compile again (torch._dynamo.reset())."});
  }
}

// Binds the group's own collective, called synchronously on the caller's thread. Over shared memory it runs right
// there, after everything issued to the group before, on the channels of eager collectives.
void Region::add_collective(int index, const CollectiveStage& ends) {
  const Node& node = plan_.graph.nodes()[index];
  const auto group = [this, number = node.integer("group")] { return this->group(number); };
  const Spec in = spec_of(ends.input), out = spec_of(ends.output);
  const auto wrap = [](const void* data, const Spec& spec) {
    return at::from_blob(const_cast<void*>(data), spec.sizes, spec.strides, at::TensorOptions(spec.type));
  };
  if (node.op == "all_to_all") {
    collectives_[index] = [=, send = node.integers("input_splits"), receive = node.integers("output_splits")](
                              const void* input, void* output) mutable {
      at::Tensor to = wrap(output, out), from = wrap(input, in);
      wait_for(group()->alltoall_base(to, from, receive, send, {.asyncOp = false}));
    };
  } else if (node.op == "all_gather") {
    collectives_[index] = [=](const void* input, void* output) {
      at::Tensor to = wrap(output, out), from = wrap(input, in);
      c10d::AllgatherOptions options;
      options.asyncOp = false;
      wait_for(group()->_allgather_base(to, from, options));
    };
  } else if (node.op == "reduce_scatter") {
    collectives_[index] = [=, op = reduce_op(node.text("reduce_op"))](const void* input, void* output) {
      at::Tensor to = wrap(output, out), from = wrap(input, in);
      c10d::ReduceScatterOptions options;
      options.reduceOp = op;
      options.asyncOp = false;
      wait_for(group()->_reduce_scatter_base(to, from, options));
    };
  } else {
    collectives_[index] = [=, op = reduce_op(node.text("reduce_op")),
                           bytes = plan_.graph.values()[ends.output].elements() *
                                   size_of(plan_.graph.values()[ends.output].type)](const void* input, void* output) {
      if (input != output) std::memcpy(output, input, bytes);
      std::vector<at::Tensor> tensors{wrap(output, out)};
      c10d::AllreduceOptions options;
      options.reduceOp = op;
      options.asyncOp = false;
      wait_for(group()->allreduce(tensors, options));
    };
  }
}

Region::Spec Region::spec_of(int index) const {
  const Value& value = plan_.graph.values()[index];
  const Buffer& buffer = plan_.graph.buffer_of(index);
  return {to_torch(value.type), value.shape, value.strides, buffer.mutated, box_of(value)};
}

at::Device Region::device() const {
  return options_.device < 0 ? at::Device(at::kCPU)
                             : at::Device(at::kCUDA, static_cast<at::DeviceIndex>(options_.device));
}

}  // namespace ark::compiler
