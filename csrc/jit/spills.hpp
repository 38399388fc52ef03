// Refuses register spills: a function that needs more registers than a thread has keeps some in memory and becomes
// slow. Kernels that must not spill are refused at compilation, before they are cached, with the function's name.
#pragma once

#include <vector>

#include "jit/source.hpp"

namespace ark::jit {

// Throws Error(invalid_argument) if a function spills and the source does not allow it. The error holds its name and
// the comment lines above it in the stub.
void refuse_spills(const Source& source, const std::vector<Resources>& resources);

}  // namespace ark::jit
