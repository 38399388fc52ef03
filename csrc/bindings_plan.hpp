// The planner's part of the bindings.
#pragma once

#include <pybind11/pybind11.h>

namespace ark {

void bind_plan(pybind11::module_& m);

}  // namespace ark
