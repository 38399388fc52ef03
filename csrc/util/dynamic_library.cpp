// The system's dlopen and dlsym behind dynamic_library.hpp: the default where no test substitutes its own opener.
#include "util/dynamic_library.hpp"

#include <dlfcn.h>

namespace ark::jit {

LibraryOpener LibraryOpener::system() {
  LibraryOpener opener;
  opener.open = [](const std::string& name, std::string& why_not) {
    // RTLD_LOCAL keeps the symbols of two NVRTCs apart: ours and one that PyTorch opened.
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
