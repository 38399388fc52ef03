// A plan as JSON, for people and tools.
#pragma once

#include <string>

#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

std::string to_json(const Plan& plan);

}  // namespace ark::compiler
