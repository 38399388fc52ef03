// A plan as one C++ source for the host compiler: a function for each distinct stage body, tables for the queues.
//
// The source includes the device library (ark_torch/kernels/cpu) and nothing else; it exports the two symbols below.
#pragma once

#include <string>

#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

inline constexpr char kRunSymbol[] = "ark_plan_run";    // void (const ark::cpu::Launch*, int worker)
inline constexpr char kInfoSymbol[] = "ark_plan_info";  // const ark::cpu::PlanInfo

// Throws Error(invalid_argument) naming stage and origin if the CPU target cannot run the plan.
std::string emit_cpu(const Plan& plan);

}  // namespace ark::compiler
