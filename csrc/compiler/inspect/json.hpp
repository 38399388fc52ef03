// A plan for people and tools: as JSON, and as a drawing of its estimated schedule.
#pragma once

#include <string>
#include <vector>

#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// The start of each task in microseconds, if all tasks take their estimated time.
std::vector<double> estimated_starts(const Plan& plan);
std::string to_json(const Plan& plan);
// A drawing of the estimated schedule.
std::string to_svg(const Plan& plan);

}  // namespace ark::compiler
