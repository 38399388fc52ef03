// Writes JSON text into a string. Commas follow from one flag, which tells whether a value is the first after a bracket
// or key. Strings are checked as UTF-8 character by character, because names come from users.
#include "util/json_writer.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace ark {

namespace {

// Length of the UTF-8 character at the front of `text`; 0 if it is invalid (including overlong forms and surrogates).
size_t utf8_length(std::string_view text) {
  const auto byte = [&](size_t index) { return static_cast<unsigned char>(text[index]); };
  const unsigned char first = byte(0);
  size_t length = 0;
  uint32_t code = 0;
  uint32_t least = 0;
  if (first < 0x80) return 1;
  if ((first & 0xE0) == 0xC0) {
    length = 2, code = first & 0x1F, least = 0x80;
  } else if ((first & 0xF0) == 0xE0) {
    length = 3, code = first & 0x0F, least = 0x800;
  } else if ((first & 0xF8) == 0xF0) {
    length = 4, code = first & 0x07, least = 0x10000;
  }
  if (length == 0 || text.size() < length) return 0;
  for (size_t index = 1; index < length; ++index) {
    if ((byte(index) & 0xC0) != 0x80) return 0;
    code = code << 6 | (byte(index) & 0x3F);
  }
  return code < least || code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF) ? 0 : length;
}

}  // namespace

void JsonWriter::separate() {
  if (!fresh_) out_ += ',';
  fresh_ = false;
}

JsonWriter& JsonWriter::open(char bracket) {
  separate();
  out_ += bracket;
  fresh_ = true;
  return *this;
}

JsonWriter& JsonWriter::close(char bracket) {
  out_ += bracket;
  fresh_ = false;
  return *this;
}

JsonWriter& JsonWriter::key(std::string_view name) {
  text(name);
  out_ += ':';
  fresh_ = true;
  return *this;
}

JsonWriter& JsonWriter::text(std::string_view value) {
  separate();
  out_ += '"';
  while (!value.empty()) {
    const size_t length = utf8_length(value);
    const auto first = static_cast<unsigned char>(value[0]);
    if (length == 0) {
      out_ += "\xEF\xBF\xBD";
    } else if (first == '"' || first == '\\') {
      out_ += '\\';
      out_ += value[0];
    } else if (first < 0x20 || first == 0x7F) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", first);
      out_ += escaped;
    } else {
      out_.append(value.substr(0, length));
    }
    value.remove_prefix(std::max<size_t>(length, 1));
  }
  out_ += '"';
  return *this;
}

JsonWriter& JsonWriter::number(int64_t value) {
  separate();
  out_ += std::to_string(value);
  return *this;
}

JsonWriter& JsonWriter::real(double value) {
  if (!std::isfinite(value)) return null();
  separate();
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", value);
  out_ += text;
  return *this;
}

JsonWriter& JsonWriter::boolean(bool value) {
  separate();
  out_ += value ? "true" : "false";
  return *this;
}

JsonWriter& JsonWriter::null() {
  separate();
  out_ += "null";
  return *this;
}

JsonWriter& JsonWriter::number_or_null(std::string_view name, int64_t value, bool present) {
  key(name);
  return present ? number(value) : null();
}

}  // namespace ark
