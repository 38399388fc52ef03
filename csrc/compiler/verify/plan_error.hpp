// How the checks of validator.hpp tell what is wrong with a plan.
#pragma once

#include "util/error.hpp"
#include "util/format.hpp"

namespace ark::compiler {

template <class... Args>
[[noreturn]] void plan_error(fmt::format_string<Args...> pattern, const Args&... args) {
  throw Error(ErrorKind::invalid_argument, formatted(pattern, args...));
}

}  // namespace ark::compiler
