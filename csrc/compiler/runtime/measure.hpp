// What work costs on this machine: the figures of a Target, measured with the kernels and the loop that run plans.
//
// Tasks of the usual kernels stand in queues made by hand, all workers at once, and stamps say what each took. A figure
// is the median of its tasks, in the best of several launches: what else the machine does must not look like its speed.
#pragma once

#include "compiler/schedule/plan.hpp"
#include "jit/host_compiler.hpp"

namespace ark::compiler {

// The source of those tasks, compiled as a plan's is; that takes about a second.
extern const char kMeasuredSource[];

// `target` with figures for its number of workers; with one, nobody waits and wait_us stays. `library`:
// kMeasuredSource, compiled. Takes some hundredths of a second, and 7 MB for each worker meanwhile. Throws Error where
// a worker does not come on.
Target measured(Target target, const jit::LoadedLibrary& library);

}  // namespace ark::compiler
