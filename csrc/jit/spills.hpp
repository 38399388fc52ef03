// A function that needs more registers than a thread can have keeps some of them in memory ("spills"): it works,
// slowly. A kernel that must not do so is refused when it is compiled, before it is kept, with the name of the
// function.
#pragma once

#include <vector>

#include "jit/source.hpp"

namespace ark::jit {

// Throws Error(invalid_argument) for a function that does, if the source may not: its name, and what the lines of
// comment above it in the stub say.
void refuse_spills(const Source& source, const std::vector<Resources>& resources);

}  // namespace ark::jit
