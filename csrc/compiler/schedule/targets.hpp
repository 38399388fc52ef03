// Targets by name, with figures of real machines. They serve plans that are made on this machine but run elsewhere,
// such as those of tests.
#pragma once

#include <string>
#include <vector>

#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

std::vector<std::string> known_targets();
// `workers` 0: as many as the target has. Throws Error(invalid_argument) for an unknown name.
Target target_named(const std::string& name, int workers = 0);
// A GPU of this architecture with this many multiprocessors.
Target gpu_target(const std::string& arch, int multiprocessors);

}  // namespace ark::compiler
