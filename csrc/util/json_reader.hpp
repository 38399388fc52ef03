// Reads the members of a JSON object, with nlohmann/json (third_party/nlohmann), which json_reader.cpp alone includes:
// it takes seconds to compile.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace ark {

class JsonObject {
 public:
  // nullopt if the text is not one whole JSON object.
  static std::optional<JsonObject> parse(std::string_view text);

  // The member of that name, if it is text or a number. Members that are arrays or objects are not kept.
  std::optional<std::string> text(const std::string& name) const;
  std::optional<double> number(const std::string& name) const;

 private:
  std::map<std::string, std::string> texts_;
  std::map<std::string, double> numbers_;
};

}  // namespace ark
