// Test support: runs the ranks of a group as threads of one process. All threads use the same mappings of the segments.
// ThreadSanitizer tracks addresses, so it sees every race that real ranks could have.
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "collectives/cpu/reduce/reduce.hpp"
#include "collectives/cpu/shm_communicator.hpp"

namespace ark::test {

using std::chrono::milliseconds;

struct Job {
  std::vector<SharedMemory> segments;  // the mappings shared by all ranks
  std::vector<Neighbourhood> ranks;
};

// Creates the segments and liveness sockets that the bootstrap would provide.
inline Job make_job(int size) {
  Job job;
  for (int rank = 0; rank < size; ++rank) {
    job.segments.push_back(SharedMemory::create("test", ShmCommunicator::segment_bytes(size)));
  }
  auto& all = job.ranks;
  all.resize(size);
  for (int rank = 0; rank < size; ++rank) {
    for (const SharedMemory& segment : job.segments) all[rank].segments.push_back(SharedMemory::alias(segment));
    all[rank].connections.resize(size);
    all[rank].pids.assign(size, ::getpid());
  }
  for (int low = 0; low < size; ++low) {
    for (int high = low + 1; high < size; ++high) {
      int pair[2];
      EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
      all[low].connections[high] = UniqueFd(pair[0]);
      all[high].connections[low] = UniqueFd(pair[1]);
    }
  }
  return job;
}

inline ShmOptions default_options() {
  ShmOptions options;
  options.timeout = milliseconds(20000);
  return options;
}

using RankBody = std::function<void(ShmCommunicator&, int rank)>;

// Runs body on all ranks at the same time. Returns each rank's exception, if any.
inline std::vector<std::optional<Error>> run_ranks(int size, const RankBody& body,
                                                   const ShmOptions& options = default_options()) {
  Job job = make_job(size);
  std::vector<std::optional<Error>> errors(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        ShmCommunicator group(rank, size, std::move(job.ranks[rank]), options);
        try {
          body(group, rank);
          group.health().say_goodbye();
        } catch (const Error& error) {
          errors[rank] = error;
        }
        group.point_to_point().stop();
      } catch (const Error& error) {
        errors[rank] = error;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

inline void expect_no_errors(const std::vector<std::optional<Error>>& errors) {
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    EXPECT_FALSE(errors[rank]) << "rank " << rank << ": " << errors[rank]->what();
  }
}

inline Operation operation(Kind kind, uint64_t sequence, DType dtype, size_t count, ReduceOp op = ReduceOp::sum,
                           int root = -1, milliseconds timeout = milliseconds(20000)) {
  Operation result;
  result.context = {name_of(kind), sequence, Clock::now() + timeout, timeout};
  result.descriptor.sequence = sequence;
  result.descriptor.count = count;
  result.descriptor.kind = kind;
  result.descriptor.dtype = dtype;
  result.descriptor.op = op;
  result.descriptor.root = root;
  return result;
}

inline std::vector<float> random_floats(size_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> distribution;
  std::vector<float> values(count);
  for (float& value : values) value = distribution(generator);
  return values;
}

}  // namespace ark::test
