// Runs the peer test and remembers its verdicts per pair of devices.
#include "collectives/cuda/peer_test.hpp"

#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <tuple>

#include "collectives/cuda/stubs.hpp"
#include "jit/kernel.hpp"

namespace ark {

namespace {

using Clock = std::chrono::steady_clock;
using Uuid = std::array<char, sizeof(CUuuid)>;

enum Way : uint32_t { kStores, kCopies, kWays };
constexpr char kLies[] = " claims to work, but ";
constexpr const char* kNames[kWays] = {"stores", "copies"};

struct DeviceCard {
  Uuid device;
  int32_t ordinal;
};
struct NeedCard {
  uint32_t needs;  // 1: this rank lacks a verdict
};

// Per process: the problem of each (source device, target device, way); an empty text means that it works.
struct Known {
  std::mutex mutex;
  std::map<std::tuple<Uuid, Uuid, uint32_t>, std::string> verdicts;
  std::set<int> stuck;
};
Known& known() {
  static auto* made = new Known;
  return *made;
}

std::string hex(uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%016llx", static_cast<unsigned long long>(value));
  return text;
}

const jit::Kernel& kernel_of(int device) {
  return jit::KernelLibrary::of(device).get(peer_test_stub(), "peer_test");
}

// One call of PeerTest::passes().
class Run {
 public:
  Run(const PeerTest& test, MemoryMeeting& meeting)
      : test_(test), meeting_(meeting), kernel_(kernel_of(test.device)), rank_(meeting.rank()), size_(meeting.size()) {}

  bool passes(std::string& why);

 private:
  void note_devices();
  bool is_peer(int rank) const { return devices_[rank].device != devices_[rank_].device; }
  uint32_t ways() const { return test_.copies ? kWays : kStores + 1; }
  char* inbox(int owner, int source, uint32_t way) const { return base(owner) + (2 * source + way) * kPeerTestBytes; }
  char* outbox(int peer) const { return base(rank_) + (2 * size_ + peer) * kPeerTestBytes; }
  char* base(int owner) const { return (*test_.memory)[owner].data() + test_.layout->peer_test; }

  bool all_known() const;
  void write() const;
  void compare() const;
  void launch(CUstream stream, char* to, int peer) const;
  // Returns false if the device has not finished in time.
  bool ends(CUstream stream, std::chrono::milliseconds patience, const std::string& what) const;
  void await_own(CUstream stream, const char* what) const;
  void await(CUstream stream, int peer, const char* what) const;
  std::string between(int from, int to) const;
  [[noreturn]] void lies(int from, int to, uint32_t way, const std::string& how) const;

