// What host and device know of a run of channels: benchmarks/dma.py measures by it, tests/gpu/test_channels.py tests.
#pragma once

#include "bulk_mover.cuh"
#include "channel_copy_engine.cuh"
#include "channel_proxy.cuh"

namespace ark::device {

struct RunParams {
  ChannelEnd end;  // of lane 0
  PostedFlags posted;
  ProxyRing proxy;
  const char* source;  // [lanes][bytes], or what messages are cut from
  const char* pulled;  // the peer's source as mapped here
  char* result;        // [lanes][result_stride], or [count][result_stride]
  char* to_result;     // the peer's, as mapped here
  uint64* spent;       // [lanes] nanoseconds
  uint64 bytes;        // of a lane's message
  uint64 result_stride;
  uint64 step, span;  // message n is cut from source + n * step % span
  uint32 count, warm;
  uint32 first;  // this GPU sends first
};

// Of a message by one thread; of streams, one or several of a block, on GPUs of 227 KB and of 99 KB of shared memory.
using MessageStages = BulkStages<20, 8, 4096>;
template <int kMajor, int kStreams>
using StreamStagesOf = BulkStages<(kMajor < 12 ? 24 : 11) / kStreams, (kMajor < 12 ? 8 : 4) / kStreams, 8192>;

}  // namespace ark::device
