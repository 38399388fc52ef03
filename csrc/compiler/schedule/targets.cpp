// See targets.hpp. The figures of sm_90a are an H100's or H200's, from a skeleton of the loop kernel that was measured
// there: 132 blocks, a ring of ten 16 KB pages of which two are in flight, packets for what is small.
#include "compiler/schedule/targets.hpp"

#include "util/error.hpp"

namespace ark::compiler {

std::vector<std::string> known_targets() {
  return {"cpu", "sm_90a"};
}

Target target_named(const std::string& name, int workers) {
  Target target;
  target.name = name;
  if (name == "sm_90a") {
    target.workers = 132;
    target.packets = true;
    target.flops_per_us = target.pointwise_per_us = 4e5;
    target.bytes_per_us = 25e3;
    target.cached_bytes_per_us = 4e4;
    target.task_us = 0.3;
    target.wait_us = 1.5;
    target.caches.bytes = 50 << 20;
  } else if (name != "cpu") {
    std::string all;
    for (const std::string& one : known_targets()) all += (all.empty() ? "" : ", ") + one;
    throw Error(ErrorKind::invalid_argument, "there is no target '" + name + "'; known are " + all);
  }
  if (workers > 0) target.workers = workers;
  return target;
}

Target gpu_target(const std::string& arch, int multiprocessors) {
  Target target = target_named("sm_90a", multiprocessors);
  target.name = arch;
  target.packets_of_rows = true;
  target.pointwise_per_us = 2e4;  // of a block whose threads have few elements each
  target.cached_bytes_per_us = 2e4;
  return target;
}

}  // namespace ark::compiler
