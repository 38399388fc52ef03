// The interface of a rendezvous store for the bootstrap; process_group adapts c10d::Store, tests use files.
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
  // Blocks until the key exists. Throws Error(timeout) after `timeout`, Error(system) if the store is gone.
  virtual std::vector<uint8_t> get(const std::string& key, std::chrono::milliseconds timeout) = 0;

  // Returns the value if the key exists now. The bootstrap polls with it to do other work meanwhile. Adapters of
  // c10d::Store should use check({key}) and get(key): one round trip, whereas a wait that times out blocks TCPStore and
  // prints warnings.
  virtual std::optional<std::vector<uint8_t>> find(const std::string& key) {
    try {
      return get(key, std::chrono::milliseconds(1));
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::timeout) throw;
      return std::nullopt;
    }
  }

  // Returns all values, in order, if all keys exist now. Adapters may override it with a single round trip.
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
