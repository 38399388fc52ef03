// An all-gather of small values through the rendezvous store, for agreements before ranks can exchange anything else.
//
// Rank 0 reads all values and publishes them as one, so each rank makes a fixed number of requests.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "shm/key_value.hpp"

namespace ark {

// Returns all values by rank. Collective; keys below `prefix` must be unique to this call. Error(timeout) names missing
// ranks; Error(mismatch): rank 0 cannot have written the value.
std::vector<std::vector<uint8_t>> store_all_gather(KeyValueStore& store, const std::string& prefix, int rank, int size,
                                                   const std::vector<uint8_t>& own, std::chrono::milliseconds timeout);

}  // namespace ark
