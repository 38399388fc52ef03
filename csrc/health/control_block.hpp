// The page at the head of every rank's segment: what the others may read of its state.
//
// Written by its owner alone (the doorbell excepted: peers ring it), read by all. It holds the abort record, the
// progress numbers that a timeout follows to find the rank to blame, and the cores the rank may use.
//
// Ordering. The abort record's fields are written before `abort_state` becomes kSet with a release; readers acquire
// it first. Progress numbers are hints for error messages: relaxed. What a rank writes before it hands out its
// segment's descriptor (cores, layout version) is ordered by that hand-over.
#pragma once

#include <cstdint>
#include <limits>

#include "protocol/counter.hpp"

namespace ark {

inline constexpr uint32_t kAbortNone = 0;
inline constexpr uint32_t kAbortWriting = 1;
inline constexpr uint32_t kAbortSet = 2;

// In ControlBlock::waiting_on: for a rank that is no part of this memory (of another node).
inline constexpr int64_t kWaitsOutside = std::numeric_limits<int64_t>::max();

struct AbortRecord {
  uint32_t kind;       // ErrorKind
  int32_t culprit;     // rank to blame, -1 unknown
  uint64_t sequence;   // operation in which it was noticed
  char operation[32];  // its name
  char text[208];      // what happened, for the peers' messages
};

inline constexpr int kCpuMaskWords = 16;  // 1,024 processors

struct ControlBlock {
  protocol::Counter doorbell;  // rung by peers: something changed in a pair channel to or from this rank
  // A cache line of progress, owner-written.
  alignas(protocol::kCacheLine) uint64_t enqueued;  // collectives issued so far
  uint64_t started;                                 // ... begun
  uint64_t completed;                               // ... finished
  int64_t waiting_on;                               // 1 + rank whose counter it sleeps on, 0 none, kWaitsOutside
  uint64_t beat;                                    // grows every slice while it sleeps: a stopped rank's does not
  char operation[32];                               // what it is in (torn reads are harmless: text only)
  alignas(protocol::kCacheLine) uint32_t abort_state;
  AbortRecord abort;
  alignas(protocol::kCacheLine) protocol::Counter barrier_arrived;  // monitored barriers this rank has entered
  protocol::Counter barrier_passed;                                 // rank 0 only: monitored barriers all passed
  uint64_t layout;                                                  // layout fingerprint, must be equal on all ranks
  uint64_t cpu_mask[kCpuMaskWords];                                 // processors this rank may run on
};
static_assert(sizeof(ControlBlock) <= 4096);

}  // namespace ark
