// The steps of symmetric_memory.hpp.
#include "memory/symmetric_memory.hpp"

#include <poll.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "memory/bootstrap.hpp"
#include "memory/local_socket.hpp"
#include "protocol/atomics.hpp"

namespace ark {

namespace {

// At the head of every rank's page.
struct Page {
  uint32_t stage;   // 1: allocated or failed, 2: mapped or failed
  uint32_t failed;  // 1: it cannot share memory; 2: an error that every rank raises
  uint64_t bytes;
  CUuuid device;
  char text[512];
};

Page& page_of(const Neighbourhood& hood, int rank) {
  return *reinterpret_cast<Page*>(hood.segments[rank].data());
}

// Keys of one buffer.
class NamedStore : public KeyValueStore {
 public:
  NamedStore(KeyValueStore& store, const std::string& name) : store_(store), prefix_(name + "/") {}
  void set(const std::string& key, const std::vector<uint8_t>& value) override { store_.set(prefix_ + key, value); }
  std::vector<uint8_t> get(const std::string& key, std::chrono::milliseconds timeout) override {
    return store_.get(prefix_ + key, timeout);
  }
  std::optional<std::vector<uint8_t>> find(const std::string& key) override { return store_.find(prefix_ + key); }

 private:
  KeyValueStore& store_;
  const std::string prefix_;
};

class Meeting {
 public:
  Meeting(const SymmetricMemory::Options& options, Neighbourhood hood)
      : options_(options), hood_(std::move(hood)), deadline_(Clock::now() + options.timeout) {}

  std::vector<DeviceMemory> run(std::string& why) {
    std::vector<DeviceMemory> memory(options_.size);
    attempt([&] {
      DeviceMemory own = DeviceMemory::allocate(options_.device, options_.bytes);
      page_of(hood_, options_.rank).bytes = own.size();
      ark::check(driver().device_get_uuid(&page_of(hood_, options_.rank).device, options_.device), "cuDeviceGetUuid");
      if (options_.prepare) options_.prepare(own);
      memory[options_.rank] = std::move(own);
    });
    publish(1);
    if (!all_at(1, why)) return {};
    attempt([&] {
      check_sizes();
      check_devices();
      const UniqueFd own = memory[options_.rank].export_fd();
      const std::vector<uint8_t> message(8, static_cast<uint8_t>(options_.rank));
      for (int peer = 0; peer < options_.size; ++peer) {
        if (peer == options_.rank) continue;
        const int error = send_message(hood_.connections[peer].get(), message, own.get());
        if (error != 0) throw system_error("cannot hand memory to rank " + std::to_string(peer), error);
      }
      for (int peer = 0; peer < options_.size; ++peer) {
        if (peer == options_.rank) continue;
        memory[peer] = DeviceMemory::import(options_.device, take_fd(peer, message.size()), page_of(hood_, peer).bytes);
      }
    });
    publish(2);
    if (!all_at(2, why)) return {};
    return memory;
  }

 private:
  // What fails on this rank is published, so that no peer waits for it; what only this machine lacks is not thrown.
  template <class Step>
  void attempt(Step&& step) {
    Page& own = page_of(hood_, options_.rank);
    try {
      step();
    } catch (const Error& error) {
      std::strncpy(own.text, error.what(), sizeof own.text - 1);
      own.failed = error.kind() == ErrorKind::system ? 1 : 2;
      if (own.failed == 1) return;
      publish(2);
      throw;
    }
  }

  void publish(uint32_t stage) { protocol::store_release(page_of(hood_, options_.rank).stage, stage); }

  bool all_at(uint32_t stage, std::string& why) {
    for (int peer = 0; peer < options_.size; ++peer) {
      const Page& page = page_of(hood_, peer);
      while (protocol::load_acquire(page.stage) < stage) pause(peer);
    }
    for (int peer = 0; peer < options_.size; ++peer) {
      const Page& page = page_of(hood_, peer);
      if (page.failed == 0) continue;
      why = "rank " + std::to_string(peer) + ": " + std::string(page.text, strnlen(page.text, sizeof page.text));
      if (page.failed == 2) {
        throw Error(ErrorKind::mismatch, why,
                    ErrorContext{options_.rank, peer, "", 0, "Mend that on every rank, and create the group again."});
      }
      return false;
    }
    return true;
  }

