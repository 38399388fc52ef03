// The frame that a plan runs in, summed up: see json_frame.cpp.
#pragma once

#include "health/json_writer.hpp"
#include "plan/plan.hpp"

namespace ark::plan {

void write_frame(JsonWriter& json, const Plan& plan);

}  // namespace ark::plan
