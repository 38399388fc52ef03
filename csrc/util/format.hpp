// Text from a pattern and what stands in it, by {fmt} (third_party/fmt), which format.cpp compiles once: this header
// brings no more of it than checks patterns while they are compiled.
//
// Only for files that know no torch: PyTorch's headers bring a {fmt} of another version.
#pragma once

#include <string>

#include "fmt/base.h"

namespace ark {

std::string vformatted(fmt::string_view pattern, fmt::format_args args);
void vappend(std::string& text, fmt::string_view pattern, fmt::format_args args);

// (std::format is found for some arguments where this had that name.)
template <class... Args>
std::string formatted(fmt::format_string<Args...> pattern, const Args&... args) {
  return vformatted(pattern.str, fmt::make_format_args(args...));
}

// Appends to `text`.
template <class... Args>
void append(std::string& text, fmt::format_string<Args...> pattern, const Args&... args) {
  vappend(text, pattern.str, fmt::make_format_args(args...));
}

}  // namespace ark
