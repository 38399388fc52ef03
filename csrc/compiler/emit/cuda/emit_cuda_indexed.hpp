// Indexed stages whose GPU text differs from the CPU's by more than the library it calls: instead of loops, a tile's
// elements are one flat space that threads share.
#pragma once

#include "compiler/emit/cpu/emit_cpu_function.hpp"

namespace ark::compiler {

void emit_cuda_gather(FunctionWriter& to, const GatherStage& gather);
void emit_cuda_scatter(FunctionWriter& to, const ScatterStage& scatter);
void emit_cuda_select(FunctionWriter& to, const SelectStage& select);
void emit_cuda_scan(FunctionWriter& to, const ScanStage& scan);

}  // namespace ark::compiler
