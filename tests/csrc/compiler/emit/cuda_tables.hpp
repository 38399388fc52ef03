// Test support: the entries of a table in CUDA source, which are bytes of string literals (emit_cuda.cpp).
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "cuda/loop/launch.cuh"

namespace ark::compiler {

// Without the last one, which is never used.
template <class Entry>
std::vector<Entry> table_in(const std::string& text, const std::string& name) {
  std::string bytes;
  size_t at = text.find(name + "[] =\n");
  if (at == std::string::npos) return {};
  for (bool literal = false; literal || text[at] != ';'; ++at) {
    if (text[at] == '"') {
      literal = !literal;
    } else if (literal) {  // an octal escape
      int byte = 0;
      for (; text[at + 1] >= '0' && text[at + 1] <= '7'; ++at) byte = byte * 8 + text[at + 1] - '0';
      bytes += static_cast<char>(byte);
    } else if (text.compare(at, 2, "//") == 0) {
      at = text.find('\n', at);
    }
  }
  std::vector<Entry> entries(bytes.size() / sizeof(Entry) - 1);
  std::memcpy(entries.data(), bytes.data(), entries.size() * sizeof(Entry));
  return entries;
}

}  // namespace ark::compiler
