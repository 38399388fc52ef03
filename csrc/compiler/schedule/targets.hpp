// Targets by name, with figures of real machines, for plans that are made but not run here.
#pragma once

#include <string>
#include <vector>

#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

std::vector<std::string> known_targets();
// `workers` 0: what the target has. Throws Error(invalid_argument) for a name that is not known.
Target target_named(const std::string& name, int workers = 0);
// What is here: a GPU of that architecture with so many multiprocessors.
Target gpu_target(const std::string& arch, int multiprocessors);

}  // namespace ark::compiler
