// {fmt}'s library, compiled here, and what format.hpp asks of it.
#include "util/format.hpp"

#include <iterator>

#include "fmt/format.cc"

namespace ark {

std::string vformatted(fmt::string_view pattern, fmt::format_args args) {
  return fmt::vformat(pattern, args);
}

void vappend(std::string& text, fmt::string_view pattern, fmt::format_args args) {
  fmt::vformat_to(std::back_inserter(text), pattern, args);
}

}  // namespace ark
