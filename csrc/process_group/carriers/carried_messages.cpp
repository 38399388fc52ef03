// Starts and awaits the messages of a collective. A wait that fails or times out first looks for the cause: another
// rank's note of the failure, or a node without heartbeats. The error then names that cause instead of a closed
// connection.
#include "process_group/carriers/carried_messages.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

#include "util/error.hpp"

namespace ark {

namespace {

constexpr auto kForTheStory = std::chrono::milliseconds(500);

}  // namespace

int tag_of(MessageChannel channel) {
  return kFirstReservedTag + static_cast<int>(channel);
}

CarriedMessages::~CarriedMessages() {
  for (Begun& one : begun_)
    if (one.work && one.outlives) left_.push_back(std::move(one.work));
}

size_t CarriedMessages::send(int peer, MessageChannel channel, const void* data, size_t bytes) {
  if (bytes == 0) return begin(peer, nullptr, false);
  ++sent_;
  return begin(peer, started(peer, [&] { return carrier_.send(peer, tag_of(channel), data, bytes); }), false);
}

size_t CarriedMessages::receive(int peer, MessageChannel channel, void* data, size_t bytes, bool outlives) {
  if (bytes == 0) return begin(peer, nullptr, false);
  return begin(peer, started(peer, [&] { return carrier_.receive(peer, tag_of(channel), data, bytes); }), outlives);
}

// A connection that ended since the last message refuses the next one.
CarriedMessages::Work CarriedMessages::started(int peer, const std::function<Work()>& start) {
  Failure failure;
  try {
    return start();
  } catch (const std::exception& error) {
    failure = Failure(error);
  }
  hear_the_story();
  raise(peer, failure, false, "");
}

size_t CarriedMessages::begin(int peer, Work work, bool outlives) {
  const std::lock_guard lock(mutex_);
  if (aborted_ && work) work->abort();
  begun_.push_back({std::move(work), peer, outlives});
  return begun_.size() - 1;
}

void CarriedMessages::wait_for_all() {
  for (size_t number = 0; number < begun_.size(); ++number) wait_for(number);
}

void CarriedMessages::abort() {
  const std::lock_guard lock(mutex_);
  aborted_ = true;
  ended_.notify_all();
  for (const Begun& one : begun_)
    if (one.work) one.work->abort();
}

// Only the operation's own thread changes the slot, so this read needs no lock; other threads look under the lock.
void CarriedMessages::wait_for(size_t number) {
  if (begun_[number].work) wait_for(begun_[number].work, begun_[number].peer);
}

// For a late rank: returns an empty string, or text about a silent node (the rank's own, or one that it may wait for).
// Throws Aborted if another rank knows more.
std::string CarriedMessages::look_for_node(int peer) {
  const NodeBeats::Reading before = beats_.read();
  if (!before.trouble.empty()) return beats_.silence(peer, before, before);
  {
    std::unique_lock lock(mutex_);
    if (ended_.wait_for(lock, beats_.watch(), [this] { return aborted_; })) throw Aborted();
  }
  return beats_.silence(peer, before, beats_.read());
}

void CarriedMessages::wait_for(Work& work, int peer) {
  // Tells the ranks of this node that this rank waits for another node, so they do not blame it.
  struct Outside {
    explicit Outside(int64_t& whom) : waiting_on(whom) { protocol::store_relaxed(waiting_on, kWaitsOutside); }
    ~Outside() { protocol::store_relaxed(waiting_on, int64_t{0}); }
    int64_t& waiting_on;
  } const outside(progress_.waiting_on);
  const OperationContext& context = operation_.context;
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(context.deadline - Clock::now());
  constexpr std::chrono::milliseconds least(1), most(1'000'000'000);  // a greater value overflows in the carrier
  bool done = false;
  Failure failure;
  try {
    done = work->wait(std::clamp(left, least, most) + kForALateStory);
  } catch (const std::exception& error) {
    failure = Failure(error);
  }
  const bool late = Clock::now() >= context.deadline || (!done && failure.text.empty());
  const bool told = [this] {
    const std::lock_guard lock(mutex_);
    return aborted_;
  }();
  const std::string silence = late && !told ? look_for_node(peer) : "";
  if (!done && !late) hear_the_story();
  {
    const std::lock_guard lock(mutex_);
    if (aborted_) throw Aborted();
    if (done) return work.reset();
  }
  raise(peer, failure, late, silence);
}

CarriedMessages::Failure::Failure(const std::exception& error) : text(error.what()) {
  const auto* const known = dynamic_cast<const Error*>(&error);
  if (known == nullptr) return;
  text = known->message(), kind = known->kind();
  if (!known->context().remedy.empty()) remedy = known->context().remedy;
}

// A closed connection is seldom the cause. The rank that closed it, or a witness, usually reports why.
void CarriedMessages::hear_the_story() {
  std::unique_lock lock(mutex_);
  if (ended_.wait_for(lock, kForTheStory, [this] { return aborted_; })) throw Aborted();
}

void CarriedMessages::raise(int peer, Failure& failure, bool late, const std::string& silence) const {
  const OperationContext& context = operation_.context;
  std::string what = carrier_.name() + ", which carries this group between nodes, failed " +
                     (late ? "to hear in " + std::to_string(context.timeout.count()) + " ms from" : "with") + " rank " +
                     std::to_string(peer) + ": " + (failure.text.empty() ? "no answer" : failure.text);
  // The silent node comes first, because notes of failures are truncated.
  if (!silence.empty()) {
    what = silence + "; " + what;
    failure.remedy =
        "See whether that machine runs and can be reached, and the output of its ranks; destroy the process group "
        "(or restart the job) before going on.";
  } else if (!late && failure.kind == ErrorKind::peer_lost) {
    what = "none of " + beats_.node_text(peer) + " says why: " + what;
  }
  throw Error(late ? ErrorKind::timeout : failure.kind, what,
              ErrorContext{rank_, peer, context.name, context.sequence, failure.remedy});
}

}  // namespace ark
