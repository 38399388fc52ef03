// Do two ranks mean the same operation? The one place that compares and words the complaint.
#pragma once

#include <optional>

#include "collectives/operation.hpp"
#include "util/error.hpp"

namespace ark {

// Descriptor::algorithm of sums over several nodes in the order of all ranks (Options::flat_order).
inline constexpr uint8_t kFlatOrder = 255;

// `theirs` came from another process: compared as bytes, described only after its numbers were checked.
std::optional<Error> disagreement(const Operation& operation, const Descriptor& theirs, int rank, int peer);

// all_to_all: what `from` sends to `to` against what `to` has room for, in bytes; told by `rank`.
std::optional<Error> broken_promise(const Operation& operation, int rank, int from, int to, uint64_t sent,
                                    uint64_t expected);

}  // namespace ark
