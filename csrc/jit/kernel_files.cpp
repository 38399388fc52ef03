// Reads, checks and writes the files of kernel_files.hpp.
#include "jit/kernel_files.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <span>

#include "util/json_writer.hpp"
#include "util/sha256.hpp"
#include "util/unique_fd.hpp"

namespace ark::jit {

namespace {

constexpr size_t kLargestFile = size_t{256} << 20;

const char* source_suffix(Language language) {
  return language == Language::cuda ? ".cu" : ".cpp";
}
const char* binary_suffix(Language language) {
  return language == Language::cuda ? ".cubin" : ".so";
}
// The member of the meta file that holds the binary's hash.
const char* hash_member(Language language) {
  return language == Language::cuda ? "cubin_sha256" : "so_sha256";
}

std::string meta_of(const std::string& key, const std::string& version, const std::string& compiler,
                    const Source& source, const Compiled& compiled) {
  JsonWriter json;
  json.open('{').field("schema", "ark_kernel").field("key", key);
  json.field(hash_member(source.language), sha256_hex(compiled.cubin));
  json.field("bytes", static_cast<int64_t>(compiled.cubin.size()));
  json.field("ark_torch", version).field("compiler", compiler).field("arch", source.arch);
  json.key("options").open('[');
  for (const std::string& option : all_options(source)) json.text(option);
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
  if (!source.may_spill) hash.field("no spills");
  const std::vector<std::string> options = all_options(source);
  hash.field(std::to_string(options.size()));
  for (const std::string& option : options) hash.field(option);
  for (const Header& header : headers) {
    hash.field(header.name);
    hash.field(header.text);
  }
  return hash.hex_digest();
}

// Reads a regular file; returns nothing if there is none or it is something else.
std::optional<std::string> read_file(int folder, const std::string& name, FileOwner owner) {
  const UniqueFd fd(::openat(folder, name.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  if (!fd || ::fstat(fd.get(), &status) != 0 || !S_ISREG(status.st_mode) ||
      (owner == FileOwner::ours && status.st_uid != ::geteuid()) || static_cast<size_t>(status.st_size) > kLargestFile)
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

// A leftover under the temporary name comes from a writer that died.
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

std::string string_member(const std::string& json, const std::string& name) {
  const std::string start = "\"" + name + "\":\"";
  const size_t at = json.find(start);
  if (at == std::string::npos) return {};
  const size_t begin = at + start.size(), end = json.find('"', begin);
  return end == std::string::npos ? std::string() : json.substr(begin, end - begin);
}

bool load_kernel(int folder, const std::string& key, FileOwner owner, std::vector<uint8_t>& cubin, Language language) {
  const auto meta = read_file(folder, key + ".meta.json", owner);
  const auto bytes = read_file(folder, key + binary_suffix(language), owner);
  if (!meta || !bytes || bytes->empty()) return false;
  const std::span<const uint8_t> data(reinterpret_cast<const uint8_t*>(bytes->data()), bytes->size());
  if (string_member(*meta, "key") != key || string_member(*meta, hash_member(language)) != sha256_hex(data))
    return false;
  cubin.assign(data.begin(), data.end());
  return true;
}

bool store_kernel(int folder, const std::string& key, const std::string& version, const std::string& compiler,
                  const Source& source, const Compiled& compiled) {
  const std::string meta = meta_of(key, version, compiler, source, compiled);
  // A half-replaced entry must never look complete, so delete the old cubin first and write the new one last.
  const std::string binary = key + binary_suffix(source.language);
  return (::unlinkat(folder, binary.c_str(), 0) == 0 || errno == ENOENT) &&
         write_file(folder, key + source_suffix(source.language), source.stub.data(), source.stub.size()) &&
         write_file(folder, key + ".meta.json", meta.data(), meta.size()) &&
         write_file(folder, binary, compiled.cubin.data(), compiled.cubin.size());
}

}  // namespace ark::jit
