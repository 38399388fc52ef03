// File operations behind kernel_cache.hpp, all relative to the one descriptor of the checked folder.
#include "jit/kernel_cache.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <optional>
#include <span>
#include <thread>

#include "health/json_writer.hpp"
#include "jit/nvrtc.hpp"
#include "jit/sha256.hpp"

namespace ark::jit {

namespace {

constexpr size_t kLargestFile = size_t{256} << 20;

std::string with_reason(const std::string& what) {
  return what + ": " + std::strerror(errno);
}

// The folder, made where missing and checked; invalid with the reason in `why_not`.
UniqueFd open_folder(const std::string& name, std::string& why_not) {
  // Without "/" or "/." at the end, behind which O_NOFOLLOW would follow a link.
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

// A whole regular file of ours; nothing when there is none, or something else in its place.
std::optional<std::string> read_file(int folder, const std::string& name) {
  const UniqueFd fd(::openat(folder, name.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  if (!fd || ::fstat(fd.get(), &status) != 0 || !S_ISREG(status.st_mode) || status.st_uid != ::geteuid() ||
      static_cast<size_t>(status.st_size) > kLargestFile)
    return std::nullopt;
  std::string text(static_cast<size_t>(status.st_size), '\0');
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t got = ::read(fd.get(), text.data() + done, text.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return std::nullopt;
    done += static_cast<size_t>(got);
  }
  return text;
}

// Writes under another name, then renames. False with errno. Only the holder of the key's lock may call: what lies
// under the other name was left by a holder that died.
bool write_file(int folder, const std::string& name, const void* data, size_t bytes) {
  const std::string unfinished = name + ".part";
  ::unlinkat(folder, unfinished.c_str(), 0);
  const UniqueFd fd(::openat(folder, unfinished.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!fd) return false;
  size_t done = 0;
  while (done < bytes) {
    const ssize_t put = ::write(fd.get(), static_cast<const char*>(data) + done, bytes - done);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) break;
    done += static_cast<size_t>(put);
  }
  if (done == bytes && ::renameat(folder, unfinished.c_str(), folder, name.c_str()) == 0) return true;
  const int error = errno;
  ::unlinkat(folder, unfinished.c_str(), 0);
  errno = error;
  return false;
}

// The text of a string member of a file that meta_of() wrote; empty: not there. None of ours needs an escape.
std::string string_member(const std::string& json, const std::string& name) {
  const std::string start = "\"" + name + "\":\"";
  const size_t at = json.find(start);
  if (at == std::string::npos) return {};
  const size_t begin = at + start.size(), end = json.find('"', begin);
  return end == std::string::npos ? std::string() : json.substr(begin, end - begin);
}

std::string meta_of(const std::string& key, const std::string& version, const std::string& compiler,
                    const Source& source, const Compiled& compiled) {
  JsonWriter json;
  json.open('{').field("schema", "ark_kernel").field("key", key).field("cubin_sha256", sha256_hex(compiled.cubin));
  json.field("cubin_bytes", static_cast<int64_t>(compiled.cubin.size()));
  json.field("ark_torch", version).field("compiler", compiler).field("arch", source.arch);
  json.key("options").open('[');
  for (const std::string& option : base_options(source.arch)) json.text(option);
  for (const std::string& option : source.options) json.text(option);
  json.close(']').key("kernels").open('[');
  for (const Resources& one : compiled.resources) {
    json.open('{').field("name", one.kernel).field("registers", int64_t{one.registers});
    json.field("stack_bytes", int64_t{one.stack_bytes}).field("shared_bytes", int64_t{one.shared_bytes});
    json.field("spill_store_bytes", int64_t{one.spill_store_bytes});
    json.field("spill_load_bytes", int64_t{one.spill_load_bytes}).close('}');
  }
  json.close(']').close('}');
  return json.take() + "\n";
}

}  // namespace

std::string cache_key(const std::string& version, const std::string& compiler, const Source& source,
                      const std::vector<Header>& headers) {
  Sha256 hash;
  for (const std::string& text : {version, compiler, source.arch, source.stub}) hash.field(text);
  std::vector<std::string> options = base_options(source.arch);
  options.insert(options.end(), source.options.begin(), source.options.end());
  hash.field(std::to_string(options.size()));
  for (const std::string& option : options) hash.field(option);
  for (const Header& header : headers) {
    hash.field(header.name);
    hash.field(header.text);
  }
  return hash.hex_digest();
}

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
                              const Source& source, const Compile& compile) {
  CachedKernel result;
  auto in_memory = [&] {
    result.cubin = compile().cubin;
    result.origin = CachedKernel::Origin::memory;
    return std::move(result);
  };
  if (!folder_fd_) return in_memory();
  if (load(key, result.cubin)) {
    result.origin = CachedKernel::Origin::cache;
    return result;
  }
  const UniqueFd held = lock(key);
  if (!held) return in_memory();
  if (load(key, result.cubin)) {  // another process was faster
    result.origin = CachedKernel::Origin::cache;
    return result;
  }
  Compiled compiled = compile();
  result.origin = CachedKernel::Origin::compiled;
  const std::string meta = meta_of(key, version, compiler, source, compiled);
  const int folder = folder_fd_.get();
  // A half-replaced entry must never look whole: the old cubin goes first, the new one comes last.
  if ((::unlinkat(folder, (key + ".cubin").c_str(), 0) != 0 && errno != ENOENT) ||
      !write_file(folder, key + ".cu", source.stub.data(), source.stub.size()) ||
      !write_file(folder, key + ".meta.json", meta.data(), meta.size()) ||
      !write_file(folder, key + ".cubin", compiled.cubin.data(), compiled.cubin.size())) {
    complain(with_reason("cannot write to it"));
    result.origin = CachedKernel::Origin::memory;
  }
  result.cubin = std::move(compiled.cubin);
  return result;
}

bool KernelCache::load(const std::string& key, std::vector<uint8_t>& cubin) {
  const auto meta = read_file(folder_fd_.get(), key + ".meta.json");
  const auto bytes = read_file(folder_fd_.get(), key + ".cubin");
  if (!meta || !bytes || bytes->empty()) return false;
  const std::span<const uint8_t> data(reinterpret_cast<const uint8_t*>(bytes->data()), bytes->size());
  if (string_member(*meta, "key") != key || string_member(*meta, "cubin_sha256") != sha256_hex(data)) return false;
  cubin.assign(data.begin(), data.end());
  return true;
}

UniqueFd KernelCache::lock(const std::string& key) {
  UniqueFd fd(::openat(folder_fd_.get(), (key + ".lock").c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!fd) {
    complain(with_reason("cannot write to it"));
    return {};
  }
  // Bounded: the holder may be stopped. It holds the lock while it compiles, about a second.
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
