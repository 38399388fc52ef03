// See targets.hpp. The GPU figures were measured on an H100 and H200 with a skeleton of the loop kernel: 132 blocks,
// six pages of 16 KB in flight, packets for small results.
#include "compiler/schedule/targets.hpp"

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

}  // namespace ark::compiler
