// File operations of the cache, all relative to the descriptor of the checked folder.
#include "jit/kernel_cache.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <thread>

#include "jit/kernel_files.hpp"

namespace ark::jit {

namespace {

std::string with_reason(const std::string& what) {
  return what + ": " + std::strerror(errno);
}

// Opens the folder, created if missing, and checks it. On failure returns an invalid descriptor and sets `why_not`.
UniqueFd open_folder(const std::string& name, std::string& why_not) {
  // Strip a trailing "/" or "/.", with which O_NOFOLLOW would follow a link.
  std::filesystem::path path = std::filesystem::path(name).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  std::filesystem::path part;
  for (const auto& component : path) {
    part /= component;
    if (::mkdir(part.c_str(), 0700) != 0 && errno != EEXIST && errno != EISDIR && errno != EROFS && errno != EACCES) {
      why_not = with_reason("cannot make " + part.string());
      return {};
    }
  }
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat status {};
  if (!fd)
    why_not = errno == ELOOP || errno == ENOTDIR ? "it is a link or no folder" : with_reason("cannot open it");
  else if (::fstat(fd.get(), &status) != 0)
    why_not = with_reason("cannot look at it");
  else if (status.st_uid != ::geteuid())
    why_not = "it belongs to user " + std::to_string(status.st_uid) + ", not to " + std::to_string(::geteuid());
  else if ((status.st_mode & (S_IWGRP | S_IWOTH)) != 0)
    why_not = "others may write to it (chmod go-w)";
  else
    return fd;
  return {};
}

}  // namespace

KernelCache::KernelCache(std::string folder, Log log, std::chrono::milliseconds lock_wait)
    : folder_(std::move(folder)), log_(std::move(log)), lock_wait_(lock_wait) {
  if (folder_.empty()) return;
  std::string why_not;
  folder_fd_ = open_folder(folder_, why_not);
  if (!folder_fd_) complain(why_not);
}

void KernelCache::complain(const std::string& why) {
  if (complained_.exchange(true) || !log_) return;
  log_("ark: compiled kernels are not kept in '" + folder_ + "' (ARK_CACHE): " + why +
       ". Kernels are compiled anew by each process.");
}

CachedKernel KernelCache::get(const std::string& key, const std::string& version, const std::string& compiler,
                              const Source& source, const Compile& compile, bool afresh) {
  CachedKernel result;
  auto in_memory = [&] {
    result.cubin = compile().cubin;
    result.origin = CachedKernel::Origin::memory;
    return std::move(result);
  };
  if (!folder_fd_) return in_memory();
  if (!afresh && load_kernel(folder_fd_.get(), key, FileOwner::ours, result.cubin, source.language)) {
    result.origin = CachedKernel::Origin::cache;
    return result;
  }
  const UniqueFd held = lock(key);
  if (!held) return in_memory();
  if (!afresh && load_kernel(folder_fd_.get(), key, FileOwner::ours, result.cubin,
                             source.language)) {  // another process was faster
    result.origin = CachedKernel::Origin::cache;
    return result;
  }
  Compiled compiled = compile();
  result.origin = CachedKernel::Origin::compiled;
  if (!store_kernel(folder_fd_.get(), key, version, compiler, source, compiled)) {
    complain(with_reason("cannot write to it"));
    result.origin = CachedKernel::Origin::memory;
  }
  result.cubin = std::move(compiled.cubin);
  return result;
}

std::optional<std::string> KernelCache::text(const std::string& name,
                                             const std::function<bool(const std::string&)>& whole,
                                             const std::function<std::string()>& make) {
  if (!folder_fd_) return std::nullopt;
  const auto kept = [&] {
    std::optional<std::string> found = read_file(folder_fd_.get(), name, FileOwner::ours);
    if (found && !whole(*found)) found.reset();
    return found;
  };
  if (std::optional<std::string> found = kept()) return found;
  const UniqueFd held = lock(name);
  if (!held) return std::nullopt;
  if (std::optional<std::string> found = kept()) return found;  // another process was faster
  const std::string made = make();
  if (write_file(folder_fd_.get(), name, made.data(), made.size())) return made;
  complain(with_reason("cannot write to it"));
  return std::nullopt;
}

UniqueFd KernelCache::lock(const std::string& key) {
  UniqueFd fd(::openat(folder_fd_.get(), (key + ".lock").c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!fd) {
    complain(with_reason("cannot write to it"));
    return {};
  }
  // Bounded, because the holder may be stopped. It holds the lock while it compiles, about a second.
  const auto deadline = std::chrono::steady_clock::now() + lock_wait_;
  auto pause = std::chrono::milliseconds(1);
  while (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK) {
      complain(with_reason("cannot lock files in it"));
      return {};
    }
    if (std::chrono::steady_clock::now() >= deadline) {
      complain("another process has held the lock " + key + ".lock for " + std::to_string(lock_wait_.count()) + " ms");
      return {};
    }
    std::this_thread::sleep_for(pause);
    if (pause < std::chrono::milliseconds(16)) pause *= 2;
  }
  return fd;
}

}  // namespace ark::jit
