// Parameters of a run of channels, shared by host and device. The benchmark (benchmarks/dma.py) and the test
// (tests/gpu/test_channels.py) use them.
#pragma once

#include "bulk_mover.cuh"
#include "channel_copy_engine.cuh"
#include "channel_proxy.cuh"

namespace ark::device {

struct RunParams {
  ChannelEnd end;  // of lane 0
  PostedFlags posted;
  ProxyRing proxy;
  const char* source;  // [lanes][bytes], or the data that messages are cut from
  const char* pulled;  // the peer's source as mapped here
  char* result;        // [lanes][result_stride], or [count][result_stride]
  char* to_result;     // the peer's result as mapped here
  uint64* spent;       // [lanes] nanoseconds
  uint64 bytes;        // of one lane's message
  uint64 result_stride;
  uint64 step, span;  // message n is cut from source + n * step % span
  uint32 count, warm;
  uint32 first;  // whether this GPU sends first
};

// Stages for single messages in one thread, and for one or several streams per block, on GPUs with 227 KB and with 99
// KB of shared memory.
using MessageStages = BulkStages<20, 8, 4096>;
template <int kMajor, int kStreams>
using StreamStagesOf = BulkStages<(kMajor < 12 ? 24 : 11) / kStreams, (kMajor < 12 ? 8 : 4) / kStreams, 8192>;

}  // namespace ark::device
