// The collectives of copy_engine.hpp: which rank sends what to which rank, and when.
#include <algorithm>
#include <type_traits>

#include "collectives/cuda/copy_engine/copy_engine_call.hpp"

namespace ark {

namespace {

constexpr uint64_t kAheadBytes = 64 << 20;  // parts sent before the first sum, for adders that wait for SMs

// Two pieces overlap their steps. With more ranks one is faster, because each piece may wait for SMs and each copy for
// its turn.
uint64_t pieces_for(int ranks) {
  return ranks <= 2 ? 2 : 1;
}

template <class Pointer>
Pointer at(Pointer base, uint64_t offset) {
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const char, char>;
  return static_cast<Byte*>(base) + offset;
}

uint64_t length_at(uint64_t bytes, uint64_t piece, uint64_t i) {
  return std::min(piece, bytes - std::min(bytes, i * piece));
}

uint64_t pieces_in(uint64_t bytes, uint64_t piece) {
  return (bytes + piece - 1) / piece;
}

bool go_straight(const CopyEngine::Outputs* outputs) {
  return outputs != nullptr && !outputs->at.empty();
}

}  // namespace

// Parts of later pieces are sent before the sums of earlier ones. In place, a sum overwrites only data that this rank
// has already pushed.
void CopyEngine::all_reduce(const void* in, void* out, uint64_t bytes, uint64_t element_bytes, CUstream stream,
                            const Add& add, MaybeOutputs outputs) {
  const CurrentContext context(device_);
  const uint64_t unit = std::max<uint64_t>(element_bytes, 16), units = (bytes + unit - 1) / unit;
  const uint64_t part = (units + size_ - 1) / size_ * unit;  // the last parts may be short or empty
  const auto from_of = [&](int r) { return std::min(r * part, bytes); };
  const auto size_of = [&](int r) { return std::min(part, bytes - from_of(r)); };
  const bool straight = go_straight(outputs), fetched = !straight && bytes < pull_below;
  const uint64_t piece = piece_of(part, unit, pieces_for(size_), true), pieces = pieces_in(part, piece);
  const uint64_t ahead = std::clamp<uint64_t>(kAheadBytes / (piece * std::max(size_ - 1, 1)), 1, slots_ - 1);
  const auto length = [&](int r, uint64_t i) { return length_at(size_of(r), piece, i); };
  const auto offset = [&](int r, uint64_t i) { return from_of(r) + i * piece; };
  uint32_t owners = 0;
  for (int r = 0; r < size_; ++r) owners |= static_cast<uint32_t>(size_of(r) != 0) << r;

  Call call(*this, stream, 2 * pieces * (size_ - 1), bytes <= in_line_to && pieces <= ahead + 1);
  // In line, all parts are sent before the first sum, because none waits for a slot that this call has used.
  const uint64_t behind = call.in_line() ? pieces - 1 : 0;
  call.enter(outputs, owners);
  for (uint64_t t = 0; t < pieces + ahead; ++t) {
    for (int k = 1; k < size_ && t < pieces; ++k) {
      const int owner = (rank_ + k) % size_;
      call.take_turn(owner);
      call.pass_turn(owner);
      if (length(owner, t) != 0) call.push_part(owner, t, at(in, offset(owner, t)), length(owner, t));
    }
    call.step();
    const uint64_t sum = t - behind;
    if (const uint64_t mine = t < behind ? 0 : length(rank_, sum); mine != 0) {
      if (fetched && sum == 0) call.await_entered_to_add(outputs, others());
      call.add_up(sum, at(in, offset(rank_, sum)), at(out, offset(rank_, sum)), mine, add, fetched);
    }
    if (t < ahead) continue;
    const uint64_t i = t - ahead;
    if (const uint64_t mine = length(rank_, i); !fetched) {
      if (i == 0 && mine != 0) call.await_entered(outputs, others());
      if (mine != 0) call.await_sum(i);
      for (int k = 1; k < size_; ++k) {
        const int peer = (rank_ + k) % size_;
        char* const place = straight ? outputs->at[peer] + offset(rank_, i) : nullptr;
        call.take_turn(peer);
        call.pass_turn(peer);
        if (mine != 0) call.send(peer, i, place, at(out, offset(rank_, i)), mine);
      }
    }
    for (int k = 1; k < size_; ++k) {
      const int owner = fetched ? (rank_ + k) % size_ : (rank_ + size_ - k) % size_;
      if (fetched) {
        call.take_turn(owner);
        call.pass_turn(owner);
      }
      if (length(owner, i) == 0) continue;
      if (fetched)
        call.fetch_sum(owner, i, at(out, offset(owner, i)), length(owner, i));
      else
        call.receive(owner, i, at(out, offset(owner, i)), length(owner, i), straight);
    }
    call.step();
  }
  call.finish();
}

void CopyEngine::reduce_scatter(const void* const* ins, void* out, uint64_t bytes, uint64_t element_bytes,
                                CUstream stream, const Add& add) {
  const CurrentContext context(device_);
  const uint64_t piece = piece_of(bytes, std::max<uint64_t>(element_bytes, 16), pieces_for(size_), true);
  Call call(*this, stream, pieces_in(bytes, piece) * (size_ - 1));
  for (uint64_t i = 0; i < pieces_in(bytes, piece); ++i) {
    const uint64_t now = length_at(bytes, piece, i);
    for (int k = 1; k < size_; ++k) {
      const int owner = (rank_ + k) % size_;
      call.take_turn(owner);
      call.pass_turn(owner);
      call.push_part(owner, i, at(ins[owner], i * piece), now);
    }
    call.step();
    call.add_up(i, at(ins[rank_], i * piece), at(out, i * piece), now, add);
  }
  call.finish();
}

void CopyEngine::move(const Message* sends, const Place* receives, bool all, CUstream stream, MaybeOutputs outputs) {
  const CurrentContext context(device_);
  const bool straight = go_straight(outputs);
  const uint64_t wanted = straight ? 1 : pieces_for(size_);
  const auto sent_in = [&](int r) { return piece_of(sends[r].bytes, 16, wanted, !straight); };
  uint32_t senders = 0, receivers = 0;
  uint64_t copies = 0;
  for (int r = 0; r < size_; ++r) {
    if (r != rank_) copies += pieces_in(sends[r].bytes, sent_in(r));
    senders |= static_cast<uint32_t>(receives[r].bytes != 0) << r;
    receivers |= static_cast<uint32_t>(sends[r].bytes != 0) << r;
  }
  Call call(*this, stream, copies);
  call.enter(outputs, senders);
  call.copy_own(receives[rank_].data, sends[rank_].data, sends[rank_].bytes);
  call.await_entered(outputs, receivers);
  for (int k = 1; k < size_; ++k) {
    const int to = (rank_ + k) % size_, from = (rank_ + size_ - k) % size_;
    const Message& send = sends[to];
    const Place& receive = receives[from];
    const uint64_t sent = sent_in(to);
    const uint64_t received = piece_of(receive.bytes, 16, wanted, !straight);
    const uint64_t steps = std::max({pieces_in(send.bytes, sent), pieces_in(receive.bytes, received), uint64_t{1}});
    if (all) call.take_turn(to);
    for (uint64_t i = 0; i < steps; ++i) {
      if (all && i + 1 == steps) call.pass_turn(to);
      if (const uint64_t now = length_at(send.bytes, sent, i); now != 0)
        call.send(to, i, straight ? outputs->at[to] + i * sent : nullptr, at(send.data, i * sent), now);
      if (const uint64_t now = length_at(receive.bytes, received, i); now != 0)
        call.receive(from, i, at(receive.data, i * received), now, straight);
      call.step();
    }
  }
  call.finish();
}

void CopyEngine::broadcast(void* data, uint64_t bytes, int root, CUstream stream, MaybeOutputs outputs) {
  const CurrentContext context(device_);
  const bool straight = go_straight(outputs);
  const int next = (rank_ + 1) % size_, before = (rank_ + size_ - 1) % size_;
  const bool sends = next != root, receives = rank_ != root;
  // Every further rank adds the time of one piece.
  const uint64_t wanted = size_ > 2 ? 4 * static_cast<uint64_t>(size_) : straight ? 1 : pieces_for(size_);
  const uint64_t piece = piece_of(bytes, 16, wanted, !straight);
  Call call(*this, stream, pieces_in(bytes, piece));
  call.enter(outputs, receives ? uint32_t{1} << before : 0);
  call.await_entered(outputs, sends ? uint32_t{1} << next : 0);
  for (uint64_t i = 0; i < pieces_in(bytes, piece); ++i) {
    const uint64_t now = length_at(bytes, piece, i);
    char* const here = static_cast<char*>(data) + i * piece;
    char* const there = straight ? outputs->at[next] + i * piece : nullptr;
    if (!receives)
      call.send(next, i, there, here, now);
    else if (sends)
      call.forward(before, i, here, now, straight, next, there);
    else
      call.receive(before, i, here, now, straight);
    call.step();
  }
  call.finish();
}

}  // namespace ark
