// Writes the flight record as JSON. Runs on failure or on demand, never on the hot path.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>

#include "health/flight/flight_record.hpp"
#include "health/flight/flight_record_impl.hpp"
#include "util/dtype.hpp"
#include "util/json_writer.hpp"

// Schema, version 1. A changed meaning bumps the major version, an added field the minor.
//
// {
//   "schema": "ark_flight_record", "version": "1.0",
//   "process": {"pid", "host", "global_rank", "world_size", "written_ns"},  unknown ranks are -1
//   "capacity", "recorded", "dropped",         entries ever recorded; dropped updates (see flight_record.hpp)
//   "groups": [{
//     "id", "name", "description", "rank", "size", "global_ranks": [...], "retired",
//     "collective": {"last_scheduled", "last_started", "last_completed"},   sequence numbers; 0: none yet
//     "p2p":        {"last_scheduled", "last_started", "last_completed"}
//   }],
//   "entries": [{                                                           oldest first
//     "id", "group", "operation", "is_p2p", "sequence", "p2p_sequence", "state",
//     "peer", "tag", "root",                                                ranks in the group; null: none
//     "dtype", "output_dtype", "reduce_op",                                 PyTorch's names; null: none
//     "input_bytes", "input_elements", "output_elements",
//     "input_sizes": [[...]], "output_sizes": [[...]], "inputs", "outputs",  stored sizes; number of all tensors
//     "truncated",                                                          sizes are folded or omitted
//     "timeout_ms", "time_created_ns", "time_started_ns", "time_ended_ns",  wall clock; null: not yet
//     "duration_ns", "error"                                                null unless ended; null unless failed
//   }],
//   "failures": [{                                                          first cause first
//     "time_ns", "group", "error", "peer", "operation", "sequence", "frame",
//     "peers": [{"rank", "last_enqueued", "last_started", "last_completed", "waiting_on", "operation", "lost"}]
//   }]
// }
// Integers are below 2^63; text is valid UTF-8 (invalid bytes become U+FFFD).
namespace ark {

namespace {

constexpr size_t kFailures = 8;  // number kept; the first are the interesting ones

int64_t wall_ns() {
  using namespace std::chrono;
  return duration_cast<nanoseconds>(system_clock::now().time_since_epoch()).count();
}

const char* name_of_state(FlightState state) {
  switch (state) {
    case FlightState::scheduled: return "scheduled";
    case FlightState::started: return "started";
    case FlightState::completed: return "completed";
    case FlightState::failed: return "failed";
  }
  return "unknown";
}

void write_sizes(JsonWriter& json, const char* name, const FlightSizes& sizes) {
  json.key(name).open('[');
  for (int tensor = 0; tensor < sizes.stored(); ++tensor) {
    json.open('[');
    for (int dim = 0; dim < sizes.dims(tensor); ++dim) json.number(sizes.size(tensor, dim));
    json.close(']');
  }
  json.close(']');
}

void write_dtype(JsonWriter& json, const char* name, int dtype) {
  if (dtype < 0 || dtype >= kDTypes) {
    json.key(name).null();
  } else {
    json.field(name, name_of(static_cast<DType>(dtype)));
  }
}

// `offset` converts the steady clock to the wall clock.
void write_entry(JsonWriter& json, const FlightEntry& entry, const std::string& error, int64_t offset) {
  const bool ended = entry.ended_ns != 0;
  json.open('{').field("id", entry.id).field("group", entry.group).field("operation", entry.operation);
  json.flag("is_p2p", entry.is_p2p).field("sequence", entry.sequence).field("p2p_sequence", entry.p2p_sequence);
  json.field("state", name_of_state(entry.state));
  json.number_or_null("peer", entry.peer, entry.peer >= 0).number_or_null("tag", entry.tag, entry.is_p2p);
  json.number_or_null("root", entry.root, entry.root >= 0);
  write_dtype(json, "dtype", entry.dtype);
  write_dtype(json, "output_dtype", entry.output_dtype >= 0 ? entry.output_dtype : entry.dtype);
  if (entry.reduce_op < 0 || entry.reduce_op >= kReduceOps) {
    json.key("reduce_op").null();
  } else {
    json.field("reduce_op", name_of(static_cast<ReduceOp>(entry.reduce_op)));
  }
  json.field("input_bytes", entry.input_bytes).field("input_elements", entry.input_elements);
  json.field("output_elements", entry.output_elements);
  write_sizes(json, "input_sizes", entry.inputs);
  write_sizes(json, "output_sizes", entry.outputs);
  json.field("inputs", entry.inputs.total()).field("outputs", entry.outputs.total());
  json.flag("truncated", entry.inputs.truncated() || entry.outputs.truncated());
  json.field("timeout_ms", entry.timeout_ms).field("time_created_ns", entry.created_ns + offset);
  json.number_or_null("time_started_ns", entry.started_ns + offset, entry.started_ns != 0);
  json.number_or_null("time_ended_ns", entry.ended_ns + offset, ended);
  json.number_or_null("duration_ns", entry.ended_ns - entry.started_ns, ended && entry.started_ns != 0);
  json.key("error");
  entry.state == FlightState::failed ? json.text(error) : json.null();
  json.close('}');
}

void write_failure(JsonWriter& json, int64_t time, const FlightFailure& failure) {
  json.open('{').field("time_ns", time).number_or_null("group", failure.group, failure.has_group);
  json.field("error", failure.error).number_or_null("peer", failure.peer, failure.peer >= 0);
  json.field("operation", failure.operation).field("sequence", failure.sequence).field("frame", failure.frame);
  json.key("peers").open('[');
  for (const FlightPeer& peer : failure.peers) {
    json.open('{').field("rank", peer.rank).field("last_enqueued", peer.last_enqueued);
    json.field("last_started", peer.last_started).field("last_completed", peer.last_completed);
    json.number_or_null("waiting_on", peer.waiting_on, peer.waiting_on >= 0).field("operation", peer.operation);
    json.flag("lost", peer.lost).close('}');
  }
  json.close(']').close('}');
}

}  // namespace

std::string FlightRecord::to_json() const {
  std::vector<std::string> errors;
  const std::vector<FlightEntry> entries = snapshot(&errors);
  const int64_t now = wall_ns();
  const int64_t offset = now - flight_now_ns();
  char host[256] = {};
  ::gethostname(host, sizeof host - 1);

  JsonWriter json;
  json.open('{').field("schema", "ark_flight_record").field("version", "1.0");
  json.key("process").open('{').field("pid", ::getpid()).field("host", host);
  json.field("global_rank", global_rank_.load(std::memory_order_relaxed));
  json.field("world_size", world_size_.load(std::memory_order_relaxed)).field("written_ns", now).close('}');
  json.field("capacity", capacity()).field("recorded", last_id()).field("dropped", dropped());

  std::lock_guard guard(mutex_);
  json.key("groups").open('[');
  for (uint32_t id = 1; id < groups_; ++id) {
    const Group& entry = *group(id);
    json.open('{').field("id", id).field("name", entry.name).field("description", entry.description);
    json.field("rank", entry.rank).field("size", entry.size).key("global_ranks").open('[');
    for (int member : entry.global_ranks) json.number(member);
    json.close(']').flag("retired", entry.retired);
    const auto progress = [&](const char* name, const std::atomic<uint64_t>* counters) {
      const auto read = [&](int stage) { return counters[stage].load(std::memory_order_relaxed); };
      json.key(name).open('{').field("last_scheduled", read(Group::kScheduled));
      json.field("last_started", read(Group::kStarted)).field("last_completed", read(Group::kCompleted)).close('}');
    };
    progress("collective", entry.collective);
    progress("p2p", entry.p2p);
    json.close('}');
  }
  json.close(']').key("entries").open('[');
  for (size_t index = 0; index < entries.size(); ++index) write_entry(json, entries[index], errors[index], offset);
  json.close(']').key("failures").open('[');
  for (const auto& [time, failure] : failures_) write_failure(json, time + offset, failure);
  json.close(']').close('}');
  return json.take();
}

void FlightRecord::note(const FlightFailure& failure) noexcept {
  try {
    std::lock_guard guard(mutex_);
    const auto same = [&](const auto& kept) { return failure.key != 0 && kept.second.key == failure.key; };
    if (failures_.size() >= kFailures || std::any_of(failures_.begin(), failures_.end(), same)) return;
    failures_.emplace_back(flight_now_ns(), failure);
  } catch (...) {
    // Out of memory while reporting a failure: the failure itself still reaches the user.
  }
}

bool FlightRecord::write_file(const std::string& path) const {
  const std::string text = to_json();
  static std::atomic<uint64_t> serial{0};
  const std::string temporary = path + ".tmp." + std::to_string(::getpid()) + "." + std::to_string(serial.fetch_add(1));
  const int file = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (file < 0) return false;
  size_t written = 0;
  while (written < text.size()) {
    const ssize_t count = ::write(file, text.data() + written, text.size() - written);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    written += static_cast<size_t>(count);
  }
  const bool closed = ::close(file) == 0;
  if (closed && written == text.size() && ::rename(temporary.c_str(), path.c_str()) == 0) return true;
  ::unlink(temporary.c_str());
  return false;
}

bool FlightRecord::dump(const std::string& path) const noexcept {
  try {
    return write_file(path);
  } catch (...) {
    return false;
  }
}

bool FlightRecord::dump(const std::string& path, const FlightFailure& failure) noexcept {
  try {
    if (failure.key != 0) {
      std::lock_guard guard(mutex_);
      if (std::find(dumped_keys_.begin(), dumped_keys_.end(), failure.key) != dumped_keys_.end()) return true;
      dumped_keys_.push_back(failure.key);
    }
    note(failure);
    return write_file(path);
  } catch (...) {
    return false;
  }
}

std::string flight_dump_path(const std::string& prefix, int global_rank) {
  return prefix + std::to_string(global_rank) + ".json";
}

}  // namespace ark
