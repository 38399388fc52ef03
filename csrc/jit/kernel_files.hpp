// A compiled kernel as files: what the cache of a user and the kernels that a wheel brings are made of.
//
// For each key three files lie side by side, so that what ran can be read: <key>.cu (the stub), <key>.meta.json
// (versions, options, registers, SHA-256 of the binary) and <key>.cubin; <key>.cpp and <key>.so for a plan on the CPU.
// They are written under other names, created anew (O_EXCL, O_NOFOLLOW), and renamed, the cubin last: a half-written
// kernel never looks whole. A cubin is used only when its hash is the one in the meta file.
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
  anyone,  // what lies beside the library itself is trusted as the library is
};

std::optional<std::string> read_file(int folder, const std::string& name, FileOwner owner);

// The text of a string member of JSON that we wrote; empty: not there. None of ours needs an escape.
std::string string_member(const std::string& json, const std::string& name);

// False when there is none, or anything about it is not as it was stored.
bool load_kernel(int folder, const std::string& key, FileOwner owner, std::vector<uint8_t>& cubin,
                 Language language = Language::cuda);

// Replaces what there is. False with errno. Only one at a time may call for a key.
bool store_kernel(int folder, const std::string& key, const std::string& version, const std::string& compiler,
                  const Source& source, const Compiled& compiled);

// Whole, or not at all: written under another name, then renamed. False with errno.
bool write_file(int folder, const std::string& name, const void* data, size_t bytes);

}  // namespace ark::jit
