// One NIC of this process at work: its memory registrations, and one thread that tells channels of completions.
//
// The thread sleeps in poll() on the NIC's completion channel, its asynchronous events and a descriptor that ends it;
// nothing wakes an idle engine. Every queue is asked for its next event before it is emptied, so none is lost. Groups
// of a process share the engine of a device; the last one that goes ends it. Thread-safe; queues are begun and ended
// by threads that hold none of the locks that their sink takes.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "dma/rdma/device.hpp"
#include "dma/rdma/registration.hpp"
#include "util/unique_fd.hpp"

namespace ark::rdma {

// Whom completions are for. Called on the engine's thread.
class Sink {
 public:
  virtual ~Sink() = default;
  virtual void completions() = 0;
  virtual void device_failed(const Error& error) = 0;
};

class Engine {
 public:
  explicit Engine(std::shared_ptr<Device> device);
  ~Engine();  // after every queue
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // The process's engine for these options, opened when it is not there. Errors: Device::open, and no libibverbs.
  static std::shared_ptr<Engine> of(const Options& options);
  // One for each device that options.device names, in that order; by default one. Those that cannot be used are left
  // out, and left_out says why; none is an error, as is a name that no device has.
  static std::vector<std::shared_ptr<Engine>> rails_of(const Options& options, std::string& left_out);

  const std::shared_ptr<Device>& device() const { return device_; }
  const Verbs& verbs() const { return device_->verbs(); }
  Registrations& memory() { return memory_; }

  // A completion queue whose events go to the sink until silence() returns; then the queue may be ended.
  ibv_cq* begin_queue(int entries, Sink& sink);
  void silence(ibv_cq* queue);
  void end_queue(ibv_cq* queue) { verbs().destroy_cq(queue); }

 private:
  void run();
  void take_completions();
  void take_device_events();

  const std::shared_ptr<Device> device_;
  Registrations memory_;
  ibv_comp_channel* channel_ = nullptr;
  UniqueFd end_;
  std::mutex mutex_;  // of sinks_, and held while one of them is called
  std::map<ibv_cq*, Sink*> sinks_;
  std::thread thread_;
};

}  // namespace ark::rdma
