// Text files with the state after each pass of the compiler, for debugging passes. ARK_DUMP_PASSES names the folder.
#pragma once

#include <string>

#include "compiler/passes/pipeline.hpp"

namespace ark::compiler {

// An observer that checks the stages after each pass and writes `folder`/`name`.NN_pass.txt: stages with their
// accesses, and from the schedule on the numbers of tasks, events and bytes. Creates the folder if missing. Throws
// Error(invalid_argument) naming the pass that left invalid stages, Error(system) if a file cannot be written.
PassObserver pass_dumper(std::string folder, std::string name);

}  // namespace ark::compiler
