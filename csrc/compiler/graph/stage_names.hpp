// The display name of a row program.
#pragma once

#include <string>

#include "compiler/graph/stage.hpp"

namespace ark::compiler {

std::string name_of_rows(const RowProgram& program);

}  // namespace ark::compiler
