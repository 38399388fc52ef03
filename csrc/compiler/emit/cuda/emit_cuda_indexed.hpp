// Stages whose text for a GPU is not the CPU's with another library: there no loop is walked, a tile's elements are
// one flat space that the threads share.
#pragma once

#include "compiler/emit/cpu/emit_cpu_function.hpp"

namespace ark::compiler {

void emit_cuda_gather(FunctionWriter& to, const GatherStage& gather);
void emit_cuda_scatter(FunctionWriter& to, const ScatterStage& scatter);
void emit_cuda_select(FunctionWriter& to, const SelectStage& select);
void emit_cuda_scan(FunctionWriter& to, const ScanStage& scan);

}  // namespace ark::compiler
