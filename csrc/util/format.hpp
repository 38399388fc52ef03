// Text from a pattern and what stands in it: {fmt} (third_party/fmt), compiled where it is used.
//
// Only for files that know no torch: PyTorch's headers bring a {fmt} of another version.
#pragma once

#include <string>

#define FMT_HEADER_ONLY
#include "fmt/format.h"

namespace ark {

using fmt::format;

// Appends to `text`.
template <class... Args>
void append(std::string& text, fmt::format_string<Args...> pattern, const Args&... args) {
  fmt::vformat_to(std::back_inserter(text), pattern.str, fmt::make_format_args(args...));
}

}  // namespace ark
