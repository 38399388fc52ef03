// Reads /proc/meminfo and the control group's files. Missing or unreadable entries count as "no limit".
#include "shm/available_memory.hpp"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>

namespace ark {

namespace {

constexpr uint64_t kNoLimit = UINT64_MAX;

uint64_t add(uint64_t a, uint64_t b) {
  return a > kNoLimit - b ? kNoLimit : a + b;
}

// Returns the number after `name` in a file of "name value" lines, or `missing`.
uint64_t read_field(const std::string& path, const std::string& name, uint64_t missing) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string key;
    uint64_t value;
    if (words >> key >> value && key == name) return value;
  }
  return missing;
}

// Reads a file that holds one number or "max".
uint64_t read_number(const std::string& path, uint64_t missing) {
  std::ifstream file(path);
  uint64_t value;
  return file >> value ? value : missing;
}

uint64_t left_in_group(const std::string& folder, uint64_t free_swap) {
  const uint64_t limit = read_number(folder + "/memory.max", kNoLimit);
  if (limit == kNoLimit) return kNoLimit;
  const uint64_t used = read_number(folder + "/memory.current", 0);
  const std::string stat = folder + "/memory.stat";
  const uint64_t cache = read_field(stat, "inactive_file", 0) + read_field(stat, "active_file", 0);
  const uint64_t swap_limit = read_number(folder + "/memory.swap.max", kNoLimit);
  const uint64_t swap_used = std::min(swap_limit, read_number(folder + "/memory.swap.current", 0));
  const uint64_t fixed = used - std::min(used, cache);
  return add(limit - std::min(limit, fixed), std::min(free_swap, swap_limit - swap_used));
}

// The path from "0::/a/b" in /proc/self/cgroup, as seen from the control group namespace; "" at the root.
std::string group_of_this_process() {
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);)
    if (line.rfind("0::/", 0) == 0) return line.size() == 4 ? std::string() : line.substr(3);
  return {};
}

}  // namespace

uint64_t available_memory() {
  const uint64_t free_swap = read_field("/proc/meminfo", "SwapFree:", 0) * 1024;
  const uint64_t machine = read_field("/proc/meminfo", "MemAvailable:", kNoLimit / 1024);
  uint64_t available = machine == kNoLimit / 1024 ? kNoLimit : add(machine * 1024, free_swap);
  for (std::string group = group_of_this_process();; group.resize(group.rfind('/'))) {
    available = std::min(available, left_in_group("/sys/fs/cgroup" + group, free_swap));
    if (group.empty() || group.find("..") != std::string::npos) return available;
  }
}

}  // namespace ark
