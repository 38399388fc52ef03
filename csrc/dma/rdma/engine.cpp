// Runs the engine's thread and shares one engine per set of options. Completion queues map to their sinks under one
// lock, so after silence() no callback of that queue can run.
#include "dma/rdma/engine.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>

#include <cerrno>
#include <optional>
#include <tuple>
#include <vector>

#include "util/start_thread.hpp"

namespace ark::rdma {

Engine::Engine(std::shared_ptr<Device> device)
    : device_(std::move(device)),
      memory_(device_, static_cast<size_t>(device_->options().cache_mb) << 20),
      end_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!end_) throw system_error("no event descriptor for RDMA's thread", errno, "Raise `ulimit -n`.");
  channel_ = verbs().create_comp_channel(device_->context());
  if (!channel_) throw system_error("no completion channel on " + device_->port().device, errno);
  ::fcntl(channel_->fd, F_SETFL, ::fcntl(channel_->fd, F_GETFL) | O_NONBLOCK);
  try {
    thread_ = start_thread("the thread that hears of RDMA's completions", [this] { run(); });
  } catch (...) {
    verbs().destroy_comp_channel(channel_);
    throw;
  }
}

Engine::~Engine() {
  const uint64_t one = 1;
  (void)!::write(end_.get(), &one, sizeof one);
  thread_.join();
  verbs().destroy_comp_channel(channel_);
}

std::shared_ptr<Engine> Engine::of(const Options& options) {
  static std::mutex mutex;
  static std::vector<std::pair<Options, std::weak_ptr<Engine>>> engines;
  const std::lock_guard lock(mutex);
  std::erase_if(engines, [](const auto& one) { return one.second.expired(); });
  for (const auto& [of, engine] : engines)
    if (of == options)
      if (auto found = engine.lock()) return found;
  std::string why_not;
  auto verbs = Verbs::load(options.library, why_not);
  if (!verbs) throw Error(ErrorKind::system, why_not, ErrorContext{-1, -1, "init", 0, ""});
  auto engine = std::make_shared<Engine>(Device::open(std::move(verbs), options));
  engines.emplace_back(options, engine);
  return engine;
}

std::vector<std::shared_ptr<Engine>> Engine::rails_of(const Options& options, std::string& left_out) {
  if (options.device != "all" && options.device.find(',') == std::string::npos) return {of(options)};
  std::string why_not;
  const auto verbs = Verbs::load(options.library, why_not);
  if (!verbs) throw Error(ErrorKind::system, why_not, ErrorContext{-1, -1, "init", 0, ""});
  std::vector<std::shared_ptr<Engine>> rails;
  std::optional<Error> first;
  for (const std::string& name : wanted_devices(*verbs, options)) {
    Options one = options;
    one.device = name;
    try {
      if (rails.size() == kMostRails)
        throw Error(ErrorKind::system, name + ": a rank uses " + std::to_string(kMostRails) + " devices at most");
      rails.push_back(of(one));
    } catch (const Error& error) {
      left_out += (left_out.empty() ? "" : "; ") + error.message();
      if (!first) first = error;
    }
  }
  if (rails.empty()) throw *first;
  return rails;
}

ibv_cq* Engine::begin_queue(int entries, Sink& sink) {
  const std::lock_guard lock(mutex_);
  ibv_cq* queue = verbs().create_cq(device_->context(), entries, nullptr, channel_, 0);
  if (!queue)
    throw system_error("no completion queue of " + std::to_string(entries) + " entries on " + device_->port().device,
                       errno, "See the device's limits (`ibv_devinfo -v`: max_cq, max_cqe) and `ulimit -l`.");
  if (const int error = Verbs::req_notify_cq(queue)) {
    verbs().destroy_cq(queue);
    throw system_error("a completion queue of " + device_->port().device + " gives no events", error);
  }
  sinks_[queue] = &sink;
  return queue;
}

void Engine::silence(ibv_cq* queue) {
  const std::lock_guard lock(mutex_);  // take_completions() acknowledges its events before it unlocks
  sinks_.erase(queue);
}

void Engine::run() {
  pollfd watched[] = {{channel_->fd, POLLIN, 0}, {device_->context()->async_fd, POLLIN, 0}, {end_.get(), POLLIN, 0}};
  while (true) {
    const int ready = ::poll(watched, std::size(watched), -1);
    if (ready < 0 && errno != EINTR) return;
    if (ready <= 0) continue;
    if (watched[2].revents) return;
    if (watched[0].revents) take_completions();
    if (watched[1].revents) take_device_events();
  }
}

void Engine::take_completions() {
  const std::lock_guard lock(mutex_);
  ibv_cq* queue = nullptr;
  void* user = nullptr;
  while (verbs().get_cq_event(channel_, &queue, &user) == 0) {
    verbs().ack_cq_events(queue, 1);
    const auto sink = sinks_.find(queue);
    if (sink == sinks_.end()) continue;
    Verbs::req_notify_cq(queue);
    sink->second->completions();
  }
}

void Engine::take_device_events() {
  const std::lock_guard lock(mutex_);
  ibv_async_event event;
  while (verbs().get_async_event(device_->context(), &event) == 0) {
    const bool fatal = event.event_type == IBV_EVENT_DEVICE_FATAL;
    verbs().ack_async_event(&event);
    // Port and queue pair errors reach the channels as failed completions once the retry budget is used up.
    if (!fatal) continue;
    const Error error(ErrorKind::system, "the RDMA device " + device_->port().device + " failed",
                      ErrorContext{-1, -1, "", 0, "See the kernel's log (dmesg) for the NIC, and restart the job."});
    for (const auto& [queue, sink] : sinks_) sink->device_failed(error);
  }
}

}  // namespace ark::rdma
