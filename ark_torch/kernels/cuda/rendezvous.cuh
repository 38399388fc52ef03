// Rendezvous of a message's two ranks: one warp waits for the other end, before a kernel that moves the message starts.
//
// A rank often asks for a message long before its peer sends it, as schedules of pipelines do. The kernel that moves it
// has many blocks, whose multiprocessors would be lost to computation while they wait. This kernel has one.
#pragma once

#include "cuda/landing.cuh"

namespace ark::device {

struct RendezvousParams {
  Rings rings;
  int peer;
  uint32 sends;  // 1: this rank's end of the message is the sender's
};

#if defined(__CUDACC__)

// The words are those of a landing in lane 0, which sends and recvs do not use otherwise; the address is null.
__device__ inline void rendezvous(const RendezvousParams& p) {
  await_previous_kernel();  // the next kernel is not released: its blocks would wait, too
  Landing end;
  end.open(p.rings, 0, p.peer);
  if (p.sends != 0) {
    char* address;
    if (end.await_address(address)) end.tell_done();
  } else {
    end.announce(nullptr);
    end.await_all();
  }
}

#endif

}  // namespace ark::device
