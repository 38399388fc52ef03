// What the compiler and its cache must be told. C++ reads no environment: Python fills this in (ark_torch/_jit.py).
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace ark::jit {

struct Settings {
  std::string version;       // of ark_torch; part of every cache key
  std::string kernels_dir;   // the folder of kernel headers (ark_torch/kernels); includes are relative to it
  std::string cache_dir;     // compiled kernels; made when missing; empty: compile in memory
  std::string prebuilt_dir;  // kernels that the wheel brings (prebuilt.hpp); empty, or not there: none
  std::string nvrtc;         // libnvrtc to use, and no other; empty: search
  std::vector<std::string> library_roots;       // site-packages folders, where PyTorch's wheels put NVRTC
  std::vector<std::string> toolkit_dirs;        // CUDA_HOME, CUDA_PATH
  std::vector<std::string> include_dirs;        // further -I; our kernels need none
  std::vector<std::string> options;             // further options of NVRTC
  std::string cxx;                              // the host's C++ compiler (CXX), and no other; empty: search PATH
  std::vector<std::string> cxx_words;           // what follows it in CXX: "ccache g++", "g++ -m64"
  std::vector<std::string> cxx_options;         // further options of it
  std::function<void(const std::string&)> log;  // one line for people; may be empty
};

// The process's settings; those in force when a device's KernelLibrary is first used count for it.
void configure(Settings settings);
Settings settings();

// What is to call configure() where nothing has by then: Python's part, which must not run under a lock.
void on_first_use(std::function<void()> configures);
void ensure_configured();

}  // namespace ark::jit
