// Looks at hundreds of Python objects at once for train.capture, which does so before each replay: a loop in Python
// over the parameters of a large model would take as long as the rest of the call.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>

#include "bindings_plan.hpp"

namespace py = pybind11;

namespace ark {
namespace {

// Whether the dictionaries hold exactly these objects, in this order.
bool holds(const py::list& dicts, const py::list& values) {
  const auto count = static_cast<Py_ssize_t>(values.size());
  Py_ssize_t next = 0;
  for (const py::handle dict : dicts) {
    if (!PyDict_Check(dict.ptr())) throw py::type_error("holds: dicts has an element that is no dict");
    Py_ssize_t position = 0;
    PyObject* value = nullptr;
    while (PyDict_Next(dict.ptr(), &position, nullptr, &value)) {
      if (next == count || PyList_GET_ITEM(values.ptr(), next) != value) return false;
      ++next;
    }
  }
  return next == count;
}

const at::Tensor& unpacked(py::handle object) {
  if (!THPVariable_Check(object.ptr())) throw py::type_error("tensors has an element that is no tensor");
  return THPVariable_Unpack(object.ptr());
}

// The addresses of the tensors, 8 bytes each.
py::bytes addresses(const py::list& tensors) {
  std::string bytes(tensors.size() * sizeof(const void*), '\0');
  size_t at = 0;
  for (const py::handle tensor : tensors) {
    const void* address = unpacked(tensor).const_data_ptr();
    std::memcpy(bytes.data() + at, &address, sizeof address);
    at += sizeof address;
  }
  return bytes;
}

// Which of the tensors require gradients, a byte each.
py::bytes trained(const py::list& tensors) {
  std::string bytes;
  bytes.reserve(tensors.size());
  for (const py::handle tensor : tensors) bytes.push_back(unpacked(tensor).requires_grad() ? '\1' : '\0');
  return bytes;
}

}  // namespace

void bind_train(py::module_& m) {
  m.def("_holds", &holds, py::arg("dicts"), py::arg("values"));
  m.def("_addresses", &addresses, py::arg("tensors"));
  m.def("_trained", &trained, py::arg("tensors"));
}

}  // namespace ark
