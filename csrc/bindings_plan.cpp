// ark_torch._C.plan: the planner's functions for the front end of torch.compile (ark_torch/compile).
#include "bindings_plan.hpp"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/pythoncapi_compat.h>

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <unistd.h>

#include <cstdlib>

#include "compiler/emit/cuda/emit_cuda.hpp"
#include "compiler/inspect/json.hpp"
#include "compiler/inspect/trace.hpp"
#include "compiler/passes/cache_policy.hpp"
#include "compiler/passes/lower_collectives.hpp"
#include "compiler/passes/pipeline.hpp"
#include "compiler/region/region.hpp"
#include "compiler/schedule/targets.hpp"
#include "process_group/translate.hpp"
#include "util/run_process.hpp"

namespace py = pybind11;

namespace {

// Throws a class of ark_torch.errors with this message. The caller must not hold the GIL.
[[noreturn]] void throw_own(const char* name, const ark::Error& error) {
  const py::gil_scoped_acquire gil;
  const py::object type = py::module_::import("ark_torch.errors").attr(name);
  PyErr_SetString(type.ptr(), error.what());
  throw py::error_already_set();
}

// Like with_torch_errors, but with the classes of ark_torch.errors for kinds that have one.
template <class F>
auto with_region_errors(F&& body) {
  try {
    return body();
  } catch (const ark::Error& error) {
    switch (error.kind()) {
      case ark::ErrorKind::out_of_range: throw_own("IndexOutOfRange", error);
      case ark::ErrorKind::compile_failed: throw_own("CompileError", error);
      default: ark::throw_torch(error);
    }
    std::abort();  // unreachable: all of them throw
  }
}

using namespace ark::compiler;

// A graph with its arguments and results.
struct GraphBuilder {
  Graph graph;
  std::vector<int> arguments, results;
};

template <class T>
T take(const py::dict& options, const char* key, T otherwise) {
  return options.contains(key) && !options[key].is_none() ? options[key].cast<T>() : otherwise;
}

Attribute attribute_of(const std::string& name, const py::handle& value) {
  if (py::isinstance<py::bool_>(value)) return value.cast<bool>();
  if (py::isinstance<py::int_>(value)) return value.cast<int64_t>();
  if (py::isinstance<py::float_>(value)) return value.cast<double>();
  if (py::isinstance<py::str>(value)) return value.cast<std::string>();
  if (py::isinstance<py::list>(value) || py::isinstance<py::tuple>(value)) return value.cast<std::vector<int64_t>>();
  throw py::type_error("attribute " + name + " is of no type that a node can hold");
}

int add_buffer(GraphBuilder& self, const std::string& kind, int argument, int64_t bytes, bool mutated, bool parameter) {
  Buffer buffer;
  if (kind == "input") {
    buffer.kind = Buffer::Kind::input;
  } else if (kind == "output") {
    buffer.kind = Buffer::Kind::output;
  } else if (kind != "temporary") {
    throw py::value_error("kind is '" + kind + "', not input, output or temporary");
  }
  buffer.argument = argument;
  buffer.bytes = bytes;
  buffer.mutated = mutated;
  buffer.parameter = parameter;
  return ark::with_torch_errors([&] { return self.graph.add_buffer(buffer); });
}

int add_value(GraphBuilder& self, int buffer, const std::string& dtype, Shape shape, Shape strides, int64_t offset) {
  return ark::with_torch_errors([&] {
    Value value;
    value.buffer = buffer;
    value.type = scalar_type(dtype);
    value.shape = std::move(shape);
    value.strides = std::move(strides);
    value.offset = offset;
    return self.graph.add_value(value);
  });
}

int add_literal(GraphBuilder& self, double value, const std::string& dtype) {
  return ark::with_torch_errors([&] {
    Value literal;
    literal.type = scalar_type(dtype);
    literal.literal = value;
    return self.graph.add_value(literal);
  });
}

int add_node(GraphBuilder& self, const std::string& op, std::vector<int> inputs, std::vector<int> outputs,
             const py::dict& attributes, const std::string& origin) {
  Node node{op, std::move(inputs), std::move(outputs), {}, origin};
  for (const auto& [name, value] : attributes) {
    const auto key = name.cast<std::string>();
    node.attributes[key] = attribute_of(key, value);
  }
  return ark::with_torch_errors([&] { return self.graph.add_node(node); });
}

// Like py::gil_scoped_release, but safe while the interpreter finalises: then Python would end a thread that asks for
// the GIL in the middle of C++ code, and so the process. Here the thread sleeps until the process is gone.
class ReleasedAtTheEndToo {
 public:
  ReleasedAtTheEndToo() : state_(PyEval_SaveThread()) {}
  ~ReleasedAtTheEndToo() {
    while (Py_IsFinalizing() != 0) ::pause();
    PyEval_RestoreThread(state_);
  }
  ReleasedAtTheEndToo(const ReleasedAtTheEndToo&) = delete;
  ReleasedAtTheEndToo& operator=(const ReleasedAtTheEndToo&) = delete;

