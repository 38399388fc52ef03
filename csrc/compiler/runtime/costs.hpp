// This machine's costs, measured once and kept in the cache folder, so that a program's plans, and thus its cached
// kernels, stay the same in all processes and runs.
//
// The file's key is the processor, the number of workers and the key under which kernels are compiled (headers,
// compiler, options). A damaged file, or another machine's, is measured again; deleting it has the same effect. Costs
// affect nothing else: any cut of a plan gives the same bits, and collectives keep their order, so ranks with different
// figures still agree.
#pragma once

#include <functional>
#include <string>

#include "compiler/schedule/plan.hpp"
#include "jit/host_compiler.hpp"

namespace ark::compiler {

// `target` with this machine's costs. Returns `target` unchanged, and tells `log` why, if the costs cannot be kept
// (without a cache folder every run would have other plans) or measuring fails.
Target with_measured_costs(const Target& target, jit::HostCompiler& compiler,
                           const std::function<void(const std::string&)>& log);

// Compiles what the first call of with_measured_costs() on a machine needs, and leaves it in the cache. Never throws.
void prepare_costs(jit::HostCompiler& compiler) noexcept;

}  // namespace ark::compiler
