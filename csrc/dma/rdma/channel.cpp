// Implements credits, batching and completion of an RDMA connection (channel.hpp). Callers queue requests under one
// lock and post as many as the credits allow. The engine's thread handles completions and posts the rest.
#include "dma/rdma/channel.hpp"

#include <arpa/inet.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "dma/rdma/status.hpp"

namespace ark::rdma {

namespace {

constexpr int kSends = 256;                   // length of the send queue, in requests
constexpr uint64_t kSignalEvery = 16;         // one request in this many asks for a completion
constexpr size_t kBatch = 32;                 // most requests per call of post_send
constexpr uint64_t kReceive = 1ull << 63;     // flag in a work request's id
constexpr uint32_t kCreditsAlone = 1u << 31;  // immediate data of a signal that only returns credits (7 bits at 24)
constexpr uint32_t kMostReturned = 127;
constexpr int kPoll = 32;

}  // namespace

Channel::Channel(std::shared_ptr<Engine> engine, int rank, int peer, int size, Shape shape)
    : engine_(std::move(engine)),
      rank_(rank),
      peer_(peer),
      size_(size),
      shape_(shape),
      memory_(nullptr, [](std::byte* one) { std::free(one); }) {
  const size_t bytes = size_t{shape.slots} * shape.slot_bytes;
  // Whole pages of their own, so that the registration covers nothing else of the process.
  const size_t page = 4096, room = (2 * bytes + page - 1) / page * page;
  memory_.reset(static_cast<std::byte*>(std::aligned_alloc(page, room)));
  if (!memory_) throw system_error("no memory for messages of rank " + std::to_string(peer), ENOMEM);
  std::memset(memory_.get(), 0, room);
  inbox_ = memory_.get();
  outbox_ = inbox_ + bytes;
  inbox_use_ = engine_->memory().hold(inbox_, bytes);
  outbox_use_ = engine_->memory().hold(outbox_, bytes);
  const int most = engine_->device()->limits().max_qp_wr;
  send_room_ = most > 0 ? std::min(kSends, most) : kSends;
  numbers_.resize(send_room_);
  queue_ = engine_->begin_queue(send_room_ + static_cast<int>(shape.slots) + 8, *this);
  try {
    pair_ = std::make_unique<QueuePair>(*engine_, queue_, rank, peer, send_room_, static_cast<int>(shape.slots));
    const std::lock_guard lock(mutex_);
    post_receives(shape.slots);
    if (failure_) throw *failure_;
  } catch (...) {
    engine_->silence(queue_);
    pair_.reset();
    engine_->end_queue(queue_);
    throw;
  }
  credits_ = least_credits_ = shape.slots;
}

Channel::~Channel() {
  // The order matters: no more callbacks, then the queue pair, then its completion queue. Members free the memory last.
  engine_->silence(queue_);
  pair_->fail();
  pair_.reset();
  engine_->end_queue(queue_);
}

Endpoint Channel::endpoint() const {
  Endpoint own;
  own.from = static_cast<uint32_t>(rank_);
  own.to = static_cast<uint32_t>(peer_);
  own.size = static_cast<uint32_t>(size_);
  own.pair = pair_->number();
  own.first_packet = pair_->first_packet();
  const PortInfo& port = engine_->device()->port();
  std::copy_n(port.gid.raw, own.gid.size(), own.gid.begin());
  own.lid = port.lid;
  own.key = inbox_use_.remote_key();
  own.inbox = reinterpret_cast<uint64_t>(inbox_);
  own.slots = shape_.slots;
  own.slot_bytes = shape_.slot_bytes;
  return own;
}

void Channel::connect(const Endpoint& peer, int mtu) {
  if (static_cast<int>(peer.from) != peer_ || static_cast<int>(peer.to) != rank_ ||
      static_cast<int>(peer.size) != size_ || peer.slots != shape_.slots || peer.slot_bytes != shape_.slot_bytes)
    throw Error(ErrorKind::invalid_argument,
                "RDMA handle record of rank " + std::to_string(peer_) + " rejected: it is of rank " +
                    std::to_string(peer.from) + " for rank " + std::to_string(peer.to) + " of " +
                    std::to_string(peer.size) + ", with " + std::to_string(peer.slots) + " slots of " +
                    std::to_string(peer.slot_bytes) + " bytes",
                ErrorContext{rank_, peer_, "init", 0, "Run the same ark_torch on all ranks."});
  const std::lock_guard lock(mutex_);
  if (failure_) throw *failure_;
  pair_->connect(peer, mtu);
  remote_ = peer;
  connected_ = true;
  post_waiting();
}

uint64_t Channel::put(const void* from, uint32_t key, size_t bytes, uint64_t to, uint32_t remote_key) {
  return enqueue(from, key, bytes, to, remote_key, false, 0);
}

uint64_t Channel::put_with_signal(const void* from, uint32_t key, size_t bytes, uint64_t to, uint32_t remote_key,
                                  uint32_t value) {
  if (value > kMostValue)
    throw Error(ErrorKind::invalid_argument, "a signal's value is " + std::to_string(value),
                ErrorContext{rank_, peer_, "rdma signal", 0, "Signal a value of at most 24 bits."});
  return enqueue(from, key, bytes, to, remote_key, true, value);
}

// Splits a write that exceeds the port's largest message. Only the last piece signals and carries the number.
uint64_t Channel::enqueue(const void* from, uint32_t key, size_t bytes, uint64_t to, uint32_t remote_key, bool signals,
                          uint32_t value) {
  const uint32_t most = std::clamp<uint32_t>(engine_->device()->port().most_bytes, 4096, 1u << 30);
  const std::lock_guard lock(mutex_);
  const uint64_t number = ++last_number_;
  if (failure_) return number;
  size_t done = 0;
  do {
    const uint32_t piece = static_cast<uint32_t>(std::min<size_t>(most, bytes - done));
    const bool last = done + piece == bytes;
    waiting_.push_back({static_cast<const std::byte*>(from) + done, to + done, piece, key, remote_key, value,
                        signals && last, last ? number : number - 1});
    done += piece;
  } while (done < bytes);
  post_waiting();
  return number;
}

void Channel::probe() {
  const std::lock_guard lock(mutex_);
  if (!connected_ || failure_ || outstanding() > 0 || !waiting_.empty()) return;
  waiting_.push_back({nullptr, 0, 0, 0, 0, 0, false, last_number_});
  post_waiting();
}

void Channel::post_waiting() {
  if (!connected_ || failure_) return;
  std::vector<Request> batch;
  uint64_t room = static_cast<uint64_t>(send_room_) - outstanding();
  const auto add = [&](const Request& request) {
    batch.push_back(request);
    --room;
    if (batch.size() == kBatch) post(batch);
  };
  while (!failure_ && !waiting_.empty() && room > 0) {
    const Request& next = waiting_.front();
    if (next.signals && credits_ < 2) break;
    if (next.signals) least_credits_ = std::min(least_credits_, --credits_);
    add(next);
    waiting_.pop_front();
  }
  // post() returns owed credits with every signal. If this batch has no signal and half of the credits are owed, they
  // go in a signal of their own.
  const bool signals = std::any_of(batch.begin(), batch.end(), [](const Request& one) { return one.signals; });
  if (!failure_ && !signals && owed_ >= (shape_.slots + 1) / 2 && credits_ >= 1 && room > 0) {
    least_credits_ = std::min(least_credits_, --credits_);
    ++counts_.credit_signals;
    add({nullptr, 0, 0, 0, 0, kCreditsAlone, true, 0});
  }
  if (!failure_ && !batch.empty()) post(batch);
}

void Channel::post(std::vector<Request>& batch) {
  ibv_send_wr requests[kBatch];
  ibv_sge places[kBatch];
  std::memset(requests, 0, sizeof requests);
  const uint64_t first = posted_;
  for (size_t i = 0; i < batch.size(); ++i) {
    const Request& one = batch[i];
    ibv_send_wr& request = requests[i];
    const bool last = i + 1 == batch.size();
    const uint64_t place = posted_ % numbers_.size();
    const uint64_t before = posted_ > 0 ? numbers_[(posted_ - 1) % numbers_.size()] : 0;
    numbers_[place] = one.number ? one.number : before;
    request.wr_id = posted_++;
    request.next = last ? nullptr : &requests[i + 1];
    request.opcode = one.signals ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
    if (one.bytes > 0) {
      places[i] = {reinterpret_cast<uint64_t>(one.from), one.bytes, one.key};
      request.sg_list = &places[i];
      request.num_sge = 1;
      // The CPU copies what goes inline: slots, but no writes without a signal, which may come from GPU memory.
      if (one.signals && one.bytes <= pair_->most_inline()) request.send_flags |= IBV_SEND_INLINE;
    }
    if (one.signals) {
      const uint32_t returned = std::min(owed_, kMostReturned);
      owed_ -= returned;
      request.imm_data = htonl(one.value | returned << 24);
    }
    request.wr.rdma.remote_addr = one.to;
    request.wr.rdma.rkey = one.remote_key;
    if (last || ++since_asked_ >= kSignalEvery) {
      request.send_flags |= IBV_SEND_SIGNALED;
      since_asked_ = 0;
      ++counts_.asked;
    }
  }
  counts_.posted += batch.size();
  ++counts_.calls;
  batch.clear();
  ibv_send_wr* bad = nullptr;
  const int error = Verbs::post_send(pair_->get(), requests, &bad);
  if (error == 0) return;
  posted_ = bad ? bad->wr_id : first;  // the requests before `bad` were posted
  fail_locked(system_error("the NIC took no request for rank " + std::to_string(peer_), error < 0 ? errno : error,
                           "Destroy the process group on every rank (or restart the job) before going on.")
                  .at(rank_, "rdma write"));
}

void Channel::post_receives(uint32_t count) {
  while (count > 0 && !failure_) {
    ibv_recv_wr requests[kPoll];
    std::memset(requests, 0, sizeof requests);
    const uint32_t now = std::min<uint32_t>(count, kPoll);
    for (uint32_t i = 0; i < now; ++i) {
      requests[i].wr_id = kReceive;
      requests[i].next = i + 1 < now ? &requests[i + 1] : nullptr;
    }
    ibv_recv_wr* bad = nullptr;
    if (const int error = Verbs::post_recv(pair_->get(), requests, &bad)) {
      fail_locked(system_error("the NIC took no receive for rank " + std::to_string(peer_), error < 0 ? errno : error)
                      .at(rank_, "rdma receive"));
      return;
    }
    receives_ += now;
    count -= now;
  }
}

void Channel::take_one(const ibv_wc& completion) {
  const bool receive = (completion.wr_id & kReceive) != 0;
  if (receive) {
    --receives_;
  } else {
    completed_ = std::max(completed_, completion.wr_id + 1);
  }
  if (completion.status != IBV_WC_SUCCESS) {
    // Flushed requests only follow from the first failure, so they do not replace its error.
    const bool follows = failure_ && completion.status == IBV_WC_WR_FLUSH_ERR;
    if (!follows)
      fail_locked(error_of(completion, rank_, peer_, receive ? "receive" : "write", engine_->device()->port().device));
    return;
  }
  if (!receive) {
    done_number_ = std::max(done_number_, numbers_[completion.wr_id % numbers_.size()]);
    return;
  }
  const uint32_t word = ntohl(completion.imm_data);
  const uint32_t returned = word >> 24 & kMostReturned;
  if (completion.opcode != IBV_WC_RECV_RDMA_WITH_IMM || credits_ + returned > shape_.slots) {
    fail_locked(Error(ErrorKind::system,
                      "rank " + std::to_string(peer_) + " returned more credits than it had, or sent what is no signal",
                      ErrorContext{rank_, peer_, "rdma receive", 0, "Run the same ark_torch on all ranks."}));
    return;
  }
  credits_ += returned;
  if (word & kCreditsAlone) {
    ++owed_;
  } else {
    arrived_.push_back(word & kMostValue);
  }
}

void Channel::completions() {
  ibv_wc completions[kPoll];
  {
    const std::lock_guard lock(mutex_);
    while (true) {
      const int count = Verbs::poll_cq(queue_, kPoll, completions);
      if (count < 0)
        fail_locked(Error(ErrorKind::system, "the completion queue of rank " + std::to_string(peer_) + " failed",
                          ErrorContext{rank_, peer_, "rdma", 0, "See the kernel's log (dmesg) for the NIC."}));
      if (count <= 0) break;
      const uint32_t before = receives_;
      for (int i = 0; i < count; ++i) take_one(completions[i]);
      if (!failure_) post_receives(before - receives_);
    }
    post_waiting();
    something_.notify_all();
  }
  if (changed_) changed_();
}

void Channel::device_failed(const Error& error) {
  fail(error);
  if (changed_) changed_();
}

std::optional<uint32_t> Channel::take() {
  const std::lock_guard lock(mutex_);
  if (arrived_.empty()) return std::nullopt;
  const uint32_t value = arrived_.front();
  arrived_.pop_front();
  return value;
}

uint32_t Channel::wait(Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  const bool heard = something_.wait_until(lock, deadline, [this] { return !arrived_.empty() || failure_; });
  if (arrived_.empty() && failure_) throw *failure_;
  if (!heard)
    throw Error(ErrorKind::timeout, "rank " + std::to_string(peer_) + " sent no signal in time",
                ErrorContext{rank_, peer_, "rdma wait", 0, "Look at that rank's output."});
  const uint32_t value = arrived_.front();
  arrived_.pop_front();
  return value;
}

void Channel::release() {
  const std::lock_guard lock(mutex_);
  ++owed_;
  post_waiting();
}

bool Channel::done(uint64_t number) const {
  const std::lock_guard lock(mutex_);
  return done_number_ >= number;
}

void Channel::flush(Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  const uint64_t last = last_number_;
  const bool done = something_.wait_until(lock, deadline, [&] { return done_number_ >= last || failure_; });
  if (done_number_ >= last) return;
  if (failure_) throw *failure_;
  if (!done)
    throw Error(ErrorKind::timeout, "rank " + std::to_string(peer_) + " has not taken all that was put, in time",
                ErrorContext{rank_, peer_, "rdma flush", 0, "Look at that rank's output."});
}

std::optional<Error> Channel::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void Channel::fail(const Error& error) {
  const std::lock_guard lock(mutex_);
  fail_locked(error);
}

void Channel::fail_locked(const Error& error) {
  if (failure_) return;
  failure_ = error;
  if (pair_) pair_->fail();
  waiting_.clear();
  something_.notify_all();
}

bool Channel::drain(Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  return something_.wait_until(lock, deadline, [this] { return outstanding() == 0; });
}

Channel::Counts Channel::counts() const {
  const std::lock_guard lock(mutex_);
  Counts counts = counts_;
  counts.credits = credits_;
  counts.least_credits = least_credits_;
  return counts;
}

}  // namespace ark::rdma
