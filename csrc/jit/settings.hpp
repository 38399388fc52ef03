// Settings of the compiler and its cache. C++ reads no environment variables: Python fills these in
// (ark_torch/_jit.py).
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace ark::jit {

struct Settings {
  std::string version;       // of ark_torch; part of every cache key
  std::string kernels_dir;   // the folder of kernel headers (ark_torch/kernels); includes are relative to it
  std::string cache_dir;     // compiled kernels; created if missing; empty: compile in memory
  std::string prebuilt_dir;  // kernels of the wheel (prebuilt.hpp); empty or missing: none
  std::string nvrtc;         // use only this libnvrtc; empty: search
  std::vector<std::string> library_roots;       // site-packages folders, where PyTorch's wheels put NVRTC
  std::vector<std::string> toolkit_dirs;        // CUDA_HOME, CUDA_PATH
  std::vector<std::string> include_dirs;        // further -I; our kernels need none
  std::vector<std::string> options;             // further options for NVRTC
  std::string cxx;                              // use only this C++ compiler (CXX); empty: search PATH
  std::vector<std::string> cxx_words;           // the rest of CXX: "ccache g++", "g++ -m64"
  std::vector<std::string> cxx_options;         // further options for it
  std::function<void(const std::string&)> log;  // one line for people; may be empty
};

// The process's settings. A device's KernelLibrary uses those in force at its first use.
void configure(Settings settings);
Settings settings();

// Registers Python's function that calls configure() if nothing has by then. It must not run under a lock.
void on_first_use(std::function<void()> configures);
void ensure_configured();

}  // namespace ark::jit