  void pause(int peer) {
    options_.check();
    if (Clock::now() > deadline_) {
      throw Error(ErrorKind::timeout,
                  "rank " + std::to_string(peer) + " did not share its GPU memory within " +
                      std::to_string(options_.timeout.count()) + " ms",
                  ErrorContext{options_.rank, peer, "", 0,
                               "Look at that rank's output; every rank must call the same "
                               "collectives on CUDA tensors."});
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }

  void check_sizes() {
    const uint64_t own = page_of(hood_, options_.rank).bytes;
    for (int peer = 0; peer < options_.size; ++peer) {
      const uint64_t theirs = page_of(hood_, peer).bytes;
      if (theirs == own) continue;
      throw Error(ErrorKind::mismatch,
                  "rank " + std::to_string(peer) + " shares " + std::to_string(theirs) +
                      " bytes of GPU memory, this rank " + std::to_string(own),
                  ErrorContext{options_.rank, peer, "", 0, "Install the same version of ark_torch for every rank."});
    }
  }

  // One device a rank, and every peer's in reach. A device that this process does not see (CUDA_VISIBLE_DEVICES) is
  // tried: mapping its memory tells.
  void check_devices() {
    const CUuuid own = page_of(hood_, options_.rank).device;
    int count = 0;
    ark::check(driver().device_get_count(&count), "cuDeviceGetCount");
    for (int peer = 0; peer < options_.size; ++peer) {
      if (peer == options_.rank) continue;
      const CUuuid theirs = page_of(hood_, peer).device;
      if (std::memcmp(&own, &theirs, sizeof own) == 0) {
        throw Error(ErrorKind::invalid_argument, "rank " + std::to_string(peer) + " uses the same GPU as this rank",
                    ErrorContext{options_.rank, peer, "", 0,
                                 "Give every rank a GPU of its own (torch.cuda.set_device(local_rank))."});
      }
      for (int ordinal = 0; ordinal < count; ++ordinal) {
        CUuuid seen;
        int reaches = 1;
        if (driver().device_get_uuid(&seen, ordinal) != CUDA_SUCCESS || std::memcmp(&seen, &theirs, sizeof seen) != 0)
          continue;
        if (driver().device_can_access_peer(&reaches, options_.device, ordinal) == CUDA_SUCCESS && reaches == 0) {
          throw Error(ErrorKind::system, "device " + std::to_string(options_.device) +
                                             " has no peer access to device " + std::to_string(ordinal) + ", of rank " +
                                             std::to_string(peer));
        }
      }
    }
  }

  UniqueFd take_fd(int peer, size_t bytes) {
    MessageReceiver receiver(bytes);
    for (;;) {
      switch (receiver.receive(hood_.connections[peer].get())) {
        case MessageReceiver::Status::complete: {
          UniqueFd fd = receiver.take_fd();
          if (fd) return fd;
          throw Error(ErrorKind::system,
                      "rank " + std::to_string(peer) + " sent no descriptor, or this process may open no more files",
                      ErrorContext{options_.rank, peer, "", 0, "Raise the limit of open files (ulimit -n)."});
        }
        case MessageReceiver::Status::incomplete: pause(peer); break;
        default:
          throw Error(ErrorKind::peer_lost, "rank " + std::to_string(peer) + " ended while it shared its GPU memory",
                      ErrorContext{options_.rank, peer, "", 0, "Look at that rank's output."});
      }
      if (protocol::load_acquire(page_of(hood_, peer).stage) >= 2 && page_of(hood_, peer).failed != 0)
        throw Error(ErrorKind::system, "rank " + std::to_string(peer) + " failed");
    }
  }

  const SymmetricMemory::Options& options_;
  Neighbourhood hood_;
  Clock::time_point deadline_;
};

}  // namespace

std::vector<DeviceMemory> SymmetricMemory::create(KeyValueStore& store, const Options& options, std::string& why) {
  if (options.size == 1) {
    std::vector<DeviceMemory> own;
    own.push_back(DeviceMemory::allocate(options.device, options.bytes));
    if (options.prepare) options.prepare(own[0]);
    return own;
  }
  ConnectOptions connecting;
  connecting.rank = options.rank;
  connecting.size = options.size;
  connecting.segment_bytes = sizeof(Page);
  connecting.timeout = options.timeout;
  connecting.interrupted = [&] {
    options.check();
    return false;
  };
  NamedStore named(store, options.name);
  ConnectResult result = connect(named, connecting);
  if (!result.neighbourhood) {
    why = result.reason;
    return {};
  }
  return Meeting(options, std::move(*result.neighbourhood)).run(why);
}

}  // namespace ark
