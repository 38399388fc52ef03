// Estimates how much memory this process can still get before the kernel's OOM killer acts.
//
// fallocate on shared memory takes all pages and then wakes the OOM killer of the machine or the container; asking
// first turns that into an error. The estimate uses /proc/meminfo and the limits of the process's control group (v2)
// and its parents. Page cache counts as free, because the kernel can drop it.
#pragma once

#include <cstdint>

namespace ark {

// Returns UINT64_MAX if nothing can be read.
uint64_t available_memory();

}  // namespace ark
