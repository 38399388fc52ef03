// How much memory this process could still get without the kernel killing somebody.
//
// fallocate on shared memory takes pages until there are none and then wakes the OOM killer, of the machine or of the
// container; asking first turns that into an error. The answer is an estimate from /proc/meminfo and the limits of the
// process's control group (v2) and its parents; page cache counts as free because the kernel gives it up.
#pragma once

#include <cstdint>

namespace ark {

// UINT64_MAX when nothing can be read.
uint64_t available_memory();

}  // namespace ark
