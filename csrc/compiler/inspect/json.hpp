// A plan for people and tools.
#pragma once

#include <string>
#include <vector>

#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// When each task starts, in microseconds, if all takes what was estimated.
std::vector<double> estimated_starts(const Plan& plan);
std::string to_json(const Plan& plan);
// A drawing of the estimated schedule.
std::string to_svg(const Plan& plan);

}  // namespace ark::compiler
