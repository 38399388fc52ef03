// See targets.hpp. The GPU figures were measured on an H100 and H200 with a skeleton of the loop kernel: 132 blocks,
// six pages of 16 KB in flight, packets for small results.
#include "compiler/schedule/targets.hpp"

#include <bit>
#include <cmath>

#include "util/error.hpp"

namespace ark::compiler {

std::vector<std::string> known_targets() {
  return {"cpu", "sm_90a"};
}

Target target_named(const std::string& name, int workers) {
  if (name == "sm_90a") return gpu_target(name, workers > 0 ? workers : 132);
  if (name != "cpu") {
    std::string all;
    for (const std::string& one : known_targets()) all += (all.empty() ? "" : ", ") + one;
    throw Error(ErrorKind::invalid_argument, "there is no target '" + name + "'; known are " + all);
  }
  Target target;
  if (workers > 0) target.workers = workers;
  return target;
}

Target gpu_target(const std::string& arch, int multiprocessors) {
  Target target;
  target.name = arch;
  target.workers = multiprocessors;
  target.in_flight = 6;
  target.packets = target.packets_of_rows = true;
  target.flops_per_us = 4e5;
  target.pointwise_per_us = 2e4;  // of a block whose threads have few elements each
  target.bytes_per_us = 25e3;
  target.cached_bytes_per_us = 2e4;
  target.task_us = 0.3;
  target.wait_us = 1.5;
  target.caches.bytes = 50 << 20;
  return target;
}

bool is_plausible(double figure) {
  return std::isfinite(figure) && figure >= 1e-7 && figure <= 1e10;
}

Target with_costs(Target target, const std::map<std::string, double>& figures, const std::string& from) {
  if (figures.empty()) return target;
  std::map<std::string, double*> known;
  const auto note = [&](const char* name, double& figure) { known[name] = &figure; };
  each_cost(target, note);
  each_tile_cost(target, note);
  for (const auto& [name, figure] : figures) {
    const auto found = known.find(name);
    if (found == known.end())
      throw Error(ErrorKind::invalid_argument, "there is no figure '" + name + "' of what work costs");
    if (!is_plausible(figure))
      throw Error(ErrorKind::invalid_argument,
                  "no machine's " + name + " is " + std::to_string(figure) + ": measure what work costs again");
    *found->second = figure;
  }
  target.costs = from;
  return target;
}

uint64_t digest_of_costs(const Target& target) {
  uint64_t digest = 0;
  const auto note = [&](const char*, double figure) {
    digest = (digest ^ std::bit_cast<uint64_t>(figure)) * 0x9e3779b97f4a7c15u;
    digest ^= digest >> 29;
  };
  each_cost(target, note);
  each_tile_cost(target, note);
  return digest;
}

}  // namespace ark::compiler
