// Weights that lie in shared memory when their task begins.
//
// Memory has nothing to do while workers wait for each other and while small tasks run: then the bulk copy engine (TMA)
// brings the first weights of a worker's next product into a part of shared memory that is kept for it, as much as fits
// (kHeldBytes). The task adds them up between what it loads itself, which takes a share of the time that memory needs.
// The second-level cache cannot do that: what comes out of it is hardly faster than memory for all multiprocessors.
//
// Order. One thread asks (ask()) when the task before in the queue that used the room has ended, behind the block's
// barrier: nobody reads the room any more. It says for which place in the queue, in shared memory, which the others
// read behind a later barrier of the block: the one at a task's end, or the one behind the wait of the task itself. The bytes are there when the mbarrier's phase ends; every thread waits for
// that itself (the phase's end makes the engine's writes visible to it). Phases are used in order, one each.
#pragma once

#include "cuda/bulk_copy.cuh"

#include "cuda/loop/group.cuh"

namespace ark::loop {

// The first columns of b that the task multiplies by, in shared memory already, one after the other; of several b's
// those of the first before those of the second. See lookahead.cuh.
struct Held {
  const char* at = nullptr;
  int bytes = 0;
};

#if defined(__CUDACC__)

// Of a block, in shared memory.
struct HeldRoom {
  alignas(8) uint64 landed;
  int position;  // in the queue, of the task that it is for; -1: none
  int bytes;
  uint32 asked;  // phases begun
};

ARK_LOOP char* held_room() {
  return workspace() + kWorkspaceBytes;
}

#endif

}  // namespace ark::loop
