// What each pass of the compiler leaves, as text files: for whoever works on a pass (ARK_DUMP_PASSES).
#pragma once

#include <string>

#include "compiler/passes/pipeline.hpp"

namespace ark::compiler {

// An observer that checks the stages after each pass and writes `folder`/`name`.NN_pass.txt: stages with what they
// touch, and from the schedule on how many tasks, events and bytes there are. The folder is made where it is missing.
// Throws Error(invalid_argument) that names the pass which left stages that are wrong, Error(system) for a file that
// cannot be written.
PassObserver pass_dumper(std::string folder, std::string name);

}  // namespace ark::compiler
