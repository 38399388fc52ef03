// Creates NCCL for an existing group and ends it. shared_communicator.cpp decides what it carries.
#include "process_group/carriers/nccl_entry.hpp"

#include <thread>

#include "cuda/driver.hpp"
#include "util/start_thread.hpp"

namespace ark {

namespace {

struct Range {
  uint64_t from = CudaDispatch::kNever, to = CudaDispatch::kNever;
};
Range range_of(const CudaDispatch& dispatch, Kind kind) {
  switch (kind) {
    case Kind::all_reduce: return {dispatch.nccl_all_reduce_from, dispatch.nccl_all_reduce_to};
    case Kind::reduce: return {dispatch.nccl_reduce_from, dispatch.nccl_reduce_to};
    case Kind::reduce_scatter: return {dispatch.nccl_reduce_scatter_from, dispatch.nccl_reduce_scatter_to};
    case Kind::all_gather: return {dispatch.nccl_all_gather_from, dispatch.nccl_all_gather_to};
    case Kind::broadcast: return {dispatch.nccl_broadcast_from, dispatch.nccl_broadcast_to};
    case Kind::all_to_all: return {dispatch.nccl_all_to_all_from, dispatch.nccl_all_to_all_to};
    default: return {};
  }
}

std::string key_of(int rank) {
  return "made/" + std::to_string(rank);
}

std::vector<uint8_t> bytes_of(const std::string& text) {
  return {text.begin(), text.end()};
}

// State shared with a thread whose call may never return.
struct Attempt {
  std::atomic<bool> over{false};
  std::string error;  // written before `over`
};

template <class Body>
std::shared_ptr<Attempt> apart(const char* what, Body body) {
  auto attempt = std::make_shared<Attempt>();
  start_thread(what, [attempt, body = std::move(body)] {
    try {
      const RelaxedCapture relaxed;  // another thread may be capturing
      body();
    } catch (const std::exception& error) {
      attempt->error = error.what();
    }
    attempt->over.store(true, std::memory_order_release);
  }).detach();
  return attempt;
}

}  // namespace

bool NcclEntry::in(const CudaDispatch& dispatch) {
  for (int kind = 0; kind < kKinds; ++kind)
    if (range_of(dispatch, static_cast<Kind>(kind)).from != CudaDispatch::kNever) return true;
  return false;
}

bool NcclEntry::wants(Kind kind, uint64_t bytes) const {
  const Range range = range_of(options_.dispatch, kind);
  return bytes > 0 && bytes >= range.from && bytes <= range.to;
}

// Creates the communicator on a separate thread, because NCCL waits for peers without a time limit and detects no
// failures.
std::string NcclEntry::connect(const Meeting& meeting) {
  std::string own;
  std::shared_ptr<Attempt> attempt;
  try {
    backend_ = meeting.make();
    if (backend_->getBackendName() != "nccl") throw Error(ErrorKind::system, "this PyTorch has no NCCL");
    attempt = apart("the thread that makes NCCL's communicator",
                    [backend = backend_, device = options_.device] { backend->eagerConnectSingleDevice(device); });
  } catch (const std::exception& error) {
    own = error.what();
  }
  bool told = false;
  const auto tell = [&](const std::string& outcome) {
    if (!told) options_.store->set(key_of(options_.rank), bytes_of(outcome));
    told = true;
  };
  if (!own.empty()) tell(own);
  for (int peer = 0; peer < options_.size; ++peer) {
    for (;;) {
      if (attempt && !told && attempt->over.load(std::memory_order_acquire)) {
        own = attempt->error;
        tell(own.empty() ? "ok" : own);
      }
      if (const auto outcome = options_.store->find(key_of(peer))) {
        const std::string text(outcome->begin(), outcome->end());
        if (text == "ok") break;
        tell("rank " + std::to_string(peer) + " has failed");
        return "rank " + std::to_string(peer) + ": " + text;
      }
      meeting.check();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  return {};
}

void NcclEntry::meet(const Meeting& meeting) {
  const std::lock_guard lock(mutex_);
  if (decided()) return;
  std::string why;
  try {
    why = connect(meeting);
  } catch (...) {
    state_.store(State::refused, std::memory_order_release);  // the group has failed
    throw;
  }
  if (options_.rank == 0 && meeting.log) {
    if (why.empty()) {
      meeting.log(
          "PyTorch's NCCL, measured faster here, carries collectives of some sizes (ARK_DISPATCH's nccl_..._from and "
          "_to, or reduction=\"fast\")");
    } else {
      meeting.log("ark carries what was to be PyTorch's NCCL's, since that could not be made: " + why);
    }
  }
  state_.store(why.empty() ? State::ready : State::refused, std::memory_order_release);
}

void NcclEntry::abort() {
  const BackendPtr made = backend();
  if (!made || aborted_.exchange(true)) return;
  try {
    apart("the thread that aborts NCCL", [made] { made->abort(); });
  } catch (const Error&) {  // no thread could start; the next look tries again
    aborted_.store(false);
    throw;
  }
}

void NcclEntry::close(std::chrono::milliseconds patience) {
  BackendPtr made = backend();
  state_.store(State::refused, std::memory_order_release);
  if (!made || aborted_.load()) return;
  const auto attempt = apart("the thread that ends NCCL", [made = std::move(made)] { made->shutdown(); });
  const auto until = Clock::now() + patience;
  while (!attempt->over.load(std::memory_order_acquire) && Clock::now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace ark
