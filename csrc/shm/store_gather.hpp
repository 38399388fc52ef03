// An all-gather of small values through the rendezvous store, for what ranks agree on before they can exchange
// anything.
//
// Rank 0 reads everyone's value at once and publishes all of them as one, so that each rank asks the store a fixed
// number of times, however many ranks there are.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "shm/key_value.hpp"

namespace ark {

// Everyone's value, by rank. Collective; the keys below `prefix` must be of this call alone. Error(timeout) names the
// ranks that are missing, Error(mismatch) is for what rank 0 cannot have written.
std::vector<std::vector<uint8_t>> store_all_gather(KeyValueStore& store, const std::string& prefix, int rank, int size,
                                                   const std::vector<uint8_t>& own, std::chrono::milliseconds timeout);

}  // namespace ark
