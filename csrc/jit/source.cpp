// Reads headers and ptxas's report.
#include "jit/source.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

#include "util/error.hpp"

namespace ark::jit {

namespace fs = std::filesystem;

std::vector<Header> read_headers(const std::string& folder) {
  ErrorContext context;
  context.remedy = "Install ark_torch again: its folder kernels is not complete.";
  std::vector<Header> headers;
  std::error_code error;
  for (fs::recursive_directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string extension = it->path().extension().string();
    if (extension != ".hpp" && extension != ".h" && extension != ".cuh") continue;
    std::ifstream file(it->path(), std::ios::binary);
    Header header{it->path().lexically_relative(folder).generic_string(),
                  {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()}};
    if (!file) throw Error(ErrorKind::system, "cannot read the kernel header " + it->path().string(), context);
    headers.push_back(std::move(header));
  }
  if (headers.empty())
    throw Error(ErrorKind::system,
                "there are no kernel headers in '" + folder + "'" + (error ? ": " + error.message() : ""), context);
  std::sort(headers.begin(), headers.end(), [](const Header& a, const Header& b) { return a.name < b.name; });
  return headers;
}

std::vector<std::string> all_options(const Source& source) {
  if (source.language == Language::cpp) return source.options;  // see host_compiler.cpp
  // -v puts registers and spills into the log. No fast math, because results equal the CPU's bit for bit. fmad=false,
  // because a fused multiply-add rounds once where the CPU rounds twice; kernels request it explicitly, and so do
  // sources that need not match the CPU.
  std::vector<std::string> options = {"--gpu-architecture=" + source.arch, "--std=c++20",
                                      source.fuse ? "--fmad=true" : "--fmad=false", "--ptxas-options=-v"};
  if (source.line_info) options.push_back("-lineinfo");
  options.insert(options.end(), source.options.begin(), source.options.end());
  return options;
}

namespace {

// The number before `unit` in a line like "ptxas info : Used 32 registers, 48 bytes smem"; 0: none.
int number_before(const std::string& line, const char* unit) {
  size_t at = line.find(unit);
  if (at == std::string::npos) return 0;
  int value = 0;
  int scale = 1;
  while (at > 0 && line[at - 1] == ' ') --at;
  for (; at > 0 && line[at - 1] >= '0' && line[at - 1] <= '9' && scale <= 100'000'000; --at, scale *= 10)
    value += (line[at - 1] - '0') * scale;
  return value;
}

}  // namespace

std::vector<Resources> parse_resources(const std::string& log) {
  // ptxas info    : Compiling entry function 'fill' for 'sm_90a'
  // ptxas info    : Function properties for fill
  //     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
  // ptxas info    : Used 16 registers, used 0 barriers, 48 bytes smem, 400 bytes cmem[0]
  constexpr char kEntry[] = "Compiling entry function '", kProperties[] = "Function properties for ";
  std::vector<Resources> all;
  std::istringstream lines(log);
  std::string function;
  bool in_order = false;  // reported before the kernel is named
  for (std::string line; std::getline(lines, line);) {
    if (const size_t at = line.find(kEntry); at != std::string::npos) {
      const size_t begin = at + std::strlen(kEntry);
      all.push_back({line.substr(begin, line.find('\'', begin) - begin)});
      all.back().multiplies_in_order = in_order;
      in_order = false;
    } else if (line.find("(C7510)") != std::string::npos) {
      in_order = true;
    } else if (const size_t name = line.find(kProperties); name != std::string::npos) {
      function = line.substr(name + std::strlen(kProperties));
    } else if (!all.empty() && line.find("bytes stack frame") != std::string::npos) {
      // Properties of a function that was not inlined count for its kernel too.
      all.back().stack_bytes = std::max(all.back().stack_bytes, number_before(line, "bytes stack frame"));
      all.back().spill_store_bytes += number_before(line, "bytes spill stores");
      all.back().spill_load_bytes += number_before(line, "bytes spill loads");
      const int spilled = number_before(line, "bytes spill stores") + number_before(line, "bytes spill loads");
      if (spilled > 0 && function != all.back().kernel) all.back().spilled[function] = spilled;
    } else if (!all.empty() && line.find("Used ") != std::string::npos) {
      all.back().registers = number_before(line, "registers");
      all.back().shared_bytes = number_before(line, "bytes smem");
    }
  }
  return all;
}

}  // namespace ark::jit
