// The group over shared memory: lays out the segments, builds channels, health, rounds and send/recv on them, and picks
// an algorithm for each collective.
//
// Every rank's segment has the same layout, checked at start: control block, counters, dispatch table (rank 0's is
// used), pair-channel counters, outbox slots, pair-channel slots. Memory is reserved for the largest chunk but
// committed only as it is used.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "collectives/cpu/algorithms.hpp"
#include "collectives/cpu/point_to_point.hpp"
#include "collectives/cpu/rounds.hpp"
#include "collectives/dispatch.hpp"
#include "collectives/operation.hpp"
#include "shm/bootstrap.hpp"

namespace ark {

struct ShmOptions {
  bool debug = false;
  std::chrono::nanoseconds spin{-1};     // negative: automatic
  std::vector<Rule> rules;               // empty: measured defaults; rank 0's rules count
  std::chrono::milliseconds timeout{0};  // for the start-up handshake
  // For a part of a group: the ranks' names in messages, and a callback for a lost rank, on the monitor's thread.
  std::vector<int> names = {};
  std::function<void(int rank)> on_lost = {};
};

class ShmCommunicator : public Communicator {
 public:
  static size_t segment_bytes(int size);
  ShmCommunicator(int rank, int size, Neighbourhood neighbourhood, const ShmOptions& options);
  ~ShmCommunicator() override;

  void all_reduce(const Operation&, const void* in, void* out, size_t count) override;
  void reduce(const Operation&, const void* in, void* out, size_t count) override;
  void reduce_scatter(const Operation&, const void* const* ins, void* out, size_t count) override;
  void all_gather(const Operation&, const void* in, void* const* outs, size_t bytes) override;
  void broadcast(const Operation&, void* data, size_t bytes) override;
  void gather(const Operation&, const void* in, void* const* outs, size_t bytes) override;
  void scatter(const Operation&, const void* const* ins, void* out, size_t bytes) override;
  void all_to_all(const Operation&, const Bytes* ins, const MutableBytes* outs) override;
  void barrier(const Operation&) override;
  // See algorithms.hpp. Returns false on all ranks, and does nothing, if a unit is too long.
  bool exchange(const Operation&, const uint64_t* sent, const uint64_t* received, uint64_t unit, const Produce& produce,
                const Consume& consume);

  // Rank 0 waits for all ranks and, at the deadline, names a missing one (all of them if `wait_all`). The others wait
  // for rank 0. Does not fail the group.
  void monitored_barrier(const OperationContext& context, bool wait_all);

  GroupHealth& health() { return *health_; }
  Rounds& rounds() { return *rounds_; }  // for collectives that use this as a stage
  PointToPoint& point_to_point() { return *point_to_point_; }
  int cores() const { return cores_; }

 private:
  void hand_shake(const ShmOptions& options);
  Operation with_algorithm(const Operation& operation, Choice choice) const;

  std::vector<SharedMemory> segments_;
  std::unique_ptr<GroupHealth> health_;
  DispatchTable table_;
  int cores_ = 1;
  std::unique_ptr<Rounds> rounds_;
  std::unique_ptr<PointToPoint> point_to_point_;
  uint64_t monitored_barriers_ = 0;
};

}  // namespace ark
