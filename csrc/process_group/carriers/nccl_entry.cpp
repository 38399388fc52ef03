// Creates NCCL for an existing group and ends it. shared_communicator.cpp decides what it carries.
#include "process_group/carriers/nccl_entry.hpp"

#include <algorithm>
#include <iterator>
#include <thread>

#include "cuda/driver.hpp"
#include "util/start_thread.hpp"

namespace ark {

namespace {

const NcclSizes* sizes_of(Kind kind) {
  for (const NcclSizes& sizes : kNcclSizes)
    if (sizes.kind == kind) return &sizes;
  return nullptr;
}

std::string text_of(uint64_t bytes) {
  // The upper bound of a range may be the last byte below a size.
  const uint64_t kilobytes = (bytes + 1023) >> 10;
  return kilobytes % 1024 == 0 ? std::to_string(kilobytes >> 10) + " MB" : std::to_string(kilobytes) + " KB";
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
  return std::any_of(std::begin(kNcclSizes), std::end(kNcclSizes),
                     [&](const NcclSizes& sizes) { return dispatch.*sizes.from != CudaDispatch::kNever; });
}

bool NcclEntry::wants(Kind kind, uint64_t bytes) const {
  const NcclSizes* const sizes = sizes_of(kind);
  const CudaDispatch& dispatch = options_.dispatch;
  return sizes != nullptr && bytes > 0 && bytes >= dispatch.*sizes->from && bytes <= dispatch.*sizes->to;
}

void NcclEntry::count(Kind kind) {
  carried_.fetch_add(1, std::memory_order_relaxed);
  carried_kinds_.fetch_or(1u << static_cast<int>(kind), std::memory_order_relaxed);
}

std::vector<std::string> NcclEntry::news() {
  const uint32_t carried = carried_kinds_.load(std::memory_order_relaxed);
  if (told_kinds_.load(std::memory_order_relaxed) == carried) return {};
  const uint32_t fresh = carried & ~told_kinds_.fetch_or(carried, std::memory_order_relaxed);
  std::vector<std::string> lines;
  for (const NcclSizes& sizes : kNcclSizes) {
    if ((fresh >> static_cast<int>(sizes.kind) & 1) == 0) continue;
    const uint64_t from = options_.dispatch.*sizes.from, to = options_.dispatch.*sizes.to;
    lines.push_back("PyTorch's NCCL, measured faster here, carries " + std::string(name_of(sizes.kind)) + " from " +
                    text_of(from) + (to == CudaDispatch::kNever ? " on" : " to " + text_of(to)) +
                    " (a table in ARK_DISPATCH replaces these sizes)");
  }
  return lines;
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
  if (!why.empty() && options_.rank == 0 && meeting.log)
    meeting.log("ark carries what was to be PyTorch's NCCL's, since that could not be made: " + why);
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
