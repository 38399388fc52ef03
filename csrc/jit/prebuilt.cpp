// Looks up and stores the kernels of a wheel. The cache key covers compiler, headers and options, so a kernel is only
// found if nothing differs from what was compiled. Kernels of a newer CUDA than the driver's are ignored.
#include "jit/prebuilt.hpp"

#include <fcntl.h>

#include <cerrno>
#include <cstdlib>

#include "jit/kernel_files.hpp"
#include "util/error.hpp"

namespace ark::jit {

namespace {

UniqueFd open_folder(const std::string& folder) {
  return UniqueFd(folder.empty() ? -1 : ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
}

// Without line information: profilers have the headers, and the wheel is half as large.
Source prebuilt_source(const std::string& stub, const std::string& arch) {
  Source source{stub, arch, {}};
  source.line_info = false;
  return source;
}

}  // namespace

PrebuiltKernels::PrebuiltKernels(const std::string& folder, int driver_version) : folder_fd_(open_folder(folder)) {
  if (!folder_fd_) return;
  const auto index = read_file(folder_fd_.get(), "index.json", FileOwner::anyone);
  if (index) compiler_ = string_member(*index, "compiler");
  const size_t space = compiler_.find(' ');
  const int major = space == std::string::npos ? 0 : std::atoi(compiler_.c_str() + space);
  if (major == 0 || (driver_version > 0 && major > driver_version / 1000)) folder_fd_.reset();
}

std::optional<std::vector<uint8_t>> PrebuiltKernels::find(const std::string& version, const Source& source,
                                                          const std::vector<Header>& headers) const {
  if (!any() || !source.options.empty()) return std::nullopt;
  const std::string key = cache_key(version, compiler_, prebuilt_source(source.stub, source.arch), headers);
  std::vector<uint8_t> cubin;
  if (!load_kernel(folder_fd_.get(), key, FileOwner::anyone, cubin)) return std::nullopt;
  return cubin;
}

std::vector<std::string> prebuilt_options(const std::string& arch) {
  return all_options(prebuilt_source({}, arch));
}

void store_prebuilt(const std::string& folder, const std::string& version, const std::string& compiler,
                    const std::string& stub, const std::string& arch, std::vector<uint8_t> cubin,
                    const std::string& log, const std::vector<Header>& headers) {
  const Source source = prebuilt_source(stub, arch);
  const UniqueFd fd = open_folder(folder);
  const Compiled compiled{std::move(cubin), log, parse_resources(log)};
  if (!fd ||
      !store_kernel(fd.get(), cache_key(version, compiler, source, headers), version, compiler, source, compiled))
    throw system_error("cannot write a kernel to '" + folder + "'", errno);
}

}  // namespace ark::jit