 private:
  PyThreadState* state_;
};

// Overwrites the costs with the machine's measured cache gains, by names of CacheCosts.
CacheCosts with_cache_costs(CacheCosts costs, const py::dict& measured) {
  costs.kept_bytes = take(measured, "kept_bytes", costs.kept_bytes);
  costs.plain_where_near = take(measured, "plain_where_near", costs.plain_where_near);
  costs.states_first = take(measured, "states_first", costs.states_first);
  costs.reused_last = take(measured, "reused_last", costs.reused_last);
  return costs;
}

// A target's fields by name, in both directions.
template <class Visit>
void each_field(Target& target, Visit&& visit) {
  visit("name", target.name), visit("workers", target.workers), visit("page_bytes", target.page_bytes);
  visit("pages", target.pages), visit("in_flight", target.in_flight), visit("packets", target.packets);
  visit("packets_of_rows", target.packets_of_rows), visit("costs", target.costs);
  each_cost(target, visit);
  each_tile_cost(target, visit);
  visit("cache_bytes", target.caches.bytes);
  visit("kept_bytes", target.caches.kept_bytes), visit("plain_where_near", target.caches.plain_where_near);
  visit("states_first", target.caches.states_first), visit("reused_last", target.caches.reused_last);
  visit("stream_bytes", target.caches.stream_bytes), visit("worker_cache_bytes", target.caches.worker_bytes);
}

py::dict saved_of(const ark::compiler::Region& region) {
  SavedKernel kernel;
  {
    const py::gil_scoped_release no_gil;
    kernel = with_region_errors([&] { return region.saved(); });
  }
  py::dict target;
  Target copy = region.plan().target;
  each_field(copy, [&](const char* name, const auto& field) { target[name] = field; });
  py::dict saved;
  saved["target"] = target;
  saved["source"] = kernel.source;
  saved["binary"] = py::bytes(reinterpret_cast<const char*>(kernel.binary.data()), kernel.binary.size());
  return saved;
}

ark::compiler::RegionOptions::Saved saved_from(const py::dict& saved, CacheChoice caching) {
  ark::compiler::RegionOptions::Saved made;
  const py::dict target = saved["target"];
  each_field(made.target, [&](const char* name, auto& field) {
    field = target[name].cast<std::remove_reference_t<decltype(field)>>();
  });
  made.target.caching = caching;
  made.kernel.source = saved["source"].cast<std::string>();
  const std::string_view binary = saved["binary"].cast<std::string_view>();
  made.kernel.binary.assign(binary.begin(), binary.end());
  return made;
}

std::unique_ptr<ark::compiler::Region> make_region(const GraphBuilder& builder, const std::string& name,
                                                   const py::dict& options) {
  ark::compiler::RegionOptions settings;
  settings.name = name;
  settings.device = take(options, "device", -1);
  settings.workers = take(options, "threads", 0);
  settings.groups = take(options, "groups", settings.groups);
  settings.otherwise = take(options, "otherwise", settings.otherwise);
  settings.multi_step = take(options, "multi_step", false);
  settings.cache = ark::with_torch_errors([&] { return cache_choice(take(options, "cache", std::string("auto"))); });
  settings.caches = with_cache_costs({}, take(options, "caches", py::dict()));
  settings.measured_costs = take(options, "measured_costs", false);
  settings.costs = take(options, "costs", settings.costs);
  settings.costs_from = take(options, "costs_from", settings.costs_from);
  settings.dump_passes = take(options, "dump_passes", settings.dump_passes);
  if (options.contains("saved") && !options["saved"].is_none())
    settings.saved = saved_from(options["saved"], settings.cache);
  const ReleasedAtTheEndToo no_gil;
  return with_region_errors([&] {
    return std::make_unique<ark::compiler::Region>(builder.graph, builder.arguments, builder.results, settings);
  });
}

// Lets Ctrl-C interrupt a launch of many steps: Python's handlers run between tasks, several times a second.
uint64_t run_steps(ark::compiler::Region& region, const std::vector<at::Tensor>& inputs, uint64_t most) {
  std::exception_ptr raised;
  const auto interrupted = [&] {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() == 0) return false;
    raised = std::make_exception_ptr(py::error_already_set());
    return true;
  };
  try {
    const py::gil_scoped_release no_gil;
    return with_region_errors([&] { return region.run_steps(inputs, most, interrupted); });
  } catch (...) {
    if (raised) std::rethrow_exception(raised);
    throw;
  }
}

