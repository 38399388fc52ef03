// dlopen and dlsym behind two functions, so that tests can substitute a fake driver or NVRTC.
//
// Libraries stay open for the life of the process, because what they hand out has no owner that could close them.
#pragma once

#include <functional>
#include <string>

namespace ark::jit {

struct LibraryOpener {
  // Returns a handle, or nullptr and sets `why_not`.
  std::function<void*(const std::string& name, std::string& why_not)> open;
  // Returns the symbol's address, or nullptr.
  std::function<void*(void* library, const char* symbol)> symbol;

  static LibraryOpener system();
};

}  // namespace ark::jit
