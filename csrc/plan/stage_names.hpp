// What people call a row program.
#pragma once

#include <string>

#include "plan/stage.hpp"

namespace ark::plan {

std::string name_of_rows(const RowProgram& program);

}  // namespace ark::plan
