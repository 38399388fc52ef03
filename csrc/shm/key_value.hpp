// What the bootstrap asks of a rendezvous store; process_group adapts c10d::Store to it, tests use files.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "util/error.hpp"

namespace ark {

class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;
  virtual void set(const std::string& key, const std::vector<uint8_t>& value) = 0;
  // Blocks until the key exists. Throws Error(timeout) after `timeout`, Error(system) when the store is gone.
  virtual std::vector<uint8_t> get(const std::string& key, std::chrono::milliseconds timeout) = 0;

  // The value if the key exists now; the bootstrap polls with it, so that it can look after other things meanwhile.
  // An adapter of c10d::Store should override it with check({key}) and get(key): a wait that times out costs TCPStore
  // 180 ms and two warnings on stderr, a check one round trip.
  virtual std::optional<std::vector<uint8_t>> find(const std::string& key) {
    try {
      return get(key, std::chrono::milliseconds(1));
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::timeout) throw;
      return std::nullopt;
    }
  }

  // The values of all keys if all exist now, in their order. An adapter may override it with one round trip for all.
  virtual std::optional<std::vector<std::vector<uint8_t>>> find_all(const std::vector<std::string>& keys) {
    std::vector<std::vector<uint8_t>> values;
    for (const std::string& key : keys) {
      auto value = find(key);
      if (!value) return std::nullopt;
      values.push_back(std::move(*value));
    }
    return values;
  }
};

}  // namespace ark
