// Benchmark kernels of the bulk copy engine (TMA). They need compute capability 9.0 or newer.
#include "channel_bulk.cuh"

#if __CUDA_ARCH__ >= 900

template <int kStreams>
using Streams = StreamStagesOf<__CUDA_ARCH__ / 100, kStreams>;

#define MEMORY extern __shared__ __align__(128) char memory[]
#define STAGES(Stages) \
  MEMORY;              \
  Stages& stages = *reinterpret_cast<Stages*>(memory)

ENTRY(bulk_ping, 32) {
  STAGES(MessageStages);
  if (threadIdx.x != 0) return;
  const uint32 lane = blockIdx.x;
  const ChannelEnd end = lane_of(p.end, lane);
  BulkMover<BulkOp::copy, MessageStages>::prepare(stages);
  BulkSender<MessageStages> sender(end, stages);
  Receiver<OneThread> receiver(end);
  ping_pong<OneThread>(p, lane, sender, receiver);
}

ENTRY(bulk_put, 32) {
  STAGES(MessageStages);
  if (threadIdx.x != 0) return;
  BulkMover<BulkOp::copy, MessageStages>::prepare(stages);
  BulkSender<MessageStages> sender(p.end, stages);
  if (put_all(p, sender, true)) sender.close();
}

// A block has kStreams streams. The first warps move data, the others signal; one thread of each warp does the work.
template <BulkOp kOp, int kStreams, class Body>
__device__ __forceinline__ void with_streams(const RunParams& p, char* memory) {
  using Stages = Streams<kStreams>;
  using Stream = BulkStream<Stages, kOp>;
  const uint32 warp = threadIdx.x / 32, lane = blockIdx.x * kStreams + warp % kStreams;
  const bool first = (threadIdx.x & 31) == 0;
  const ChannelEnd end = lane_of(p.end, lane);
  Stages& stages = reinterpret_cast<Stages*>(memory)[warp % kStreams];
  if (first && warp < kStreams) Stream::prepare(end, stages);
  __syncthreads();
  if (first && warp >= kStreams) tell_stream(end, stages);
  if (!first || warp >= kStreams) return;
  Stream stream(end, stages);
  Body::run(p, lane, stream);
  stream.close();
}

struct SendAll {
  template <class Stream>
  static __device__ __forceinline__ void run(const RunParams& p, uint32 lane, Stream& stream) {
    send_all<OneThread>(p, lane, stream);
  }
};
struct PutAll {
  template <class Stream>
  static __device__ __forceinline__ void run(const RunParams& p, uint32, Stream& stream) {
    put_all(p, stream, true);
  }
};
// Adds every message to the same place in the peer's memory, outside of the ring. The ring's slots stay empty.
struct AddAll {
  template <class Stream>
  static __device__ __forceinline__ void run(const RunParams& p, uint32, Stream& stream) {
    for (uint32 number = 0; number < p.count; number++) {
      if (!stream.open() || !stream.put_with_signal(p.to_result, cut(p, number), p.bytes)) return;
    }
    stream.flush();
  }
};

#define STREAMS(name, op, streams, Body)                \
  ENTRY(name, 64 * streams) {                           \
    MEMORY;                                             \
    with_streams<BulkOp::op, streams, Body>(p, memory); \
  }
// One, two and four lanes per block, because a single thread is limited by how fast it can start copies.
STREAMS(bulk_send, copy, 1, SendAll)
STREAMS(bulk_send_2, copy, 2, SendAll)
STREAMS(bulk_send_4, copy, 4, SendAll)
STREAMS(stream_put, copy, 1, PutAll)
STREAMS(add_f32_put, add_f32, 1, AddAll)
STREAMS(add_bf16_put, add_bf16, 1, AddAll)
STREAMS(add_f16_put, add_f16, 1, AddAll)

// Pull: the sender signals that its source is ready, and the receiver's mover fetches it.
ENTRY(pull_put, 32) {
  if (threadIdx.x != 0) return;
  StoreSender<OneThread> sender(p.end);
  for (uint32 number = 0; number < p.count; number++) {
    if (!sender.open() || !sender.signal()) return;
  }
  if (sender.flush()) sender.close();
}
ENTRY(pull_keep, 32) {
  STAGES(MessageStages);
  if (threadIdx.x != 0) return;
  using Mover = BulkMover<BulkOp::copy, MessageStages>;
  Mover::prepare(stages);
  Mover mover(stages);
  Receiver<OneThread> receiver(p.end);
  for (uint32 number = 0; number < p.count; number++) {
    if (receiver.wait() == nullptr) return;
    mover.put(p.result + number * p.result_stride, p.pulled + number * p.step % p.span, p.bytes);
    mover.reusable();  // the peer's memory has been read
    receiver.release();
  }
  receiver.close();
}

#endif
