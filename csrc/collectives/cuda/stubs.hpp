// One instantiation of every kind of kernel, for checks that compile all of them without a GPU.
#pragma once

#include <string>
#include <vector>

namespace ark {

struct Stub {
  std::string name;   // "probe"
  std::string text;   // what KernelLibrary::get() takes
  int min_arch = 80;  // 90: uses instructions of Hopper
};

std::vector<Stub> representative_stubs();

}  // namespace ark
