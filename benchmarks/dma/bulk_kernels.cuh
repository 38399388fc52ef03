// The kernels of the bulk copy engine: compute capability 9.0 and newer.
#include "cuda/channel_bulk.cuh"

#if __CUDA_ARCH__ >= 900

using StreamStages = StreamStagesOf<__CUDA_ARCH__ / 100>;

#define STAGES(Stages)                            \
  extern __shared__ __align__(128) char memory[]; \
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

// Thread 0 moves, thread 32 tells.
template <BulkOp kOp, class Body>
__device__ __forceinline__ void with_stream(const ChannelEnd& end, StreamStages& stages, Body body) {
  using Stream = BulkStream<StreamStages, kOp>;
  if (threadIdx.x == 0) Stream::prepare(end, stages);
  __syncthreads();
  if (threadIdx.x == 32) tell_stream(end, stages);
  if (threadIdx.x != 0) return;
  Stream stream(end, stages);
  body(stream);
  stream.close();
}

ENTRY(bulk_send, 64) {
  STAGES(StreamStages);
  with_stream<BulkOp::copy>(lane_of(p.end, blockIdx.x), stages,
                            [&](auto& stream) { send_all<OneThread>(p, blockIdx.x, stream); });
}
ENTRY(stream_put, 64) {
  STAGES(StreamStages);
  with_stream<BulkOp::copy>(p.end, stages, [&](auto& stream) { put_all(p, stream, true); });
}

// Adds every message to one place of the peer's, which is not in the ring; the ring's slots stay empty.
template <BulkOp kOp>
__device__ __forceinline__ void add_all(const RunParams& p, StreamStages& stages) {
  with_stream<kOp>(p.end, stages, [&](auto& stream) {
    for (uint32 number = 0; number < p.count; number++) {
      if (!stream.open() || !stream.put_with_signal(p.to_result, cut(p, number), p.bytes)) return;
    }
    stream.flush();
  });
}
ENTRY(add_f32_put, 64) {
  STAGES(StreamStages);
  add_all<BulkOp::add_f32>(p, stages);
}
ENTRY(add_bf16_put, 64) {
  STAGES(StreamStages);
  add_all<BulkOp::add_bf16>(p, stages);
}
ENTRY(add_f16_put, 64) {
  STAGES(StreamStages);
  add_all<BulkOp::add_f16>(p, stages);
}

// Pull: the sender says that its source is there, and the receiver's mover fetches it.
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
    mover.reusable();  // the peer's memory was read
    receiver.release();
  }
  receiver.close();
}

#endif
