// Exchanges rows between ranks on CPU tensors: computed as they are sent and put in place as they arrive.
//
// Rows travel piece by piece through shared memory (exchange(), collectives/cpu/algorithms.hpp); a rank's own rows go
// straight to their place. Groups without shared memory, and rows longer than a piece, use a buffer and the
// communicator's all_to_all. Results are the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "collectives/cpu/shm_communicator.hpp"

namespace ark::ops {

struct RowExchange {
  uint64_t row_bytes;
  std::vector<uint64_t> sent, received;  // rows, by rank, including this rank's own
  // Makes consecutive rows; for this rank's own rows on several threads.
  std::function<void(int peer, int64_t first, int64_t rows, std::byte* to)> make;
  std::function<std::byte*(int peer, int64_t row)> place;
};

void exchange_rows(const RowExchange& rows, Communicator& communicator, const Operation& operation);

}  // namespace ark::ops
