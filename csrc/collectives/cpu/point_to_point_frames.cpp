// Moves messages of send and recv through the channels: splits them into frames, reassembles them, and matches source
// and tag.
//
// A frame is a header and at most one slot of data. The writer fills the slot before it signals (release); the reader
// copies out before it releases. So neither sees half a frame. Everything here requires mutex_, which keeps a channel's
// frames and the transfer lists in one order for all threads of the rank.
#include <algorithm>
#include <cstring>

#include "collectives/cpu/point_to_point.hpp"
#include "util/error.hpp"

namespace ark {

namespace {

struct FrameHeader {
  uint64_t message_bytes;
  uint64_t offset;
  uint32_t frame_bytes;
  int32_t tag;
  uint64_t reserved[5];
};
static_assert(sizeof(FrameHeader) == 64);

std::exception_ptr size_mismatch(const Transfer& transfer, int rank, int source, size_t sent) {
  return std::make_exception_ptr(Error(ErrorKind::mismatch,
                                       "rank " + std::to_string(source) + " sent " + std::to_string(sent) +
                                           " bytes with tag " + std::to_string(transfer.tag) +
                                           ", but the tensor to receive them holds " + std::to_string(transfer.bytes),
                                       ErrorContext{rank, source, transfer.context.name, transfer.context.sequence,
                                                    "Receive into a tensor of the size and dtype that was sent."}));
}

}  // namespace

bool PointToPoint::push(int rank, Finished& finished) {
  Peer& peer = peers_[rank];
  Channel& channel = to_[rank];
  const size_t room = channel.slot_bytes() - sizeof(FrameHeader);
  bool moved = false;
  while (!peer.sends.empty() && channel.writable(peer.next_out)) {
    Transfer& transfer = *peer.sends.front();
    const size_t bytes = std::min(room, transfer.bytes - transfer.moved);
    std::byte* slot = channel.slot(peer.next_out);
    *reinterpret_cast<FrameHeader*>(slot) =
        FrameHeader{transfer.bytes, transfer.moved, static_cast<uint32_t>(bytes), transfer.tag, {}};
    if (bytes > 0)
      std::memcpy(slot + sizeof(FrameHeader), static_cast<const std::byte*>(transfer.data) + transfer.moved, bytes);
    transfer.moved += bytes;
    channel.signal(peer.next_out++);
    ring_and_wake(*doorbells_[rank]);
    moved = true;
    if (transfer.moved == transfer.bytes) {
      finished.emplace_back(peer.sends.front(), nullptr);
      peer.sends.pop_front();
    }
  }
  return moved;
}

bool PointToPoint::wants_from(int rank) const {
  const Peer& peer = peers_[rank];
  if (peer.reading && (peer.incoming || peer.discarding || peer.aside->claimed)) return true;
  return std::any_of(recvs_.begin(), recvs_.end(),
                     [&](const TransferPtr& recv) { return recv->peer == rank || recv->peer == kAnySource; });
}

TransferPtr PointToPoint::take_recv(int rank, int tag) {
  for (auto it = recvs_.begin(); it != recvs_.end(); ++it) {
    if ((*it)->tag == tag && ((*it)->peer == rank || (*it)->peer == kAnySource)) {
      TransferPtr found = *it;
      recvs_.erase(it);
      return found;
    }
  }
  return nullptr;
}

bool PointToPoint::pull(int rank, Finished& finished) {
  Peer& peer = peers_[rank];
  Channel& channel = from_[rank];
  bool moved = false;
  while (wants_from(rank) && channel.readable(peer.next_in)) {
    const std::byte* slot = channel.slot(peer.next_in);
    const FrameHeader header = *reinterpret_cast<const FrameHeader*>(slot);
    const size_t room = channel.slot_bytes() - sizeof(FrameHeader);
    if (!peer.reading) {
      peer.reading = true;
      peer.in_bytes = header.message_bytes;
      peer.in_moved = 0;
      peer.discarding = false;
      peer.incoming = take_recv(rank, header.tag);
      if (peer.incoming) {
        peer.incoming->source = rank;
        if (peer.incoming->bytes != header.message_bytes) {
          finished.emplace_back(peer.incoming,
                                size_mismatch(*peer.incoming, health_.rank(), rank, header.message_bytes));
          peer.incoming.reset();
          peer.discarding = true;
        }
      } else {
        peer.unexpected.push_back(Unexpected{header.tag, std::vector<std::byte>(header.message_bytes), 0, nullptr});
        peer.aside = std::prev(peer.unexpected.end());
      }
    }
    // The sizes come from another process, so never write beyond the message's buffer.
    const size_t bytes = std::min({size_t{header.frame_bytes}, room, peer.in_bytes - peer.in_moved});
    if (bytes > 0 && !peer.discarding) {
      std::byte* target = peer.incoming ? static_cast<std::byte*>(peer.incoming->data) : peer.aside->bytes.data();
      std::memcpy(target + peer.in_moved, slot + sizeof(FrameHeader), bytes);
    }
    peer.in_moved += bytes;
    advance_and_wake(*channel.released_by_reader(), ++peer.next_in);
    ring_and_wake(*doorbells_[rank]);
    moved = true;
    if (peer.in_moved < peer.in_bytes) continue;
    peer.reading = false;
    if (peer.incoming) {
      finished.emplace_back(std::move(peer.incoming), nullptr);
      peer.incoming.reset();
    } else if (!peer.discarding) {
      peer.aside->arrived = peer.in_bytes;
      if (TransferPtr claimed = peer.aside->claimed) {
        if (claimed->bytes > 0) std::memcpy(claimed->data, peer.aside->bytes.data(), claimed->bytes);
        peer.unexpected.erase(peer.aside);
        finished.emplace_back(std::move(claimed), nullptr);
      }
    }
  }
  return moved;
}

bool PointToPoint::match_unexpected(const TransferPtr& transfer, Finished& finished) {
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    if (transfer->peer != kAnySource && transfer->peer != rank) continue;
    Peer& peer = peers_[rank];
    for (auto it = peer.unexpected.begin(); it != peer.unexpected.end(); ++it) {
      if (it->tag != transfer->tag || it->claimed) continue;
      transfer->source = rank;
      const bool arriving = peer.reading && !peer.incoming && !peer.discarding && peer.aside == it;
      if (it->bytes.size() != transfer->bytes) {
        finished.emplace_back(transfer, size_mismatch(*transfer, health_.rank(), rank, it->bytes.size()));
        if (!arriving)
          peer.unexpected.erase(it);
        else
          peer.discarding = true, peer.unexpected.erase(it);
      } else if (arriving) {
        it->claimed = transfer;
      } else {
        if (transfer->bytes > 0) std::memcpy(transfer->data, it->bytes.data(), transfer->bytes);
        peer.unexpected.erase(it);
        finished.emplace_back(transfer, nullptr);
      }
      return true;
    }
  }
  return false;
}

}  // namespace ark
