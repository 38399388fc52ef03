// What the bootstrap asks of a rendezvous store; process_group adapts c10d::Store to it, tests use a map.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace ark {

class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;
  virtual void set(const std::string& key, const std::vector<uint8_t>& value) = 0;
  // Blocks until the key exists. Throws Error(timeout) after `timeout`, Error(system) when the store is gone.
  virtual std::vector<uint8_t> get(const std::string& key, std::chrono::milliseconds timeout) = 0;
};

}  // namespace ark
