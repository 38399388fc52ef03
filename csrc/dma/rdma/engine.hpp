// One open NIC of this process: its memory registrations and the thread that reports completions to channels.
//
// The thread sleeps in poll() on the completion channel, the asynchronous events and a stop descriptor, so an idle
// engine costs nothing. It re-arms a queue before it drains it, so no event is lost. Groups of a process share a
// device's engine; the last group to go stops it. Thread-safe. Callers of begin_queue() and silence() must not hold a
// lock that their sink takes.
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

// Receives the completions of a queue, on the engine's thread.
class Sink {
 public:
  virtual ~Sink() = default;
  virtual void completions() = 0;
  virtual void device_failed(const Error& error) = 0;
};

class Engine {
 public:
  explicit Engine(std::shared_ptr<Device> device);
  ~Engine();  // destroy all queues first
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Returns the process's engine for these options and opens it if needed. Throws as Device::open does, or if
  // libibverbs is missing.
  static std::shared_ptr<Engine> of(const Options& options);
  // One for each device that options.device names, in that order; by default one. Those that cannot be used are left
  // out, and left_out says why; none is an error, as is a name that no device has.
  static std::vector<std::shared_ptr<Engine>> rails_of(const Options& options, std::string& left_out);

  const std::shared_ptr<Device>& device() const { return device_; }
  const Verbs& verbs() const { return device_->verbs(); }
  Registrations& memory() { return memory_; }

  // Creates a completion queue whose events go to the sink until silence() returns. Only then may end_queue() destroy
  // it.
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
  std::mutex mutex_;  // guards sinks_; held while a sink is called
  std::map<ibv_cq*, Sink*> sinks_;
  std::thread thread_;
};

}  // namespace ark::rdma
