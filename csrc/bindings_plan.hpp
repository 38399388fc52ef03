// Declares parts of the Python bindings that bindings.cpp adds to the module: the planner (ark_torch._C.plan), how
// groups over several nodes divide their work, and what train.capture compares before each replay. So bindings.cpp does
// not need those headers.
#pragma once

#include <pybind11/pybind11.h>

namespace ark {

void bind_plan(pybind11::module_& m);
void bind_nodes(pybind11::module_& m);
void bind_train(pybind11::module_& m);

}  // namespace ark
