// Measures or checks channels between two GPUs: the program behind benchmarks/dma.py and tests/gpu/test_channels.py.
//
// usage: dma kernels=DIR stub=FILE engines=a,b,... sizes=16,1024,... [mode=measure|check] [blocks=8] [seconds=60]
//            [seed=1] [cache=DIR] [roots=DIR:DIR] [toolkit=DIR:DIR]
// Prints one line of JSON per measurement or check. Every wait is bounded: a kernel gives up after two seconds, and
// then the flags that streams wait for are raised.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>

#include "jit/settings.hpp"
#include "runs.hpp"
#include "util/error.hpp"

using namespace ark;
using Clock = std::chrono::steady_clock;

namespace {

constexpr uint64_t kMostPacketBytes = 1 << 20;  // packets are pointless for larger messages

struct Arguments {
  std::map<std::string, std::string> given;
  std::string of(const std::string& name, const std::string& otherwise = "") const {
    const auto found = given.find(name);
    return found == given.end() ? otherwise : found->second;
  }
  std::vector<std::string> list(const std::string& name, char separator) const {
    std::vector<std::string> parts;
    std::istringstream text(of(name));
    for (std::string part; std::getline(text, part, separator);)
      if (!part.empty()) parts.push_back(part);
    return parts;
  }
};

bool needs_bulk(const std::string& engine) {
  return engine == "bulk" || engine == "stream" || engine == "pull" || engine.starts_with("add_");
}

int run(const Arguments& arguments) {
  jit::Settings settings;
  settings.version = "dma";
  settings.kernels_dir = arguments.of("kernels");
  settings.cache_dir = arguments.of("cache");
  settings.library_roots = arguments.list("roots", ':');
  settings.toolkit_dirs = arguments.list("toolkit", ':');
  jit::configure(settings);
  const std::string path = arguments.of("stub");
  std::ifstream file(path);
  const std::string stub{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (stub.empty() && driver().version > 0)
    throw Error(ErrorKind::invalid_argument, "cannot read the kernels from stub=" + path);
  channels::Machine machine(stub);
  const auto ends = Clock::now() + std::chrono::duration<double>(std::stod(arguments.of("seconds", "60")));
  const uint32_t blocks = static_cast<uint32_t>(std::stoul(arguments.of("blocks", "8")));
  const uint64_t seed = std::stoull(arguments.of("seed", "1"));
  const bool checks = arguments.of("mode", "measure") == "check";
  const auto left_out = [&](const std::string& engine) { return needs_bulk(engine) && !machine.has_bulk(); };
  for (const std::string& text : arguments.list("sizes", ',')) {
    const uint64_t bytes = std::stoull(text);
    for (const std::string& engine : arguments.list("engines", ',')) {
      if (left_out(engine) || (engine == "packet" && !checks && bytes > kMostPacketBytes)) continue;
      if (Clock::now() > ends) {
        std::printf("{\"late\": true}\n");
        return 0;
      }
      if (checks && engine.starts_with("add_")) {
        channels::check_sums(machine, engine, bytes / 4 + seed % 4, seed);
      } else if (checks) {
        channels::check_contents(machine, engine, bytes, seed);
      } else {
        channels::measure_latency(machine, engine, bytes);
        channels::measure_throughput(machine, engine, bytes, blocks);
      }
    }
  }
  for (const std::string& engine : arguments.list("engines", ','))
    if (checks && !left_out(engine)) channels::check_stuck(machine, engine);
  return 0;
}

}  // namespace

int main(int count, char** values) {
  Arguments arguments;
  for (int i = 1; i < count; ++i) {
    const std::string text = values[i];
    const size_t at = text.find('=');
    if (at == std::string::npos) {
      std::fprintf(stderr, "dma: %s is not NAME=VALUE\n", text.c_str());
      return 2;
    }
    arguments.given[text.substr(0, at)] = text.substr(at + 1);
  }
  try {
    const int result = run(arguments);
    std::fflush(stdout);
    std::_Exit(result);  // the process frees the driver's threads and memory
  } catch (const std::exception& error) {
    std::fflush(stdout);
    std::fprintf(stderr, "dma: %s\n", error.what());
    std::_Exit(1);
  }
}
