// ark_torch._C. Only this file and bindings_*.cpp use Python.
//
// Binds the process group and its options, the flight record, and functions for tools and tests.
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>

#include "bindings_plan.hpp"
#include "collectives/cpu/reduce/reduce.hpp"
#include "collectives/cuda/arena_memory.hpp"
#include "collectives/cuda/cuda_dispatch.hpp"
#include "collectives/cuda/stubs.hpp"
#include "cuda/driver.hpp"
#include "dma/rdma/engine.hpp"
#include "dma/rdma/gpu_memory.hpp"
#include "dma/rdma/status.hpp"
#include "jit/compiler.hpp"
#include "jit/prebuilt.hpp"
#include "jit/probe.hpp"
#include "process_group/process_group_ark.hpp"

namespace py = pybind11;
using ark::ProcessGroupArk;
using Options = ProcessGroupArk::Options;

namespace {

template <class T>
using Shared = c10::intrusive_ptr<T>;

// A rule in Python: (collective, algorithm, when, max_ranks, max_bytes, chunk_bytes).
using RuleTuple = std::tuple<std::string, std::string, std::string, uint32_t, uint64_t, uint32_t>;
constexpr const char* kNets[] = {"auto", "rdma", "gloo"};  // indexed by rdma::Wish
constexpr const char* kWhen[] = {"core_per_rank", "oversubscribed", "both"};

template <class Enum>
Enum named(const char* field, const std::string& name, int count) {
  for (int value = 0; value < count; ++value) {
    if (name == ark::name_of(static_cast<Enum>(value))) return static_cast<Enum>(value);
  }
  throw py::value_error(std::string("dispatch table: unknown ") + field + " '" + name + "'");
}

std::vector<ark::Rule> to_rules(const std::vector<RuleTuple>& tuples) {
  std::vector<ark::Rule> rules;
  for (const auto& [kind, algorithm, when, ranks, bytes, chunk] : tuples) {
    int w = 0;
    while (w < 3 && when != kWhen[w]) ++w;
    if (w == 3)
      throw py::value_error("dispatch table: 'when' is '" + when + "', not core_per_rank, oversubscribed or both");
    rules.push_back({named<ark::Kind>("collective", kind, ark::kKinds),
                     named<ark::Algorithm>("algorithm", algorithm, ark::kAlgorithms), static_cast<uint8_t>(w), 0, ranks,
                     bytes, chunk, 0});
  }
  return ark::with_torch_errors([&] { return ark::DispatchTable(rules).rules(); });
}

std::vector<RuleTuple> from_rules(const std::vector<ark::Rule>& rules) {
  std::vector<RuleTuple> tuples;
  for (const ark::Rule& rule : rules) {
    tuples.emplace_back(ark::name_of(rule.kind), ark::name_of(rule.algorithm), kWhen[rule.oversubscribed],
                        rule.max_ranks, rule.max_bytes, rule.chunk_bytes);
  }
  return tuples;
}

// A rule for CUDA tensors in Python: (max_ranks, {field: bytes}). Missing fields keep their measured values.
using CudaRuleTuple = std::pair<int, std::map<std::string, uint64_t>>;

std::vector<ark::CudaRule> to_cuda_rules(const std::vector<CudaRuleTuple>& tuples) {
  std::vector<ark::CudaRule> rules;
  for (const auto& [ranks, numbers] : tuples) {
    if (ranks < 1) throw py::value_error("dispatch table: cuda: max_ranks is " + std::to_string(ranks));
    rules.push_back({ranks, ark::with_torch_errors([&, &ranks = ranks, &numbers = numbers] {
                       return ark::CudaDispatch::measured(ranks, numbers);
                     })});
  }
  return rules;
}

std::vector<CudaRuleTuple> from_cuda_rules(const std::vector<ark::CudaRule>& rules) {
  std::vector<CudaRuleTuple> tuples;
  for (const ark::CudaRule& rule : rules) {
    tuples.emplace_back(rule.max_ranks, std::map<std::string, uint64_t>());
    for (const auto& field : ark::kCudaDispatchFields) tuples.back().second[field.name] = rule.dispatch.*field.value;
  }
  return tuples;
}

// Shows the options that users set, as they would write them; for tables only the number of rules.
py::str repr_of(const py::object& options) {
  const py::object mode = options.attr("shared_memory").attr("name");
  py::list shown;
  shown.append(py::str("shared_memory={}").format(mode));
  for (const char* name : {"debug", "node", "spin_us", "buffer_mb", "reduction", "order", "net", "share_gpu",
                           "disable_p2p", "timing", "flight_record", "flight_dump"}) {
    shown.append(py::str("{}={!r}").format(name, options.attr(name)));
  }
  for (const char* name : {"dispatch", "cuda_dispatch"}) {
    shown.append(py::str("{}=<{} rules>").format(name, py::len(options.attr(name))));
  }
  return py::str("ark_torch.Options({})").format(py::str(", ").attr("join")(shown));
}

Shared<Options> copy_of(const Options& options) {
  return c10::make_intrusive<Options>(options);
}

// Options of RDMA, and functions for `ark doctor`.
void bind_rdma(py::module_& m) {
  namespace rdma = ark::rdma;
  py::class_<rdma::Options>(m, "RdmaOptions")
      .def(py::init<>())
      .def_readwrite("library", &rdma::Options::library)
      .def_readwrite("device", &rdma::Options::device)
      .def_readwrite("port", &rdma::Options::port)
      .def_readwrite("gid_index", &rdma::Options::gid_index)
      .def_readwrite("mtu", &rdma::Options::mtu)
      .def_readwrite("traffic_class", &rdma::Options::traffic_class)
      .def_readwrite("service_level", &rdma::Options::service_level)
      .def_readwrite("pkey_index", &rdma::Options::pkey_index)
      .def_readwrite("timeout", &rdma::Options::timeout)
      .def_readwrite("retry_count", &rdma::Options::retry_count)
      .def_readwrite("rnr_retry", &rdma::Options::rnr_retry)
      .def_readwrite("cache_mb", &rdma::Options::cache_mb);
  // The device that would be used, why there is none, and every port with its problem; unused texts are empty.
  m.def("_rdma_devices", [](const rdma::Options& wanted) {
    py::gil_scoped_release no_gil;
    std::vector<std::pair<std::string, std::string>> ports;
    std::string chosen, reason;
    const auto verbs = rdma::Verbs::load(wanted.library, reason);
    if (!verbs) return std::tuple(chosen, reason, ports);
    try {
      for (const auto& port : rdma::ports_of(*verbs, wanted))
        ports.emplace_back(port.device + " port " + std::to_string(port.port), port.trouble);
      std::string left_out;
      for (const auto& rail : rdma::Engine::rails_of(wanted, left_out))
        chosen += (chosen.empty() ? "" : "\n") + rail->device()->text();
    } catch (const ark::Error& error) {
      reason = error.message() + (error.context().remedy.empty() ? "" : ". " + error.context().remedy);
    }
    return std::tuple(chosen, reason, ports);
  });
  m.def("_rdma_retry_budget", &rdma::retry_budget);
  // How memory of a CUDA device reaches each NIC: (NIC, why not directly; empty if directly).
  m.def("_rdma_gpu_paths", [](const rdma::Options& wanted, int gpu) {
    py::gil_scoped_release no_gil;
    std::string left_out;
    std::vector<std::pair<std::string, std::string>> paths;
    for (const auto& rail : rdma::Engine::rails_of(wanted, left_out))
      paths.emplace_back(rail->device()->port().device, rdma::gpu_path(*rail->device(), gpu).reason);
    return paths;
  });
}

// The kernel compilers; ark_torch/_jit.py calls these.
void bind_jit(py::module_& m) {
  using ark::jit::Settings;
  py::class_<Settings>(m, "_JitSettings")
      .def(py::init<>())
      .def_readwrite("version", &Settings::version)
      .def_readwrite("kernels_dir", &Settings::kernels_dir)
      .def_readwrite("cache_dir", &Settings::cache_dir)
      .def_readwrite("prebuilt_dir", &Settings::prebuilt_dir)
      .def_readwrite("nvrtc", &Settings::nvrtc)
      .def_readwrite("library_roots", &Settings::library_roots)
      .def_readwrite("toolkit_dirs", &Settings::toolkit_dirs)
      .def_readwrite("options", &Settings::options)
      .def_readwrite("cxx", &Settings::cxx)
      .def_readwrite("cxx_options", &Settings::cxx_options)
      .def_readwrite("cxx_words", &Settings::cxx_words)
      .def_readwrite("log", &Settings::log);
  m.def("_configure_jit", &ark::jit::configure);
  ark::jit::on_first_use([] {
    const py::gil_scoped_acquire gil;
    py::module_::import("ark_torch._jit").attr("configure")();
  });
  m.def("_has_cuda_driver", &ark::has_driver);
  m.def("_host_use", [](int ranks, bool by_nccl) {
    const ark::HostUse use = ark::host_use(ranks, by_nccl);
    return std::tuple(use.bytes_a_rank, use.nccl_from, use.nccl_to);
  });
  m.def("_cuda_driver_problem", &ark::driver_problem);
  m.def(
      "_probe_device",
      [](int device, size_t bytes) {
        ark::jit::ProbeResult found;
        {
          py::gil_scoped_release no_gil;
          ark::with_torch_errors([&] { found = ark::jit::probe_device(device, bytes); });
        }
        py::dict result;
        result["device"] = found.device;
        result["arch"] = found.arch;
        result["load_seconds"] = found.load_seconds;
        result["fill_gb_per_s"] = found.fill_gb_per_s;
        result["sum_gb_per_s"] = found.sum_gb_per_s;
        result["registers"] = found.registers;
        return result;
      },
      py::arg("device"), py::arg("bytes") = size_t{64} << 20);
  m.def(
      "_kernel_stubs",
      [](const std::vector<int>& sizes) {
        std::vector<std::tuple<std::string, std::string, int>> stubs;
        for (const ark::Stub& stub : sizes.empty() ? ark::representative_stubs() : ark::every_stub(sizes))
          stubs.emplace_back(stub.name, stub.text, stub.min_arch);
        return stubs;
      },
      py::arg("sizes") = std::vector<int>());
  m.def("_prebuilt_options", &ark::jit::prebuilt_options);
  m.def("_store_prebuilt", [](const std::string& folder, const std::string& compiler, const std::string& stub,
                              const std::string& arch, const std::string& cubin, const std::string& log) {
    ark::with_torch_errors([&] {
      const ark::jit::Settings now = ark::jit::settings();
      ark::jit::store_prebuilt(folder, now.version, compiler, stub, arch, {cubin.begin(), cubin.end()}, log,
                               ark::jit::read_headers(now.kernels_dir));
    });
  });
  m.def("_nvrtc", [] {
    return ark::with_torch_errors([] {
      ark::jit::Compiler compiler(ark::jit::settings(), 0);
      return std::pair(compiler.nvrtc_version(), compiler.nvrtc_path());
    });
  });
  m.def(
      "_compile_kernel",
      [](const std::string& stub, const std::string& arch, bool cached, bool fuse, bool may_spill) {
        std::vector<uint8_t> cubin;
        std::vector<ark::jit::Resources> resources;
        {
          py::gil_scoped_release no_gil;
          ark::with_torch_errors([&] {
            ark::jit::Compiler compiler(ark::jit::settings(), 0);
            ark::jit::Source source{stub, arch, {}};
            source.fuse = fuse;
            source.may_spill = may_spill;
            if (cached) {
              cubin = compiler.get(source).cubin;
            } else {
              ark::jit::Compiled compiled = compiler.compile(source);
              cubin = std::move(compiled.cubin);
              resources = std::move(compiled.resources);
            }
          });
        }
        py::list used;
        for (const ark::jit::Resources& one : resources) {
          py::dict as;
          as["name"] = one.kernel;
          as["registers"] = one.registers;
          as["spilled"] = one.spill_store_bytes + one.spill_load_bytes;
          as["stack"] = one.stack_bytes;
          as["spilled_by_function"] = one.spilled;
          as["multiplies_in_order"] = one.multiplies_in_order;
          used.append(as);
        }
        return std::pair(py::bytes(reinterpret_cast<const char*>(cubin.data()), cubin.size()), used);
      },
      py::arg("stub"), py::arg("arch"), py::arg("cached") = false, py::arg("fuse") = false,
      py::arg("may_spill") = true);
}

// PyTorch's own since 2.14; the same here for older minors.
void bind_windows([[maybe_unused]] py::module_& m) {
#ifndef C10D_BACKEND_HAS_WINDOW
  using ark::BaseWindow;
  using Release = py::call_guard<py::gil_scoped_release>;
  py::enum_<ark::WindowAccessType>(m, "WindowAccessType")
      .value("UNIFIED", ark::WindowAccessType::UNIFIED)
      .value("SEPARATE", ark::WindowAccessType::SEPARATE);
  py::class_<ark::WindowAttr>(m, "WindowAttr").def_readonly("access_type", &ark::WindowAttr::access_type);
  py::class_<ark::WindowOptions>(m, "WindowOptions")
      .def(py::init<>())
      .def_readwrite("timeout", &ark::WindowOptions::timeout);
  for (const char* name : {"PutOptions", "SignalOptions", "WaitSignalOptions"}) m.attr(name) = m.attr("WindowOptions");
  const ark::WindowOptions none;
  py::class_<BaseWindow, Shared<BaseWindow>>(m, "Window")
      .def("tensor_register", &BaseWindow::tensor_register, py::arg("tensor"), py::arg("owning") = true, Release())
      .def("tensor_deregister", &BaseWindow::tensor_deregister, Release())
      .def("put", &BaseWindow::put, py::arg("tensor"), py::arg("dst_rank"), py::arg("target_offset_nelems"),
           py::arg("async_op"), py::arg("opts") = none, Release())
      .def("map_remote_tensor", &BaseWindow::map_remote_tensor, py::arg("rank"), Release())
      .def("signal", &BaseWindow::signal, py::arg("peer_rank"), py::arg("async_op"), py::arg("opts") = none, Release())
      .def("wait_signal", &BaseWindow::wait_signal, py::arg("peer_rank"), py::arg("async_op"), py::arg("opts") = none,
           Release())
      .def("get_attr", &BaseWindow::get_attr, py::arg("peer_rank"));
#endif
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "ark_torch's C++ library. Use it through torch.distributed and ark_torch, not directly.";
  // torch binds the base classes.
  py::module_::import("torch.distributed");

  bind_rdma(m);
  py::class_<Options, c10d::Backend::Options, Shared<Options>> options(m, "Options");
  py::enum_<Options::SharedMemory>(options, "SharedMemory")
      .value("AUTO", Options::SharedMemory::automatic)
      .value("ON", Options::SharedMemory::on)
      .value("OFF", Options::SharedMemory::off);
  options.def(py::init<>())
      .def_readwrite("shared_memory", &Options::shared_memory)
      .def_readwrite("debug", &Options::debug)
      .def_readwrite("node", &Options::node)
      .def_readwrite("spin_us", &Options::spin_us)
      .def_readwrite("buffer_mb", &Options::buffer_mb)
      .def_property(
          "reduction", [](const Options& self) { return self.fast_reduction ? "fast" : "exact"; },
          [](Options& self, const std::string& reduction) {
            if (reduction != "exact" && reduction != "fast")
              throw py::value_error("reduction is '" + reduction + "': it takes 'exact' or 'fast'");
            self.fast_reduction = reduction == "fast";
          })
      .def_property(
          "order", [](const Options& self) { return self.sums.flat ? "flat" : "node"; },
          [](Options& self, const std::string& order) {
            if (order != "node" && order != "flat")
              throw py::value_error("order is '" + order + "': it takes 'node' or 'flat'");
            self.sums.flat = order == "flat";
          })
      .def_property(
          "partials", [](const Options& self) { return self.sums.input_partials ? "input" : "float32"; },
          [](Options& self, const std::string& partials) {
            if (partials != "float32" && partials != "input")
              throw py::value_error("partials is '" + partials + "': it takes 'float32' or 'input'");
            self.sums.input_partials = partials == "input";
          })
      .def_property(
          "net", [](const Options& self) { return kNets[static_cast<int>(self.net)]; },
          [](Options& self, const std::string& net) {
            const auto found = std::find(std::begin(kNets), std::end(kNets), net);
            if (found == std::end(kNets))
              throw py::value_error("net is '" + net + "': it takes 'auto', 'rdma' or 'gloo'");
            self.net = static_cast<ark::rdma::Wish>(found - std::begin(kNets));
          })
      .def_readwrite("rdma", &Options::rdma)
      .def_readwrite("share_gpu", &Options::share_gpu)
      .def_readwrite("disable_p2p", &Options::disable_p2p)
      .def_readwrite("nccl_leaves_p2p", &Options::nccl_leaves_p2p)
      .def_readwrite("timing", &Options::timing)
      .def_readwrite("flight_record", &Options::flight_record)
      .def_readwrite("flight_dump", &Options::flight_dump)
      .def_readwrite("global_rank", &Options::global_rank)
      .def_readwrite("make_carrier", &Options::make_carrier)
      .def_readwrite("make_cuda_carrier", &Options::make_cuda_carrier)
      .def_readwrite("known_dispatch", &Options::known_dispatch)
      .def_readwrite("measure_dispatch", &Options::measure_dispatch)
      .def_readwrite("allocate", &Options::allocate)
      .def_readwrite("log", &Options::log)
      .def_property(
          "dispatch", [](const Options& self) { return from_rules(self.dispatch); },
          [](Options& self, const std::vector<RuleTuple>& rules) { self.dispatch = to_rules(rules); })
      .def_property(
          "cuda_dispatch", [](const Options& self) { return from_cuda_rules(self.cuda_dispatch); },
          [](Options& self, const std::vector<CudaRuleTuple>& rules) { self.cuda_dispatch = to_cuda_rules(rules); })
      .def("__repr__", &repr_of)
      .def("__copy__", [](const Options& self) { return copy_of(self); })
      .def("__deepcopy__", [](const Options& self, const py::dict&) { return copy_of(self); });

  py::class_<ProcessGroupArk, c10d::Backend, Shared<ProcessGroupArk>>(m, "ProcessGroupArk")
      .def(py::init([](const Shared<c10d::Store>& store, int rank, int size, const Shared<Options>& opts) {
             py::gil_scoped_release no_gil;
             return ProcessGroupArk::create(store, rank, size, opts);
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"))
      .def_property_readonly(
          "shares_memory", &ProcessGroupArk::shares_memory,
          "True when all ranks share memory; False when RDMA or PyTorch's Gloo carries the group, or what "
          "goes between its nodes.")
      .def(
          "regions_over_nodes",
          [](const ProcessGroupArk& self) {
            std::string why;
            const int nodes = self.regions_over_nodes(why);
            return std::pair(nodes, why);
          },
          "How many nodes collectives of compiled regions reach on CUDA tensors: 1 where all ranks share memory; 0, "
          "and "
          "why, if they reach no other node.")
      .def_property_readonly(
          "plan", &ProcessGroupArk::plan,
          "Which ranks share memory: \"2 nodes (2 + 2 ranks), 2 rails, ..., gloo between them\"; empty where "
          "all do.")
      .def_property_readonly("rdma_trouble", &ProcessGroupArk::rdma_trouble,
                             "Why NICs of this rank are not used any more, or not with all peers; empty: all are.")
      .def_property_readonly("messages_between_nodes", &ProcessGroupArk::messages_between_nodes,
                             "How many messages this rank has sent to other nodes in collectives.")
      .def_property_readonly(
          "cuda_shared_bytes", &ProcessGroupArk::cuda_shared_bytes,
          "Bytes of this rank's GPU memory that are the group's own and that its peers map, or of pinned "
          "memory of the host where cuda_on_host is not empty; 0 before the first use. What users have "
          "registered is not in it: see cuda_registered_bytes.")
      .def_property_readonly("cuda_on_host", &ProcessGroupArk::cuda_on_host,
                             "Why ark carries CUDA tensors through memory of the host; empty: it does not.")
      .def_property_readonly("cuda_registered_bytes", &ProcessGroupArk::cuda_registered_bytes,
                             "Bytes of this rank's tensors and pools that are registered with the group.")
      .def_property_readonly("supports_window", &ProcessGroupArk::supportsWindow)
      .def("new_window", &ProcessGroupArk::new_window, py::arg("tensor") = py::none(),
           py::call_guard<py::gil_scoped_release>())
      .def("_register_memory", &ProcessGroupArk::register_memory, py::call_guard<py::gil_scoped_release>())
      .def("_deregister_memory", &ProcessGroupArk::deregister_memory, py::call_guard<py::gil_scoped_release>())
      .def("_register_pool", &ProcessGroupArk::register_pool, py::call_guard<py::gil_scoped_release>())
      .def("_deregister_pool", &ProcessGroupArk::deregister_pool, py::call_guard<py::gil_scoped_release>())
      // The same methods as ProcessGroupNCCL. They call Python, which owns the memory pools.
      .def_property_readonly("mem_allocator",
                             [](const ProcessGroupArk&) -> py::object {
                               return py::module_::import("ark_torch.memory").attr("allocator")();
                             })
      .def(
          "register_mem_pool",
          [](const py::object& self, const py::object& pool, bool) {
            py::module_::import("ark_torch.distributed.registration").attr("register_pool")(self, pool);
          },
          py::arg("pool"), py::arg("symm") = false,
          "Registers all memory that a torch.cuda.MemPool has by now, collectively; again where it has grown.")
      .def(
          "deregister_mem_pool",
          [](const py::object& self, const py::object& pool) {
            py::module_::import("ark_torch.distributed.registration").attr("deregister_pool")(self, pool);
          },
          py::arg("pool"), "Ends what register_mem_pool() began, collectively.")
      .def_property_readonly("cuda_carried", &ProcessGroupArk::cuda_carried,
                             "How many collectives on CUDA tensors PyTorch's NCCL carried, being faster by the table.")
      .def_property_readonly(
          "cuda_dispatch",
          [](const ProcessGroupArk& self) {
            std::map<std::string, uint64_t> numbers;
            if (const auto dispatch = self.cuda_dispatch())
              for (const auto& field : ark::kCudaDispatchFields) numbers[field.name] = (*dispatch).*field.value;
            return numbers;
          },
          "The dispatch of CUDA tensors that the ranks agreed on, by field; empty before the first use, and where NCCL "
          "carries them.")
      .def_property("_captures_step", &ProcessGroupArk::captures_step, &ProcessGroupArk::set_captures_step)
      .def_property_readonly("cuda_carrier", &ProcessGroupArk::cuda_carrier,
                             "What moves CUDA tensors: 'ark', or 'nccl' where ark cannot; '' before the first.")
      .def_property_readonly(
          "options",
          [](ProcessGroupArk& self) { return c10::static_intrusive_pointer_cast<Options>(self.getBackendOptions()); })
      .def("get_error", &ProcessGroupArk::getError, py::call_guard<py::gil_scoped_release>())
      // Ranks outside of a new group call this on the parent if a device is bound. There is nothing to do.
      .def(
          "perform_nocolor_split", [](ProcessGroupArk&, const py::object&) {}, py::arg("device") = py::none())
      .def("__repr__",
           [](ProcessGroupArk& self) {
             return py::str("<ark group {!r}: rank {} of {}, {}>")
                 .format(self.getGroupUid(), self.getRank(), self.getSize(),
                         self.shares_memory() ? "shared memory" : self.plan());
           })
      .def("_set_sequence_number_for_group", [](ProcessGroupArk&) {});

  m.def(
      "_flight_record_json",
      [] {
        ark::look_at_devices();
        return ark::FlightRecord::instance().to_json();
      },
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "_flight_record_dump",
      [](const std::string& path) {
        ark::look_at_devices();
        return ark::FlightRecord::instance().dump(path);
      },
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "_shutdown_all_groups",
      [](int64_t patience_ms) { ark::shutdown_all_groups(std::chrono::milliseconds(patience_ms)); },
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "_default_cuda_dispatch",
      [](int size, const std::string& model) {
        return from_cuda_rules({{size, ark::choose_dispatch({}, size, model)}}).front().second;
      },
      py::arg("size"), py::arg("model") = "");
  m.def("_default_dispatch", [] { return from_rules(ark::DispatchTable::defaults()); });
  m.def("_reduce_isa", [] { return std::string(ark::reduce_isa()); });
  bind_jit(m);
  bind_windows(m);
  ark::bind_plan(m);
  ark::bind_nodes(m);
  ark::bind_train(m);
}
