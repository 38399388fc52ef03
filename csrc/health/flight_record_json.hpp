// JSON of the flight record, schema version 1 (bump the major on changed meaning, the minor on added fields).
//
// {
//   "schema": "ark_flight_record", "version": "1.0",
//   "process": {"pid", "host", "global_rank", "world_size", "written_ns"},  unknown ranks are -1
//   "capacity", "recorded", "dropped",         entries ever recorded; updates given up (see flight_record.hpp)
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
//     "input_sizes": [[...]], "output_sizes": [[...]], "inputs", "outputs",  sizes kept; tensors in all
//     "truncated",                                                          sizes are folded or cut
//     "timeout_ms", "time_created_ns", "time_started_ns", "time_ended_ns",  wall clock; null: not yet
//     "duration_ns", "error"                                                null unless ended; null unless failed
//   }],
//   "failures": [{                                                          first cause first
//     "time_ns", "group", "error", "peer", "operation", "sequence", "frame",
//     "peers": [{"rank", "last_enqueued", "last_started", "last_completed", "waiting_on", "operation", "lost"}]
//   }]
// }
// Integers are below 2^63; text is valid UTF-8 (bytes that are not become U+FFFD).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace ark {

// Just enough JSON to write: objects, arrays, values; commas are its business.
class JsonWriter {
 public:
  JsonWriter& open(char bracket);  // '{' or '['
  JsonWriter& close(char bracket);
  JsonWriter& key(std::string_view name);
  JsonWriter& text(std::string_view value);
  JsonWriter& number(int64_t value);
  JsonWriter& boolean(bool value);
  JsonWriter& null();
  // Shorthand for one member of an object.
  JsonWriter& field(std::string_view name, std::string_view value) { return key(name).text(value); }
  JsonWriter& field(std::string_view name, const char* value) { return key(name).text(value); }
  JsonWriter& field(std::string_view name, int64_t value) { return key(name).number(value); }
  JsonWriter& flag(std::string_view name, bool value) { return key(name).boolean(value); }
  JsonWriter& number_or_null(std::string_view name, int64_t value, bool present);

  std::string take() { return std::move(out_); }

 private:
  void separate();

  std::string out_;
  bool fresh_ = true;  // nothing to separate from: at the start, after a bracket or after a key
};

}  // namespace ark
