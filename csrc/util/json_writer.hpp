// A minimal JSON writer for objects, arrays and values. It places the commas.
//
// The output is always valid UTF-8: invalid bytes become U+FFFD, and control characters are escaped. It does not detect
// wrong call sequences, such as a value without a key in an object.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace ark {

class JsonWriter {
 public:
  JsonWriter& open(char bracket);  // '{' or '['
  JsonWriter& close(char bracket);
  JsonWriter& key(std::string_view name);
  JsonWriter& text(std::string_view value);
  JsonWriter& number(int64_t value);
  JsonWriter& real(double value);  // six digits; null if JSON cannot represent the number
  JsonWriter& boolean(bool value);
  JsonWriter& null();
  // Shorthand for one member of an object.
  JsonWriter& field(std::string_view name, std::string_view value) { return key(name).text(value); }
  JsonWriter& field(std::string_view name, const char* value) { return key(name).text(value); }
  JsonWriter& field(std::string_view name, int64_t value) { return key(name).number(value); }
  JsonWriter& flag(std::string_view name, bool value) { return key(name).boolean(value); }
  JsonWriter& number_or_null(std::string_view name, int64_t value, bool present);

  std::string take() { return std::move(out_); }

 private:
  void separate();

  std::string out_;
  bool fresh_ = true;  // no comma needed: at the start, after a bracket or after a key
};

}  // namespace ark
