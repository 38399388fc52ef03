// The system's loader behind dynamic_library.hpp.
#include "util/dynamic_library.hpp"

#include <dlfcn.h>

namespace ark::jit {

LibraryOpener LibraryOpener::system() {
  LibraryOpener opener;
  opener.open = [](const std::string& name, std::string& why_not) {
    // Local: the symbols of two NVRTCs, ours and one that PyTorch opened, must not mix.
    void* library = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* reason = ::dlerror();
      why_not = reason != nullptr ? reason : "unknown reason";
    }
    return library;
  };
  opener.symbol = [](void* library, const char* symbol) { return ::dlsym(library, symbol); };
  return opener;
}

}  // namespace ark::jit
