// See json_reader.hpp.
#include "util/json_reader.hpp"

#include "nlohmann/json.hpp"

namespace ark {

namespace {

template <class T>
std::optional<T> found(const std::map<std::string, T>& members, const std::string& name) {
  const auto at = members.find(name);
  return at == members.end() ? std::nullopt : std::optional<T>(at->second);
}

}  // namespace

std::optional<JsonObject> JsonObject::parse(std::string_view text) {
  const nlohmann::json parsed = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object()) return std::nullopt;
  JsonObject object;
  for (const auto& [name, value] : parsed.items()) {
    if (value.is_string()) object.texts_[name] = value.get<std::string>();
    if (value.is_number()) object.numbers_[name] = value.get<double>();
  }
  return object;
}

std::optional<std::string> JsonObject::text(const std::string& name) const {
  return found(texts_, name);
}

std::optional<double> JsonObject::number(const std::string& name) const {
  return found(numbers_, name);
}

}  // namespace ark
