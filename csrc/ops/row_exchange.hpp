// Rows that ranks send each other on CPU tensors: made as they are sent, and put at their place as they come.
//
// They travel piece by piece through the memory that ranks share (exchange(), collectives/cpu/algorithms.hpp). A rank's
// own rows go to their place at once. A group that shares no memory, and rows longer than a piece, take a buffer and
// the communicator's all_to_all. Results are the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "collectives/cpu/shm_communicator.hpp"

namespace ark::ops {

struct RowExchange {
  uint64_t row_bytes;
  std::vector<uint64_t> sent, received;  // rows, by rank; sent to this rank itself: its own
  // One behind the other; on several threads for this rank's own.
  std::function<void(int peer, int64_t first, int64_t rows, std::byte* to)> make;
  std::function<std::byte*(int peer, int64_t row)> place;
};

void exchange_rows(const RowExchange& rows, Communicator& communicator, const Operation& operation);

}  // namespace ark::ops
