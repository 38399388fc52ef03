// Reads and writes the file of measured costs, and measures if there is none that fits. See costs.hpp.
#include "compiler/runtime/costs.hpp"

#include <ctime>
#include <fstream>
#include <optional>

#include "compiler/runtime/measure.hpp"
#include "compiler/schedule/targets.hpp"
#include "util/error.hpp"
#include "util/json_reader.hpp"
#include "util/json_writer.hpp"
#include "util/sha256.hpp"

namespace ark::compiler {

namespace {

// "AMD EPYC 9334, 25, 17, 1": name, family, model and stepping of the first processor.
std::string processor() {
  std::ifstream in("/proc/cpuinfo");
  std::string all;
  for (std::string line; std::getline(in, line) && !line.empty();) {
    const size_t colon = line.find(": "), end = line.find_last_not_of("\t ", line.find(':') - 1);
    if (colon == std::string::npos) continue;
    const std::string name = line.substr(0, end + 1);
    if (name != "model name" && name != "cpu family" && name != "model" && name != "stepping") continue;
    all += (all.empty() ? "" : ", ") + line.substr(colon + 2);
  }
  return all;
}

std::string now() {
  const std::time_t seconds = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&seconds, &parts);
  char text[40];
  std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M UTC", &parts);
  return text;
}

std::string text_of(const Target& target, const std::string& key) {
  JsonWriter json;
  json.open('{').field("schema", "ark_costs").field("key", key).field("processor", processor());
  json.field("workers", target.workers).field("measured", now());
  each_cost(target, [&](const char* name, double figure) { json.key(name).real(figure); });
  json.close('}');
  return json.take() + "\n";
}

// Reads a file's figures if it is complete and they are plausible.
std::optional<Target> read(const std::string& text, const std::string& key, Target target) {
  const std::optional<JsonObject> stored = JsonObject::parse(text);
  if (!stored || stored->text("schema") != "ark_costs" || stored->text("key") != key) return std::nullopt;
  bool complete = true;
  each_cost(target, [&](const char* name, double& figure) {
    const std::optional<double> value = stored->number(name);
    complete = complete && value && is_plausible(*value);
    figure = value.value_or(figure);
  });
  if (!complete) return std::nullopt;
  target.costs = "measured " + stored->text("measured").value_or("");
  return target;
}

}  // namespace

Target with_measured_costs(const Target& target, jit::HostCompiler& compiler,
                           const std::function<void(const std::string&)>& log) {
  try {
    jit::Sha256 hash;
    for (const std::string& part : {compiler.key(kMeasuredSource), processor(), std::to_string(target.workers)})
      hash.field(part);
    const std::string key = hash.hex_digest();
    const std::optional<std::string> text = compiler.cache().text(
        key + ".costs.json", [&](const std::string& found) { return read(found, key, target).has_value(); },
        [&] {
          const jit::LoadedLibrary library(compiler.library(kMeasuredSource).library);
          return text_of(measured(target, library), key);
        });
    const std::optional<Target> known = text ? read(*text, key, target) : std::nullopt;
    if (known) return *known;
    if (log) log("ark: plans are made with assumed costs of work: what is measured could not be kept");
  } catch (const Error& error) {
    if (log) log(std::string("ark: plans are made with assumed costs of work: ") + error.what());
  }
  return target;
}

void prepare_costs(jit::HostCompiler& compiler) noexcept {
  try {
    if (compiler.cache().stores()) compiler.library(kMeasuredSource);
  } catch (const std::exception&) {  // the call that needs the costs reports the error
  }
}

}  // namespace ark::compiler