  const PeerTest& test_;
  MemoryMeeting& meeting_;
  const jit::Kernel& kernel_;
  const int rank_, size_;
  std::vector<DeviceCard> devices_;
};

// Set `stream` to null to abandon it with work that does not end.
struct Stream {
  Stream() { check(driver().stream_create_with_priority(&stream, CU_STREAM_NON_BLOCKING, 0), "cuStreamCreate"); }
  ~Stream() {
    if (stream != nullptr) driver().stream_destroy(stream);
  }
  CUstream stream = nullptr;
};

std::string Run::between(int from, int to) const {
  const auto name = [&](int rank) {
    return "GPU " + std::to_string(devices_[rank].ordinal) + " (rank " + std::to_string(rank) + ")";
  };
  return "peer access from " + name(from) + " to " + name(to);
}

void Run::lies(int from, int to, uint32_t way, const std::string& how) const {
  {
    const std::lock_guard lock(known().mutex);
    known().verdicts[{devices_[from].device, devices_[to].device, way}] = how;
  }
  throw Error(ErrorKind::system, between(from, to) + kLies + how);
}

// Returns true if all verdicts of this rank are known and good. Throws if one is known to be bad.
bool Run::all_known() const {
  const std::lock_guard lock(known().mutex);
  bool all = true;
  for (int peer = 0; peer < size_; ++peer) {
    if (!is_peer(peer)) continue;
    for (const auto& [from, to] : {std::pair{peer, rank_}, std::pair{rank_, peer}}) {
      for (uint32_t way = 0; way < ways(); ++way) {
        const auto found = known().verdicts.find({devices_[from].device, devices_[to].device, way});
        if (found == known().verdicts.end()) {
          // The peer judges what this rank sent and reports whether it knows the verdict.
          all &= from == rank_;
        } else if (!found->second.empty()) {
          throw Error(ErrorKind::system, between(from, to) + kLies + found->second);
        }
      }
    }
  }
  return all;
}

bool Run::ends(CUstream stream, std::chrono::milliseconds patience, const std::string& what) const {
  const auto until = Clock::now() + patience;
  for (;;) {
    const CUresult state = driver().stream_query(stream);
    if (state == CUDA_SUCCESS) return true;
    if (state != CUDA_ERROR_NOT_READY) check(state, what);
    if (Clock::now() > until) return false;
    if (test_.check) test_.check();
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

void Run::await_own(CUstream stream, const char* what) const {
  if (ends(stream, test_.timeout, what)) return;
  throw Error(ErrorKind::timeout,
              "GPU " + std::to_string(test_.device) + " has not ended " + what + " within " +
                  std::to_string(test_.timeout.count()) + " ms",
              ErrorContext{rank_, -1, "", 0, "Let its other work end before the group's first operation there."});
}

void Run::await(CUstream stream, int peer, const char* what) const {
  if (ends(stream, test_.patience, what + (" of " + between(rank_, peer)))) return;
  {
    const std::lock_guard lock(known().mutex);
    known().stuck.insert(test_.device);
  }
  lies(rank_, peer, kStores,
       std::string(what) + " did not end within " + std::to_string(test_.patience.count()) + " ms");
}

void Run::launch(CUstream stream, char* to, int peer) const {
  device::PeerTestParams params{};
  params.to = to, params.kept = outbox(peer);
  params.from_rank = static_cast<uint32_t>(rank_), params.to_rank = static_cast<uint32_t>(peer);
  jit::launch(kernel_, {1}, {device::kPeerTestUnits}, 0, stream, params);
}

void Run::write() const {
  const RelaxedCapture relaxed;
  const CurrentContext context(test_.device);
  Stream own;
  launch(own.stream, outbox(rank_), rank_);
  await_own(own.stream, "a kernel on its own memory");
  try {
    // One peer at a time, so that an operation that does not end can be attributed.
    for (int step = 1; step < size_; ++step) {
      const int peer = (rank_ + step) % size_;
      if (!is_peer(peer)) continue;
      launch(own.stream, inbox(peer, rank_, kStores), peer);
      await(own.stream, peer, "a kernel's stores");
      if (!test_.copies) continue;
      check(driver().memcpy_async(reinterpret_cast<CUdeviceptr>(inbox(peer, rank_, kCopies)),
                                  reinterpret_cast<CUdeviceptr>(outbox(peer)), kPeerTestBytes, own.stream),
            "cuMemcpyAsync of " + between(rank_, peer));
      await(own.stream, peer, "a copy");
    }
  } catch (const Error&) {
    if (is_stuck(test_.device)) own.stream = nullptr;
    throw;
  }
}

void Run::compare() const {
  const RelaxedCapture relaxed;
  const CurrentContext context(test_.device);
  const size_t bytes = 2 * size_ * kPeerTestBytes;
  auto came = std::make_unique<PinnedMemory>(test_.device, bytes);
  Stream own;
  check(driver().memcpy_async(reinterpret_cast<CUdeviceptr>(came->device()),
                              reinterpret_cast<CUdeviceptr>(inbox(rank_, 0, kStores)), bytes, own.stream),
        "cuMemcpyAsync of what peers have written");
  try {
    await_own(own.stream, "a copy to the host");
  } catch (const Error&) {
    own.stream = nullptr, (void)came.release();  // the device may still write to it
    throw;
  }
  for (int peer = 0; peer < size_; ++peer) {
    if (!is_peer(peer)) continue;
    for (uint32_t way = 0; way < ways(); ++way) {
      constexpr uint32_t kWords = kPeerTestBytes / sizeof(uint64_t);
      const auto* const words =
          reinterpret_cast<const uint64_t*>(static_cast<char*>(came->host()) + (2 * peer + way) * kPeerTestBytes);
      uint32_t wrong = 0, zeros = 0, first = kWords;
      for (uint32_t i = 0; i < kWords; ++i) {
        if (words[i] == device::peer_test_word(peer, rank_, way, i)) continue;
        if (first == kWords) first = i;
        ++wrong, zeros += words[i] == 0;
      }
      if (wrong == 0) {
        const std::lock_guard lock(known().mutex);
        known().verdicts.try_emplace({devices_[peer].device, devices_[rank_].device, way});
        continue;
      }
      const std::string share = std::to_string(wrong) + " of " + std::to_string(kWords) + " words by " + kNames[way];
      if (zeros == wrong) lies(peer, rank_, way, "values do not arrive: " + share + " are missing");
      lies(peer, rank_, way,
           "values arrive wrong: " + share + ", the first as " + hex(words[first]) + " instead of " +
               hex(device::peer_test_word(peer, rank_, way, first)));
    }
  }
}

void Run::note_devices() {
  for (int rank = 0; rank < size_; ++rank) devices_.push_back(meeting_.card_of<DeviceCard>(rank));
}

bool Run::passes(std::string& why) {
  const auto introduce = [&] {
    DeviceCard& card = meeting_.own_card<DeviceCard>();
    CUuuid uuid;
    check(driver().device_get_uuid(&uuid, test_.device), "cuDeviceGetUuid");
    std::memcpy(card.device.data(), &uuid, sizeof uuid);
    card.ordinal = test_.device;
  };
  const auto ask = [&] {
    note_devices();
    meeting_.own_card<NeedCard>().needs = all_known() ? 0 : 1;
  };
  if (!meeting_.step(introduce, why) || !meeting_.step(ask, why)) return false;
  bool needed = false;
  for (int rank = 0; rank < size_; ++rank) needed |= meeting_.card_of<NeedCard>(rank).needs != 0;
  return !needed || (meeting_.step([&] { write(); }, why) && meeting_.step([&] { compare(); }, why));
}

}  // namespace

void PeerTest::load_kernel(int device) {
  kernel_of(device);
}

bool PeerTest::passes(MemoryMeeting& meeting, std::string& why) const {
  return meeting.size() == 1 || Run(*this, meeting).passes(why);
}

bool is_stuck(int device) {
  const std::lock_guard lock(known().mutex);
  return known().stuck.count(device) != 0;
}

}  // namespace ark
