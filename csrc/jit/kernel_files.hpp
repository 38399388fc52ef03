// The files of a compiled kernel, in a user's cache or in a wheel.
//
// Each key has three readable files: <key>.cu (the stub), <key>.meta.json (versions, options, registers, SHA-256 of the
// binary) and <key>.cubin; for a CPU plan <key>.cpp and <key>.so. They are created under temporary names (O_EXCL,
// O_NOFOLLOW) and renamed, the cubin last, so a half-written kernel never looks complete. A cubin is used only if its
// hash matches the meta file.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "jit/source.hpp"

namespace ark::jit {

// SHA-256 over everything that a cubin depends on. `compiler`: "nvrtc 13.0".
std::string cache_key(const std::string& version, const std::string& compiler, const Source& source,
                      const std::vector<Header>& headers);

enum class FileOwner : uint8_t {
  ours,    // the user's own, or not read
  anyone,  // files beside the library are as trusted as the library
};

std::optional<std::string> read_file(int folder, const std::string& name, FileOwner owner);

// The text of a string member in JSON that we wrote (none of it needs escapes); empty if missing.
std::string string_member(const std::string& json, const std::string& name);

// Returns false if the kernel is missing or differs in any way from what was stored.
bool load_kernel(int folder, const std::string& key, FileOwner owner, std::vector<uint8_t>& cubin,
                 Language language = Language::cuda);

// Replaces any stored kernel. Returns false and sets errno on failure. Only one caller at a time per key.
bool store_kernel(int folder, const std::string& key, const std::string& version, const std::string& compiler,
                  const Source& source, const Compiled& compiled);

// Writes the whole file or nothing, through a temporary name and a rename. Returns false and sets errno on failure.
bool write_file(int folder, const std::string& name, const void* data, size_t bytes);

}  // namespace ark::jit
