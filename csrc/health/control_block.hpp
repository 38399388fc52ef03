// The page at the head of every rank's segment, which shows its state to the others.
//
// Only its owner writes it, except for the doorbell, which peers ring. It holds the abort record, the progress numbers
// that a timeout uses to find the rank to blame, and the rank's cores. Memory ordering: the abort record is written
// before `abort_state` becomes kSet (release), which readers acquire. Progress numbers are hints for messages, so
// relaxed. Passing the segment's descriptor orders what is written before (cores, layout version).
#pragma once

#include <cstdint>
#include <limits>

#include "protocol/counter.hpp"

namespace ark {

inline constexpr uint32_t kAbortNone = 0;
inline constexpr uint32_t kAbortWriting = 1;
inline constexpr uint32_t kAbortSet = 2;

// Value of ControlBlock::waiting_on for a rank outside of this memory (on another node).
inline constexpr int64_t kWaitsOutside = std::numeric_limits<int64_t>::max();

struct AbortRecord {
  uint32_t kind;       // ErrorKind
  int32_t culprit;     // rank to blame; -1: unknown
  uint64_t sequence;   // operation that noticed it
  char operation[32];  // the operation's name
  char text[208];      // what happened, for the peers' messages
};

inline constexpr int kCpuMaskWords = 16;  // 1,024 processors

struct ControlBlock {
  protocol::Counter doorbell;  // peers ring it when a pair channel to or from this rank changed
  // Progress, written by the owner, in one cache line.
  alignas(protocol::kCacheLine) uint64_t enqueued;  // collectives issued so far
  uint64_t started;                                 // ... started
  uint64_t completed;                               // ... completed
  int64_t waiting_on;                               // 1 + rank whose counter it waits for, 0: none, kWaitsOutside
  uint64_t beat;                                    // advances every slice while it sleeps, unless the rank is stopped
  char operation[32];                               // current operation (only text, so torn reads are harmless)
  alignas(protocol::kCacheLine) uint32_t abort_state;
  AbortRecord abort;
  alignas(protocol::kCacheLine) protocol::Counter barrier_arrived;  // monitored barriers this rank has entered
  protocol::Counter barrier_passed;  // rank 0 only: monitored barriers that all ranks passed
  uint64_t layout;                   // layout fingerprint, must be equal on all ranks
  uint64_t cpu_mask[kCpuMaskWords];  // processors this rank may run on
};
static_assert(sizeof(ControlBlock) <= 4096);

}  // namespace ark