// Borrows the tensors of a tuple without reference counting. The tuple holds only tensors and must outlive this object.
class Borrowed {
 public:
  using Traits = c10::MaybeOwnedTraits<at::Tensor>;
  explicit Borrowed(PyObject* tuple) {
    const Py_ssize_t size = PyTuple_GET_SIZE(tuple);
    tensors_.reserve(static_cast<size_t>(size));
    for (Py_ssize_t i = 0; i < size; ++i)
      tensors_.push_back(Traits::createBorrow(THPVariable_Unpack(PyTuple_GET_ITEM(tuple, i))));
  }
  ~Borrowed() {
    for (at::Tensor& one : tensors_) Traits::destroyBorrow(one);
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;
  const std::vector<at::Tensor>& tensors() const { return tensors_; }

 private:
  std::vector<at::Tensor> tensors_;
};

// Calls a region without pybind11, whose argument handling takes longer than the checks. `self` is a tuple of the
// Region's object (kept alive), its address and a fallback. The fallback runs if arguments that the region writes
// overlap, or if one is of a subclass of Tensor, which may have no memory of its own (AsyncCollectiveTensor must be
// waited for).
PyObject* call_region(PyObject* self, PyObject* arguments) {
  HANDLE_TH_ERRORS
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments); ++i)
    if (!THPVariable_CheckExact(PyTuple_GET_ITEM(arguments, i)))
      return PyObject_CallObject(PyTuple_GET_ITEM(self, 2), arguments);
  auto& region = *static_cast<ark::compiler::Region*>(PyLong_AsVoidPtr(PyTuple_GET_ITEM(self, 1)));
  const Borrowed inputs(arguments);
  std::optional<std::vector<at::Tensor>> results;
  {
    const py::gil_scoped_release no_gil;
    results = with_region_errors([&] { return region.run_apart(inputs.tensors()); });
  }
  if (!results) return PyObject_CallObject(PyTuple_GET_ITEM(self, 2), arguments);
  py::list given(results->size());
  for (size_t i = 0; i < results->size(); ++i)
    PyList_SET_ITEM(given.ptr(), static_cast<Py_ssize_t>(i), THPVariable_Wrap(std::move((*results)[i])));
  return given.release().ptr();
  END_HANDLE_TH_ERRORS
}

py::object function_of(const py::object& region, const py::object& otherwise) {
  static PyMethodDef definition{"region", &call_region, METH_VARARGS, "Runs a compiled region."};
  auto& address = region.cast<ark::compiler::Region&>();
  const py::tuple self =
      py::make_tuple(region, py::reinterpret_steal<py::object>(PyLong_FromVoidPtr(&address)), otherwise);
  return py::reinterpret_steal<py::object>(PyCFunction_New(&definition, self.ptr()));
}

}  // namespace

