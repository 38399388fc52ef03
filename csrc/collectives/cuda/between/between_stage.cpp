// Opens the stage by an exchange of records through the store, and fills the kernels' parameters.
#include "collectives/cuda/between/between_stage.hpp"

#include <algorithm>
#include <cstring>

#include "collectives/cuda/stubs.hpp"
#include "collectives/rma/rma_record.hpp"
#include "jit/kernel.hpp"
#include "shm/store_gather.hpp"

namespace ark {

using rdma::GpuWindow;

namespace {

std::string as_printable(std::string text) {
  for (char& c : text)
    if (c < ' ' || c > '~') c = '?';
  return text.substr(0, RmaRecord::kMaxReasonBytes);
}

void launch_on_device(int device, const Operation& operation, const device::BetweenParams& params,
                      device::BetweenForm form, uint32_t blocks) {
  const BetweenStub stub = between_stub(form, rule_of(operation.descriptor.dtype, operation.descriptor.op));
  const jit::Kernel& kernel = jit::KernelLibrary::of(device).get(stub.text, stub.entry);
  const CurrentContext context(device);
  jit::launch(kernel, {blocks}, {device::kBetweenThreads}, 0, static_cast<CUstream>(operation.stream), params);
}

// As a record holds them.
uint32_t settings_of(const SumOrder& sums) {
  return (sums.flat ? 1 : 0) | (sums.input_partials ? 2 : 0);
}

[[noreturn]] void refuse_settings(int rank, const SumOrder& own, int peer) {
  const auto named = [](bool value, const char* yes, const char* no) { return std::string(value ? yes : no); };
  throw Error(ErrorKind::mismatch,
              "ranks disagree: rank " + std::to_string(rank) + " has order " + named(own.flat, "flat", "node") +
                  " and partials " + named(own.input_partials, "input", "float32") + ", rank " + std::to_string(peer) +
                  " has other ones",
              ErrorContext{rank, peer, "init", 0,
                           "Give every rank the same Options.order (ARK_ORDER) and Options.partials (ARK_PARTIALS)."});
}

[[noreturn]] void reject(int rank, int peer, const Error& error) {
  throw Error(
      ErrorKind::mismatch,
      "record of rank " + std::to_string(peer) + " for the GPU stage between nodes rejected: " + error.message(),
      ErrorContext{rank, peer, "init", 0, "Run the same ark_torch on all ranks."});
}

constexpr uint32_t kFailed = 2;  // RmaRecord::item of a rank whose error ends the meeting

struct Meeting {
  int rank, size;
  std::chrono::milliseconds timeout;
  std::string prefix;
};

// Tells the others of this rank's window, or why there is none. Returns where those of its rail are; sets `why` if a
// rank that should have one has none. compare(peer, record) throws what ends the meeting.
std::vector<GpuWindow::Remote> meet(const Meeting& meeting, const NodePlan& plan, KeyValueStore& store,
                                    RmaRecord record, const GpuWindow* window,
                                    const std::function<void(int, const RmaRecord&)>& compare, std::string& why) {
  record.rank = static_cast<uint32_t>(meeting.rank), record.size = static_cast<uint32_t>(meeting.size);
  if (window != nullptr) {
    const GpuWindow::Remote own = window->own();
    record.address = own.address, record.keys = own.keys, record.elements = window->bytes();
  }
  const auto records =
      store_all_gather(store, meeting.prefix, meeting.rank, meeting.size, record.encode(), meeting.timeout);
  std::vector<GpuWindow::Remote> remotes(plan.nodes());
  for (int peer = 0; peer < meeting.size; ++peer) {
    RmaRecord found;
    try {
      found = RmaRecord::decode(records[peer]);
      if (static_cast<int>(found.rank) != peer || static_cast<int>(found.size) != meeting.size)
        throw Error(ErrorKind::mismatch, "it is of rank " + std::to_string(found.rank));
    } catch (const Error& error) {
      reject(meeting.rank, peer, error);
    }
    compare(peer, found);
    const bool has_rail = plan.local_of(peer) < plan.rails();
    if (window != nullptr && has_rail && found.reason.empty() && found.elements != window->bytes())
      reject(meeting.rank, peer,
             Error(ErrorKind::mismatch, "its memory has " + std::to_string(found.elements) + " bytes, not " +
                                            std::to_string(window->bytes())));
    if (!found.reason.empty() && why.empty()) why = "rank " + std::to_string(peer) + ": " + found.reason;
    if (plan.local_of(peer) == plan.local()) remotes[plan.node_of(peer)] = {found.address, found.keys};
  }
  return remotes;
}

uint64_t time_limit_of(const OperationContext& context) {
  if (context.deadline == Clock::time_point::max()) return ~uint64_t{0};
  return std::max<int64_t>(context.timeout.count(), 1) * 1'000'000;
}

}  // namespace

std::string BetweenStage::why_not(const NodePlan& plan) {
  if (plan.nodes() > device::kMostNodes)
    return std::to_string(plan.nodes()) + " nodes; kernels are made for up to " + std::to_string(device::kMostNodes);
  if (plan.most_in_node() > device::kMostPlaces)
    return std::to_string(plan.most_in_node()) + " ranks a node; kernels are made for up to " +
           std::to_string(device::kMostPlaces);
  return "";
}

std::string BetweenStage::no_regions(const NodePlan& plan) {
  return plan.most_in_node() == plan.rails() ? "" : "its nodes have unequal numbers of ranks";
}

BetweenStage::BetweenStage(Setup setup, const NodePlan& plan)
    : setup_(std::move(setup)),
      plan_(plan),
      scratch_(DeviceMemory::allocate(setup_.device, setup_.scratch_bytes)),
      window_(plan.has_rail() ? make_window(setup_.shape.value_or(GpuWindow::Shape::of(plan.nodes())), kWindows)
                              : nullptr) {}

std::unique_ptr<GpuWindow> BetweenStage::make_window(const GpuWindow::Shape& shape, int32_t number) const {
  GpuWindow::Setup window;
  window.gpu = setup_.device;
  window.path = setup_.path ? *setup_.path : rdma::gpu_path(*setup_.messages->engine(0)->device(), setup_.device);
  window.shape = shape;
  for (int node = 0; node < plan_.nodes(); ++node) window.ranks.push_back(plan_.members(node)[plan_.local()]);
  window.node = plan_.node();
  window.number = number;
  window.fail = setup_.fail;
  return std::make_unique<GpuWindow>(setup_.messages, std::move(window));
}

std::unique_ptr<BetweenStage> BetweenStage::open(Setup setup, const NodePlan& plan, KeyValueStore& store,
                                                 std::string& why) {
  const Meeting meeting{setup.rank, setup.size, setup.timeout, setup.prefix};
  const SumOrder sums = setup.sums;
  RmaRecord record;
  record.reason = as_printable(setup.refused);
  record.type = settings_of(sums);
  std::unique_ptr<BetweenStage> stage;
  if (setup.refused.empty()) {
    try {
      stage.reset(new BetweenStage(std::move(setup), plan));
    } catch (const Error& error) {
      record.reason = as_printable(error.message());
    }
  }
  const auto compare = [&](int peer, const RmaRecord& found) {
    if (found.type != record.type) refuse_settings(meeting.rank, sums, peer);
  };
  auto remotes = meet(meeting, plan, store, record, stage ? stage->window_.get() : nullptr, compare, why);
  if (!why.empty()) return nullptr;
  if (stage->window_) stage->window_->connect(std::move(remotes));
  return stage;
}

std::unique_ptr<GpuWindow> BetweenStage::region_window(const GpuWindow::Shape& shape, uint64_t fingerprint,
                                                       const std::exception_ptr& failed, std::string& why) {
  if (why.empty()) why = no_regions(plan_);
  const uint32_t region = regions_++;
  const Meeting meeting{setup_.rank, setup_.size, setup_.timeout, setup_.prefix + "/region/" + std::to_string(region)};
  RmaRecord record;
  record.reason = as_printable(why);
  record.type = static_cast<uint32_t>(fingerprint), record.window = static_cast<uint32_t>(fingerprint >> 32);
  std::unique_ptr<GpuWindow> window;
  try {
    if (failed) std::rethrow_exception(failed);
    if (why.empty()) window = make_window(shape, kRegionWindows + region * kWindowsOfRegion);
  } catch (const Error& error) {
    record.reason = as_printable(error.message());
    record.item = failed ? kFailed : 1;
  }
  const auto compare = [&](int peer, const RmaRecord& found) {
    if (found.item == kFailed && !failed)
      throw Error(ErrorKind::mismatch, "rank " + std::to_string(peer) + ": " + found.reason,
                  ErrorContext{meeting.rank, peer, "", 0, "See that rank's error."});
    if (found.type != record.type || found.window != record.window)
      throw Error(ErrorKind::mismatch,
                  "rank " + std::to_string(peer) +
                      " compiled a region with other collectives or other costs of work, or other nodes",
                  ErrorContext{meeting.rank, peer, "", 0,
                               "Run the same model, on the same sizes, on every rank, with the same costs "
                               "(ARK_COSTS=assumed)."});
  };
  why.clear();
  auto remotes = meet(meeting, plan_, *setup_.store, record, window.get(), compare, why);
  if (failed) std::rethrow_exception(failed);
  if (!why.empty()) return nullptr;
  window->connect(std::move(remotes));
  return window;
}

void BetweenStage::move(const Operation& operation, const Blocks& blocks) {
  launch(operation, blocks, device::BetweenForm::move, false);
}

void BetweenStage::add(const Operation& operation, const Blocks& blocks, bool average) {
  launch(operation, blocks,
         blocks.parts.brings == Brings::wide_sum ? device::BetweenForm::add_wide : device::BetweenForm::add, average);
}

std::byte* BetweenStage::factor(int node, int place) const {
  return scratch() + scratch_bytes() + kFactorBytes * (node * device::kMostPlaces + place);
}

void BetweenStage::set_factor(const Operation& operation) const {
  uint32_t halves[2];
  std::memcpy(halves, &operation.factor, sizeof halves);
  const CurrentContext context(setup_.device);
  const auto to = reinterpret_cast<CUdeviceptr>(factor(plan_.node(), plan_.local()));
  for (int i = 0; i < 2; ++i)
    check(driver().memset_d32_async(to + 4 * i, halves[i], 1, static_cast<CUstream>(operation.stream)),
          "cuMemsetD32Async");
}

// With several inputs a node, a chunk holds as many bytes of each as the largest node has room for, or as many elements
// as their partial sums have room: alike for all nodes.
void BetweenStage::set_parts(const Operation& operation, const Parts& parts, device::BetweenParams& params) const {
  const uint64_t chunk = params.window.chunk_bytes;
  device::BetweenParts& to = params.parts;
  to.count = parts.count;
  if (parts.brings == Brings::sum) {
    to.all = params.window.nodes;
    for (int node = 0; node < to.all; ++node) to.order[node] = static_cast<uint16_t>(node * device::kMostPlaces);
    params.piece_bytes = chunk;
    return;
  }
  to.others = static_cast<const char*>(parts.others), to.stride = parts.stride, to.own = plan_.local();
  std::copy(parts.at.begin(), parts.at.end(), to.at);
  to.all = setup_.size;
  for (int rank = 0; rank < to.all; ++rank)
    to.order[rank] = static_cast<uint16_t>(plan_.node_of(rank) * device::kMostPlaces + plan_.local_of(rank));
  const uint64_t wider = sizeof(float) / device::scalar_bytes(params.dtype);
  params.piece_bytes = chunk / (parts.brings == Brings::wide_sum ? wider : plan_.most_in_node()) / 16 * 16;
}

void BetweenStage::launch(const Operation& operation, const Blocks& blocks, device::BetweenForm form, bool average) {
  device::BetweenParams params{};
  params.window = window_->kernels_view();
  params.status = setup_.status;
  params.limit_ns = time_limit_of(operation.context);
  params.ranks = setup_.size;
  params.average = average;
  params.dtype = static_cast<device::DType>(operation.descriptor.dtype);
  params.op = static_cast<device::ReduceOp>(average ? ReduceOp::avg : operation.descriptor.op);
  if (operation.descriptor.op == ReduceOp::premul_sum) params.factors = reinterpret_cast<const double*>(factor(0, 0));
  set_parts(operation, blocks.parts, params);
  uint32_t lanes = 0;
  for (int node = 0; node < params.window.nodes; ++node) {
    params.names[node] = window_->setup().ranks[node];
    params.send[node] = blocks.send[node], params.receive[node] = blocks.receive[node];
    params.send_bytes[node] = blocks.send_bytes[node], params.receive_bytes[node] = blocks.receive_bytes[node];
    for (const uint64_t bytes : {params.send_bytes[node], params.receive_bytes[node]})
      if (bytes > 0) lanes = std::max(lanes, device::between_lanes(bytes, params.window.lanes));
  }
  if (lanes == 0) return;
  if (setup_.launch) return setup_.launch(operation, params, form, lanes);
  launch_on_device(setup_.device, operation, params, form, lanes);
}

}  // namespace ark
