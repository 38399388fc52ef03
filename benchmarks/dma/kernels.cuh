// The benchmark's kernels: ping-pong, a one-way stream of messages (times), and messages that are kept (contents). The
// same few loops serve every engine through the common channel API.
//
// The sender measures a stream until the receiver has consumed the last message. This uses one clock and includes one
// extra latency.
#include "channel_packet.cuh"
#include "channel_store.cuh"

namespace ark::device {

template <class Team>
__device__ __forceinline__ uint32 lane_number() {
  return blockIdx.x * (blockDim.x / Team::size()) + threadIdx.x / Team::size();
}
template <>
__device__ __forceinline__ uint32 lane_number<OneThread>() {
  return blockIdx.x;
}

template <class Team>
__device__ __forceinline__ void keep_time(const RunParams& p, uint32 lane, uint64 began) {
  if (Team::rank() == 0) p.spent[lane] = nanoseconds() - began;
}

// A reply is sent from the slot of the received message. The slot may be rewritten after its release: the peer's next
// message there is a reply to this one, or to a later one.
template <class Team, class Sender, class Receiver>
__device__ __forceinline__ void ping_pong(const RunParams& p, uint32 lane, Sender& sender, Receiver& receiver) {
  const char* source = p.source + lane * p.bytes;
  char* room = p.result + lane * p.result_stride;
  uint64 began = nanoseconds();
  for (uint32 number = 0; number < p.count; number++) {
    if (number == p.warm) began = nanoseconds();
    if (p.first && !send(sender, source, p.bytes)) return;
    const char* came = receiver.wait(room, p.bytes);
    if (came == nullptr) return;
    if (!p.first && !send(sender, came, p.bytes)) return;
    receiver.release();
  }
  keep_time<Team>(p, lane, began);
  sender.close();
  receiver.close();
}

template <class Team, class Sender>
__device__ __forceinline__ bool send_all(const RunParams& p, uint32 lane, Sender& sender) {
  const char* source = p.source + lane * p.bytes;
  const uint64 began = nanoseconds();
  for (uint32 number = 0; number < p.count; number++) {
    if (!send(sender, source, p.bytes)) return false;
  }
  if (!sender.flush()) return false;
  keep_time<Team>(p, lane, began);
  return true;
}

// For data that lands in its final place: one thread returns credits.
__device__ __forceinline__ void watch_all(const RunParams& p) {
  if (threadIdx.x != 0) return;
  Receiver<OneThread> receiver(lane_of(p.end, blockIdx.x));
  for (uint64 left = p.count; left > 0;) {
    if (receiver.wait() == nullptr) return;
    const uint64 ready = min(receiver.ready(), left);
    receiver.release(ready);
    left -= ready;
  }
  receiver.close();
}

template <class Receiver>
__device__ __forceinline__ void receive_all(const RunParams& p, uint32 lane, Receiver& receiver) {
  for (uint32 number = 0; number < p.count; number++) {
    if (receiver.wait(p.result + lane * p.result_stride, p.bytes) == nullptr) return;
    receiver.release();
  }
  receiver.close();
}

// Returns the data of message n. It goes in two puts if the engine supports that: all puts before a signal form a
// message.
__device__ __forceinline__ const char* cut(const RunParams& p, uint32 number) {
  return p.source + number * p.step % p.span;
}
template <class Sender>
__device__ __forceinline__ bool put_all(const RunParams& p, Sender& sender, bool in_two) {
  for (uint32 number = 0; number < p.count; number++) {
    const uint64 half = in_two ? p.bytes / 32 * 16 : 0;
    if (!sender.open()) return false;
    char* slot = sender.slot();
    if (half > 0 && !sender.put(slot, cut(p, number), half)) return false;
    if (!sender.put_with_signal(slot + half, cut(p, number) + half, p.bytes - half)) return false;
  }
  return sender.flush();
}
template <class Receiver>
__device__ __forceinline__ void keep_all(const RunParams& p, Receiver& receiver) {
  for (uint32 number = 0; number < p.count; number++) {
    char* to = p.result + number * p.result_stride;
    const char* came = receiver.wait(to, p.bytes);
    if (came == nullptr) return;
    if (came != to) copy_bytes<OneBlock>(to, came, p.bytes);
    receiver.release();
  }
  receiver.close();
}

}  // namespace ark::device

using namespace ark;
using namespace ark::device;
#define ENTRY(name, threads) \
  extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ RunParams p)

// Defines name_ping, name_send and name_put of one engine. The last four arguments construct a sender and a receiver of
// `end`.
#define ENGINE(name, threads, Team, in_two, Sender_, sender, Receiver_, receiver) \
  ENTRY(name##_ping, threads) {                                                   \
    const uint32 lane = lane_number<Team>();                                      \
    const ChannelEnd end = lane_of(p.end, lane);                                  \
    Sender_ s sender;                                                             \
    Receiver_ r receiver;                                                         \
    ping_pong<Team>(p, lane, s, r);                                               \
  }                                                                               \
  ENTRY(name##_send, threads) {                                                   \
    const uint32 lane = lane_number<Team>();                                      \
    const ChannelEnd end = lane_of(p.end, lane);                                  \
    Sender_ s sender;                                                             \
    if (send_all<Team>(p, lane, s)) s.close();                                    \
  }                                                                               \
  ENTRY(name##_put, threads) {                                                    \
    const ChannelEnd end = p.end;                                                 \
    Sender_ s sender;                                                             \
    if (put_all(p, s, in_two)) s.close();                                         \
  }

ENGINE(store, 1024, OneBlock, true, StoreSender<OneBlock>, (end), Receiver<OneBlock>, (end))
ENGINE(warp, 1024, OneWarp, true, StoreSender<OneWarp>, (end), Receiver<OneWarp>, (end))
ENGINE(packet, 1024, OneBlock, false, PacketSender<OneBlock>, (end), PacketReceiver<OneBlock>, (end))
ENGINE(copy_engine, 32, OneWarp, false, PostedSender<OneWarp>, (end, p.posted), PostedReceiver<OneWarp>,
       (end, p.posted))
ENGINE(proxy, 32, OneWarp, true, ProxySender<OneWarp>, (end, p.proxy), Receiver<OneWarp>, (end))

ENTRY(watch, 32) {
  watch_all(p);
}
ENTRY(packet_receive, 1024) {
  const uint32 lane = blockIdx.x;
  PacketReceiver<OneBlock> receiver(lane_of(p.end, lane));
  receive_all(p, lane, receiver);
}
ENTRY(copy_engine_receive, 32) {
  PostedReceiver<OneWarp> receiver(p.end, p.posted);
  receive_all(p, 0, receiver);
}
ENTRY(keep, 1024) {
  Receiver<OneBlock> receiver(p.end);
  keep_all(p, receiver);
}
ENTRY(packet_keep, 1024) {
  PacketReceiver<OneBlock> receiver(p.end);
  keep_all(p, receiver);
}
ENTRY(copy_engine_keep, 1024) {
  PostedReceiver<OneBlock> receiver(p.end, p.posted);
  keep_all(p, receiver);
}
// The kernel that the host launches after its own copy. It reads the data.
ENTRY(look, 256) {
  uint64 sum = 0;
  const auto* from = reinterpret_cast<const uint64*>(p.end.slots);
  for (uint64 i = threadIdx.x; i < min(p.bytes, uint64{4096}) / 8; i += blockDim.x) sum += from[i];
  if (sum == 1) p.spent[0] = sum;  // keeps the compiler from removing the loads
}