namespace ark {

void bind_plan(py::module_& m) {
  py::module_ plan = m.def_submodule("plan", "The planner and its CPU target.");
  py::class_<GraphBuilder>(plan, "Graph")
      .def(py::init<>())
      .def("buffer", &add_buffer, py::arg("kind"), py::arg("argument"), py::arg("bytes"), py::arg("mutated") = false,
           py::arg("parameter") = false)
      .def("value", &add_value, py::arg("buffer"), py::arg("dtype"), py::arg("shape"), py::arg("strides"),
           py::arg("offset") = 0)
      .def("literal", &add_literal, py::arg("value"), py::arg("dtype"))
      .def("node", &add_node, py::arg("op"), py::arg("inputs"), py::arg("outputs"), py::arg("attributes"),
           py::arg("origin"))
      .def(
          "argument", [](GraphBuilder& self, int value) { self.arguments.push_back(value); }, py::arg("value"),
          "The value is the next input, all of it.")
      .def(
          "output", [](GraphBuilder& self, int value) { self.results.push_back(value); }, py::arg("value"),
          "The value is the next result; it spans an output buffer.");

  plan.def(
      "trace",
      [](const std::string& path, int64_t limit, int rank, int ranks, std::function<void(const std::string&)> log) {
        py::gil_scoped_release no_gil;
        ark::with_torch_errors([&] { Trace::configure({path, limit, rank, ranks, std::move(log)}); });
      },
      py::arg("path"), py::arg("limit"), py::arg("rank"), py::arg("ranks"), py::arg("log"),
      "Writes a timeline of all regions' steps from now on; an empty path ends it.");
  m.def("_overlapping", &ark::compiler::overlapping, py::arg("tensors"), py::arg("written"),
        "Whether one of the tensors in the positions `written` shares a byte with another of `tensors`.");
  plan.def("prepare_costs", &ark::compiler::prepare_costs, py::call_guard<py::gil_scoped_release>());
  plan.def("stop_compilers", &ark::jit::stop_processes);
  plan.def("targets", &known_targets);
  plan.def(
      "why_not_over_nodes",
      [](const std::string& op, const std::string& reduce_op, const std::string& type, int64_t bytes, int nodes,
         int places) {
        return ark::with_torch_errors(
            [&] { return why_not_over_nodes(op, reduce_op, scalar_type(type), bytes, nodes, places); });
      },
      py::arg("op"), py::arg("reduce_op"), py::arg("type"), py::arg("bytes"), py::arg("nodes"), py::arg("places"),
      "Why a loop kernel's tasks do not run this collective of a group over several nodes; empty: they do.");
  plan.def(
      "passes",
      [] {
        std::vector<std::tuple<std::string, std::string, std::string>> rows;
        for (const ark::compiler::Pass& pass : ark::compiler::pipeline()) {
          std::string when = pass.on == ark::compiler::Pass::On::gpu ? "GPUs" : "all";
          if (pass.steps == ark::compiler::Pass::Steps::one) when += ", one step a launch";
          if (pass.steps == ark::compiler::Pass::Steps::several) when += ", several steps a launch";
          rows.emplace_back(pass.name, when, pass.leaves);
        }
        return rows;
      },
      "The pipeline: each pass, for which targets, and what it leaves.");
  plan.def(
      "plan_for",
      [](const GraphBuilder& builder, const std::string& name, int workers, const std::string& cache,
         const std::map<std::string, double>& costs) {
        py::gil_scoped_release no_gil;
        return ark::with_torch_errors([&] {
          Target target = with_costs(target_named(name, workers), costs, "given");
          target.caching = cache_choice(cache);
          return to_json(make_plan(builder.graph, target));
        });
      },
      py::arg("graph"), py::arg("target"), py::arg("workers") = 0, py::arg("cache") = "auto",
      py::arg("costs") = std::map<std::string, double>(), "A plan for a target that may not be here, as JSON.");
  plan.def(
      "costs_of",
      [](const std::string& name) {
        std::map<std::string, double> figures;
        const auto note = [&](const char* figure, double value) { figures[figure] = value; };
        const Target target = name == "cpu" ? target_named(name) : gpu_target(name, 1);
        each_cost(target, note);
        if (name != "cpu") each_tile_cost(target, note);
        return figures;
      },
      py::arg("target"), "The built-in figures of what work costs, by name, of the CPU or a GPU's architecture.");
  plan.def(
      "cuda_source",
      [](const GraphBuilder& builder, const std::string& arch, int multiprocessors, bool multi_step,
         const std::string& cache, const py::dict& caches) {
        Target target = gpu_target(arch, multiprocessors);
        target.caches = with_cache_costs(target.caches, caches);
        py::gil_scoped_release no_gil;
        return ark::with_torch_errors([&] {
          ark::compiler::Graph graph = builder.graph;
          target.caching = cache_choice(cache);
          return emit_cuda(make_plan(std::move(graph), target, multi_step)).text;
        });
      },
      py::arg("graph"), py::arg("arch"), py::arg("multiprocessors"), py::arg("multi_step") = false,
      py::arg("cache") = "auto", py::arg("caches") = py::dict(), "The loop kernel for a GPU that may not be here.");
  plan.def("trace_path", [] {
    const Trace* trace = Trace::current();
    return trace == nullptr ? std::string() : trace->path();
  });
  plan.def("flush_trace", [] {
    py::gil_scoped_release no_gil;
    Trace::flush_current();
  });

  using ark::compiler::Region;
  py::class_<Region>(plan, "Region")
      .def(py::init(&make_region), py::arg("graph"), py::arg("name"), py::arg("options"))
      .def(
          "__call__",
          [](Region& self, const std::vector<at::Tensor>& inputs) {
            py::gil_scoped_release no_gil;
            return with_region_errors([&] { return self.run(inputs); });
          },
          py::arg("inputs"))
      .def("steps", &run_steps, py::arg("inputs"), py::arg("most"),
           "Many steps in one launch, of a multi_step region without results; how many were done.")
      .def("function", &function_of, py::arg("otherwise"),
           "A function of the inputs as arguments that does the same, quicker; otherwise() where one is of a class "
           "derived from Tensor.")
      .def(
          "stamped",
          [](Region& self, const std::vector<at::Tensor>& inputs) {
            py::gil_scoped_release no_gil;
            const auto stamps = with_region_errors([&] { return self.stamped(inputs); });
            std::vector<std::tuple<uint64_t, uint64_t, uint64_t>> tasks;
            for (const auto& one : stamps.tasks) tasks.emplace_back(one.came_ns, one.begin_ns, one.end_ns);
            return tasks;
          },
          py::arg("inputs"),
          "Runs a step; when each task's turn came, when it began after its waits, and when it ended, in ns.")
      .def("json", [](const Region& self) { return to_json(self.plan()); })
      .def("source", [](const Region& self) { return self.source(); })
      .def("saved", &saved_of, "What a process without a compiler needs: target, source and binary; option `saved`.")
      .def("__repr__",
           [](const Region& self) {
             return py::str("<ark region {!r}: {} tasks for {} workers, estimated {:.1f} us>")
                 .format(self.name(), self.plan().tasks.size(), self.plan().queues.size(), self.plan().estimated_us);
           })
      .def_property_readonly("name", &Region::name)
      .def_property_readonly("from_cache", [](const Region& self) { return self.from_cache(); })
      .def_property_readonly("last_kernel_us", &Region::last_kernel_us)
      .def_property_readonly("estimated_us", [](const Region& self) { return self.plan().estimated_us; })
      .def_property_readonly(
          "resources",
          [](const Region& self) {
            py::dict resources;
            if (const auto* loop = self.cuda_kernel()) {
              resources["registers"] = loop->kernel().registers;
              resources["shared_bytes"] = loop->shared_bytes() + loop->kernel().static_shared;
              resources["local_bytes"] = loop->kernel().local;
            }
            return resources;
          },
          "Of the loop kernel on a GPU: registers a thread, bytes of shared memory a block, of local memory a thread.")
      .def_property_readonly("costs", [](const Region& self) { return self.plan().target.costs; });
}

}  // namespace ark
