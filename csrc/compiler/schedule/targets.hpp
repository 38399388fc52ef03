// Targets by name, with figures of real machines. They serve plans that are made on this machine but run elsewhere,
// such as those of tests, and GPUs that nobody measured. with_costs() puts a machine's measured figures in their place.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

std::vector<std::string> known_targets();
// `workers` 0: as many as the target has. Throws Error(invalid_argument) for an unknown name.
Target target_named(const std::string& name, int workers = 0);
// A GPU of this architecture with this many multiprocessors.
Target gpu_target(const std::string& arch, int multiprocessors);

// Calls visit(name, figure) for each figure of what work costs: those of every target, and those of tiles, which GPUs
// alone have. A measured record names them so.
template <class AnyTarget, class Visit>
void each_cost(AnyTarget& target, Visit&& visit) {
  visit("flops_per_us", target.flops_per_us), visit("pointwise_per_us", target.pointwise_per_us);
  visit("bytes_per_us", target.bytes_per_us), visit("cached_bytes_per_us", target.cached_bytes_per_us);
  visit("task_us", target.task_us), visit("wait_us", target.wait_us);
}
template <class AnyTarget, class Visit>
void each_tile_cost(AnyTarget& target, Visit&& visit) {
  visit("tile_half_flops_per_us", target.tiles.half_flops_per_us);
  visit("tile_float_flops_per_us", target.tiles.float_flops_per_us);
  visit("tile_float8_flops_per_us", target.tiles.float8_flops_per_us);
  visit("tile_bytes_per_us", target.tiles.bytes_per_us);
  visit("tile_all_bytes_per_us", target.tiles.all_bytes_per_us);
  visit("tile_start_us", target.tiles.start_us);
  visit("tile_element_us", target.tiles.element_us);
  visit("tile_finished_us", target.tiles.finished_us);
}

// Whether a figure can be one of a machine. Wrong ones, of a damaged record, would make absurd plans.
bool is_plausible(double figure);

// `target` with the named figures in place of its own. `from`: where they come from. Throws Error(invalid_argument) for
// a name that is no figure's, and for a figure that no machine has.
Target with_costs(Target target, const std::map<std::string, double>& figures, const std::string& from);

// A number that differs where figures do. Ranks whose plans were made with different figures may sum in other orders.
uint64_t digest_of_costs(const Target& target);

}  // namespace ark::compiler
