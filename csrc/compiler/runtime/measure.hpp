// Measures what work costs on this machine (a Target's figures), with the kernels and the loop that run plans.
//
// Tasks with the usual kernels run in hand-made queues on all workers at once, with a stamp per task. A figure is the
// median of its tasks, in the best of several launches, so that other load on the machine does not count as its speed.
#pragma once

#include "compiler/schedule/plan.hpp"
#include "jit/host_compiler.hpp"

namespace ark::compiler {

// The source of those tasks, compiled like a plan's, which takes about a second.
extern const char kMeasuredSource[];

// `target` with figures for its number of workers; with one worker, wait_us is unchanged. `library`: kMeasuredSource,
// compiled. Takes a few hundredths of a second and 7 MB per worker. Throws Error if a worker makes no progress.
Target measured(Target target, const jit::LoadedLibrary& library);

}  // namespace ark::compiler
