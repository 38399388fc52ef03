// Checks whether two ranks run the same operation. Every such comparison and its error text is here.
#pragma once

#include <optional>

#include "collectives/operation.hpp"
#include "util/error.hpp"

namespace ark {

// The Descriptor::algorithm of sums over several nodes in the order of all ranks, or with rounded partials
// (Options::sums).
inline constexpr uint8_t kFlatOrder = 255;
inline constexpr uint8_t kInputPartials = 254;

// `theirs` comes from another process: it is compared as bytes, and described only after its numbers were checked.
std::optional<Error> disagreement(const Operation& operation, const Descriptor& theirs, int rank, int peer);

// all_to_all: compares the bytes that `from` sends with the bytes that `to` expects; `rank` reports the error.
std::optional<Error> broken_promise(const Operation& operation, int rank, int from, int to, uint64_t sent,
                                    uint64_t expected);

}  // namespace ark
