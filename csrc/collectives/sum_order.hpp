// How sums over several nodes are taken. The settings are the user's and alike on all ranks; which sums they concern
// follows from the operation.
#pragma once

#include <string>

#include "collectives/operation.hpp"

namespace ark {

struct SumOrder {
  bool flat = false;            // in the order of all ranks, as on one node; else in each node, then between nodes
  bool input_partials = false;  // a node's sum is rounded to the tensor's type before nodes are added
  bool operator==(const SumOrder&) const = default;
};

// As a group's plan says it; empty: the defaults.
std::string text_of(const SumOrder& sums);

// Sums and products of numbers that round: another order of adding gives other bits.
bool depends_on_order(const Descriptor& descriptor);

// The same of types that are added in float32, 8- and 16-bit floats: a node's sum takes more bytes than an element,
// unless it is rounded. Minima and maxima return an input.
bool has_wide_partials(const Descriptor& descriptor);

}  // namespace ark
