// dlopen and dlsym behind two functions, so that tests can put a pretended driver or NVRTC in their place.
//
// Libraries opened here stay open for the life of the process: what they hand out has no owner who could close them.
#pragma once

#include <functional>
#include <string>

namespace ark::jit {

struct LibraryOpener {
  // A handle, or nullptr with the reason in `why_not`.
  std::function<void*(const std::string& name, std::string& why_not)> open;
  // The symbol's address, or nullptr.
  std::function<void*(void* library, const char* symbol)> symbol;

  static LibraryOpener system();
};

}  // namespace ark::jit
