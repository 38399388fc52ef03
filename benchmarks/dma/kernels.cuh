// The two measurements, for any engine: a message back and forth, and a stream of messages one way.
//
// Ping-pong needs no credits: with two slots an answer says that the message before was taken. A stream's time ends at
// its sender, when the receiver has taken the last message: one clock, and one latency too much.

namespace ark::device {

__device__ __forceinline__ void keep_time(const Lane& lane, uint64 began) {
  if (lane.leader) lane.p.spent[lane.lane] = nanoseconds() - began;
}

template <class Channel>
__device__ __forceinline__ void ping_pong(const ChannelParams& p, Channel& channel) {
  uint64 began = nanoseconds();
  for (uint32 number = 0; number < p.count; number++) {
    if (number == p.warm) began = nanoseconds();
    if (p.first) channel.put_with_signal(number, channel.source());
    if (!channel.wait(number)) return;
    if (!p.first) channel.put_with_signal(number, channel.received(number));  // what came goes back
  }
  keep_time(channel, began);
}

template <class Channel>
__device__ __forceinline__ void send_all(const ChannelParams& p, Channel& channel) {
  const uint64 began = nanoseconds();
  for (uint32 number = 0; number < p.count; number++) {
    bool good = true;
    if (number >= p.slots) {  // every thread looks itself: no barrier a message
      good = channel.open(number);
    }
    if (!good) break;
    channel.put_with_signal(number, channel.source());
  }
  if (channel.leader && channel.good) channel.flush(p.count - 1);
  keep_time(channel, began);
}

template <class Channel>
__device__ __forceinline__ void receive_all(const ChannelParams& p, Channel& channel) {
  for (uint32 number = 0; number < p.count; number++) {
    if (!channel.wait(number)) return;
    channel.release(number + 1);
  }
}

// Where the data is in its place when it arrives, one thread watches the word and returns credits in batches.
__device__ __forceinline__ void watch_all(const ChannelParams& p, Lane& lane) {
  if (threadIdx.x != 0) return;
  for (uint64 seen = 0; seen < p.count;) {
    if (!lane.until(lane.word(p.own_arrived), seen + 1, seen)) return;
    store_relaxed(lane.word(p.peer_credit), seen);
  }
}

// Copy engine and proxy: all at once, and the answer of the last.
template <class Channel>
__device__ __forceinline__ void release_all(const ChannelParams& p, Channel& channel, uint64* answer) {
  if (threadIdx.x != 0) return;
  const uint64 began = nanoseconds();
  for (uint32 number = 0; number < p.count && channel.good; number++) channel.put_with_signal(number, channel.source());
  uint64 seen = 0;
  if (channel.good) channel.until(answer, 1, seen);
  keep_time(channel, began);
}

}  // namespace ark::device

using namespace ark;
using namespace ark::device;
#define ENTRY(name, threads) \
  extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ ChannelParams p)

ENTRY(store_ping, 1024) {
  StoreChannel c(p);
  ping_pong(p, c);
}
ENTRY(warp_ping, 1024) {
  WarpChannel c(p);
  ping_pong(p, c);
}
ENTRY(warp_send, 1024) {
  WarpChannel c(p);
  send_all(p, c);
}
ENTRY(packet_ping, 1024) {
  PacketChannel c(p);
  ping_pong(p, c);
}
ENTRY(engine_ping, 32) {
  EngineChannel c(p);
  ping_pong(p, c);
}
ENTRY(proxy_ping, 32) {
  ProxyChannel c(p);
  ping_pong(p, c);
}
ENTRY(store_send, 1024) {
  StoreChannel c(p);
  send_all(p, c);
}
ENTRY(packet_send, 1024) {
  PacketChannel c(p);
  send_all(p, c);
}
ENTRY(packet_receive, 1024) {
  PacketChannel c(p);
  receive_all(p, c);
}
ENTRY(watch, 32) {
  Lane c(p);
  watch_all(p, c);
}
// The sender's answer word is peer_arrived's twin in its own memory: own_arrived.
ENTRY(engine_send, 32) {
  EngineChannel c(p);
  release_all(p, c, p.own_arrived);
}
ENTRY(proxy_send, 32) {
  ProxyChannel c(p);
  release_all(p, c, p.own_arrived);
}
ENTRY(answer, 32) {
  Lane c(p);
  uint64 seen = 0;
  if (threadIdx.x == 0 && c.until(p.own_arrived, p.count, seen)) store_relaxed(p.peer_arrived, 1);
}
// What the host launches when it has copied itself: looks at the data.
ENTRY(look, 256) {
  uint64 sum = 0;
  const auto* from = reinterpret_cast<const uint64*>(p.own_slots);
  for (uint64 i = threadIdx.x; i < min(p.bytes, uint64{4096}) / 8; i += blockDim.x) sum += from[i];
  if (sum == 1) p.spent[0] = sum;  // so that the loads are made
}

#if __CUDA_ARCH__ >= 900
#define BULK_MEMORY                               \
  extern __shared__ __align__(128) char stages[]; \
  __shared__ uint64 full[kStages], written;       \
  BulkChannel c(p, full, &written, stages);

ENTRY(bulk_ping, 64) {
  BULK_MEMORY
  ping_pong(p, c);
}
ENTRY(bulk_send, 64) {
  BULK_MEMORY
  const uint64 began = nanoseconds();
  if (threadIdx.x == 0) {
    if (c.move(0, p.count, c.source())) c.flush(p.count - 1);
    keep_time(c, began);
  } else if (threadIdx.x == 32) {
    c.tell(p.count);
  }
}
#endif
