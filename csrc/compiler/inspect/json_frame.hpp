// The frame that a plan runs in, summed up: see json_frame.cpp.
#pragma once

#include "compiler/schedule/plan.hpp"
#include "util/json_writer.hpp"

namespace ark::compiler {

void write_frame(JsonWriter& json, const Plan& plan);

}  // namespace ark::compiler
