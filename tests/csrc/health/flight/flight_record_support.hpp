// Support of the flight record's tests: a strict JSON reader, entries made from one number, and a temporary folder.
#pragma once

#include <dirent.h>
#include <unistd.h>

#include <cctype>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "health/flight/flight_record.hpp"
#include "util/dtype.hpp"

namespace ark::test {

// A strict reader of RFC 8259. The whole text must be one value. Numbers are integers, as the writer makes them.
class JsonReader {
 public:
  static bool valid(std::string_view text) {
    JsonReader reader(text);
    return reader.value() && reader.text_.empty();
  }

 private:
  explicit JsonReader(std::string_view text) : text_(text) {}

  bool take(std::string_view token) {
    if (!text_.starts_with(token)) return false;
    text_.remove_prefix(token.size());
    return true;
  }
  bool digits() {
    const bool any = !text_.empty() && std::isdigit(static_cast<unsigned char>(text_[0]));
    while (!text_.empty() && std::isdigit(static_cast<unsigned char>(text_[0]))) text_.remove_prefix(1);
    return any;
  }
  bool string() {
    if (!take("\"")) return false;
    while (!text_.empty()) {
      const char next = text_[0];
      text_.remove_prefix(1);
      if (next == '"') return true;
      if (static_cast<unsigned char>(next) < 0x20) return false;
      if (next != '\\') continue;
      if (take("u")) {
        for (int digit = 0; digit < 4; ++digit) {
          if (text_.empty() || !std::isxdigit(static_cast<unsigned char>(text_[0]))) return false;
          text_.remove_prefix(1);
        }
      } else if (text_.empty() || std::string_view("\"\\/bfnrt").find(text_[0]) == std::string_view::npos) {
        return false;
      } else {
        text_.remove_prefix(1);
      }
    }
    return false;
  }
  bool list(std::string_view end, bool members) {
    if (take(end)) return true;
    do {
      if (members && !(string() && take(":"))) return false;
      if (!value()) return false;
    } while (take(","));
    return take(end);
  }
  bool value() {
    if (take("{")) return list("}", true);
    if (take("[")) return list("]", false);
    if (text_.starts_with('"')) return string();
    if (take("true") || take("false") || take("null")) return true;
    take("-");
    return digits();
  }

  std::string_view text_;
};

inline FlightEntry entry_of(uint32_t group, uint64_t sequence, const char* operation = "all_reduce") {
  FlightEntry entry;
  entry.group = group;
  entry.sequence = sequence;
  entry.operation = operation;
  entry.dtype = static_cast<int8_t>(DType::f32);
  entry.reduce_op = static_cast<int8_t>(ReduceOp::sum);
  entry.inputs.add(static_cast<int64_t>(sequence));
  entry.outputs.add(static_cast<int64_t>(sequence));
  return entry;
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

class Folder {
 public:
  Folder() {
    char name[] = "/tmp/flight_record_test.XXXXXX";
    path_ = ::mkdtemp(name);
  }
  ~Folder() {
    for (const auto& name : names()) ::unlink((path_ + "/" + name).c_str());
    ::rmdir(path_.c_str());
  }
  std::vector<std::string> names() const {
    std::vector<std::string> found;
    DIR* folder = ::opendir(path_.c_str());
    while (const dirent* item = ::readdir(folder)) {
      if (item->d_name[0] != '.') found.emplace_back(item->d_name);
    }
    ::closedir(folder);
    return found;
  }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

inline std::string contents(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

}  // namespace ark::test
