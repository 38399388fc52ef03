// Declares the planner's part of the Python bindings (ark_torch._C.plan), which bindings.cpp adds to the module. So
// bindings.cpp does not need the planner's headers.
#pragma once

#include <pybind11/pybind11.h>

namespace ark {

void bind_plan(pybind11::module_& m);

}  // namespace ark
