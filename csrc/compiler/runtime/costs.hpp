// The measured costs of this machine, kept in the cache folder: measured once, and the same for all processes and runs
// from then on, so that a program's plans, and with them its kernels in the cache, stay what they are.
//
// They are kept by processor, number of workers and the key that kernels are compiled under (headers, compiler,
// options), in a file that people can read; one that is damaged, or another machine's, is measured again. Removing it
// has the machine measured anew.
//
// Nothing else hangs on costs: results have the same bits however a plan is cut, and collectives the same order, so
// that ranks whose figures differ still agree.
#pragma once

#include <functional>
#include <string>

#include "compiler/schedule/plan.hpp"
#include "jit/host_compiler.hpp"

namespace ark::compiler {

// `target` with its machine's costs. Where they cannot be kept (there is no cache folder) each run would have others,
// and where measuring fails there are none: then `target` as it is, and `log` hears why.
Target with_measured_costs(const Target& target, jit::HostCompiler& compiler,
                           const std::function<void(const std::string&)>& log);

// Compiles what the first call of the above on a machine needs, and leaves it in the cache. Throws nothing.
void prepare_costs(jit::HostCompiler& compiler) noexcept;

}  // namespace ark::compiler
