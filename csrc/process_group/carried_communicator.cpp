// Collectives made of another backend's messages and ark's own arithmetic.
#include "process_group/carried_communicator.hpp"

#include <algorithm>
#include <cstring>

#include "collectives/agreement.hpp"
#include "collectives/reduce.hpp"
#include "error.hpp"

namespace ark {

namespace {

// Up to so many bytes from all ranks, each gets the tensors whole, in one hop, and adds them up itself.
constexpr size_t kWhole = 64 << 10;
constexpr size_t kLeastChunk = 256 << 10, kMostChunk = 1 << 20, kChunks = 4;
constexpr size_t kAhead = 3;  // chunks on their way while one is added up

// A tensor in nearly equal parts, one a rank.
struct Parts {
  Parts(const void* in, size_t count, size_t element, int ranks)
      : each((count + ranks - 1) / ranks), count(count), element(element) {
    for (int r = 0; r < ranks; ++r) {
      counts.push_back(r * each < count ? std::min(each, count - r * each) : 0);
      ins.push_back(at_offset(in, begins(r)));
    }
  }
  size_t begins(int rank) const { return std::min(rank * each, count) * element; }  // bytes

  size_t each, count, element;
  std::vector<size_t> counts;  // elements
  std::vector<const void*> ins;
};

void copy(void* to, const void* from, size_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

}  // namespace

CarriedCommunicator::CarriedCommunicator(int rank, int size, c10::intrusive_ptr<c10d::Backend> carrier,
                                         const std::vector<int>& nodes)
    : Communicator(rank, size), carrier_(std::move(carrier)), line_(is_line(nodes)), first_(size), sent_(size) {}

// abort() reaches the messages of the operation that runs, and of each that begins later.
struct CarriedCommunicator::Current {
  Current(CarriedCommunicator& communicator, CarriedMessages& messages) : of(communicator) {
    const std::lock_guard lock(of.mutex_);
    of.now_ = &messages;
    if (of.aborted_) messages.abort();
  }
  ~Current() {
    const std::lock_guard lock(of.mutex_);
    of.now_ = nullptr;
  }
  CarriedCommunicator& of;
};

void CarriedCommunicator::abort() {
  const std::lock_guard lock(mutex_);
  aborted_ = true;
  if (now_) now_->abort();
}

// Whatever the carrier throws becomes an error of this group, with the operation and a remedy.
template <class Body>
void CarriedCommunicator::guarded(const Operation& operation, Body&& body) {
  try {
    CarriedMessages messages(*carrier_, operation);
    const Current current(*this, messages);
    body(messages);
    messages.wait_for_all();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    const bool late = Clock::now() >= operation.context.deadline;
    throw Error(late ? ErrorKind::timeout : ErrorKind::peer_lost,
                carrier_->getBackendName() + ", which carries this group, failed: " + error.what(),
                ErrorContext{rank_, -1, operation.context.name, operation.context.sequence,
                             "Look at the other ranks' output; destroy the process group (or restart the job) before "
                             "going on."});
  }
}

void CarriedCommunicator::meet(CarriedMessages& messages, const Operation& operation, const void* const* for_rank,
                               size_t bytes, const Bytes* promised) {
  for (int peer = 0; peer < size_; ++peer) {
    First& to = sent_[peer];
    to.descriptor = operation.descriptor;
    to.factor = operation.factor;
    to.bytes = promised ? promised[peer].size : 0;
    if (promised && to.bytes <= First::kRoom) copy(to.data, promised[peer].data, to.bytes);
    if (for_rank && for_rank[peer]) copy(to.data, for_rank[peer], bytes);
    if (peer == rank_) {
      first_[peer] = to;
      continue;
    }
    messages.receive(peer, MessageChannel::agreement, &first_[peer], sizeof(First));
    messages.send(peer, MessageChannel::agreement, &to, sizeof(First));
  }
  messages.wait_for_all();
  for (int peer = 0; peer < size_; ++peer)
    if (const auto error = disagreement(operation, first_[peer].descriptor, rank_, peer)) throw *error;
}

void CarriedCommunicator::add(const Operation& operation, void* out, const void* const* sources, int ranks,
                              size_t count) const {
  std::vector<double> factors;
  for (const First& first : first_) factors.push_back(first.factor);
  const bool scaled = operation.descriptor.op == ReduceOp::premul_sum;
  find_reduce(operation.descriptor.dtype, operation.descriptor.op)(out, nullptr, sources, ranks, count,
                                                                   scaled ? factors.data() : nullptr);
}

size_t CarriedCommunicator::chunk_of(const Operation& operation, size_t count) const {
  const size_t element = size_of(operation.descriptor.dtype);
  return std::max<size_t>(1, std::clamp(count * element / kChunks, kLeastChunk, kMostChunk) / element);
}

template <class Added>
void CarriedCommunicator::reduce_parts(CarriedMessages& messages, const Operation& operation, const void* const* ins,
                                       const std::vector<size_t>& counts, void* part, Added&& added) {
  const size_t element = size_of(operation.descriptor.dtype);
  const size_t most = *std::max_element(counts.begin(), counts.end());
  const size_t chunk = chunk_of(operation, most), chunks = (most + chunk - 1) / chunk;
  const auto elements = [&](int rank, size_t k) {
    return k * chunk < counts[rank] ? std::min(chunk, counts[rank] - k * chunk) : 0;
  };
  scratch_.resize(std::max(scratch_.size(), std::min(kAhead, chunks) * size_ * chunk * element));
  const auto slot = [&](size_t k, int peer) { return scratch_.data() + (k % kAhead * size_ + peer) * chunk * element; };
  std::vector<size_t> waited_for(kAhead * size_);
  const auto post = [&](size_t k) {
    for (int step = 1; step < size_ && k < chunks; ++step) {  // not all ranks to the same one at the same time
      const int to = (rank_ + step) % size_, from = (rank_ + size_ - step) % size_;
      messages.send(to, MessageChannel::data, at_offset(ins[to], k * chunk * element), elements(to, k) * element);
      waited_for[k % kAhead * size_ + from] =
          messages.receive(from, MessageChannel::data, slot(k, from), elements(rank_, k) * element);
    }
  };
  for (size_t k = 0; k < kAhead; ++k) post(k);
  std::vector<const void*> sources(size_);
  for (size_t k = 0; k < chunks; ++k) {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) messages.wait_for(waited_for[k % kAhead * size_ + peer]);
      sources[peer] = peer == rank_ ? at_offset(ins[rank_], k * chunk * element) : slot(k, peer);
    }
    if (const size_t count = elements(rank_, k)) {
      add(operation, at_offset(part, k * chunk * element), sources.data(), size_, count);
    }
    added(k * chunk * element, [&](int rank) { return elements(rank, k) * element; });
    post(k + kAhead);
  }
}

// What all ranks have sent whole.
void CarriedCommunicator::reduce_small(const Operation& operation, const void* own, void* out, size_t count) {
  const size_t bytes = count * size_of(operation.descriptor.dtype);
  std::vector<const void*> sources(size_);
  for (int peer = 0; peer < size_; ++peer) {
    const bool with_first = bytes <= First::kRoom;
    sources[peer] = peer == rank_ ? own : with_first ? came_from(peer) : scratch_.data() + peer * bytes;
  }
  add(operation, out, sources.data(), size_, count);
}

void CarriedCommunicator::all_reduce(const Operation& operation, const void* in, void* out, size_t count) {
  const size_t element = size_of(operation.descriptor.dtype), bytes = count * element;
  guarded(operation, [&](CarriedMessages& messages) {
    const std::vector<const void*> whole(size_, in);
    if (bytes <= First::kRoom) {
      meet(messages, operation, whole.data(), bytes);
      if (count > 0) reduce_small(operation, in, out, count);
      return;
    }
    meet(messages, operation, nullptr, 0);
    if (bytes * size_ <= kWhole) {
      scratch_.resize(std::max(scratch_.size(), bytes * size_));
      for (int peer = 0; peer < size_; ++peer) {
        if (peer == rank_) continue;
        messages.receive(peer, MessageChannel::data, scratch_.data() + peer * bytes, bytes);
        messages.send(peer, MessageChannel::data, in, bytes);
      }
      messages.wait_for_all();
      reduce_small(operation, in, out, count);
      return;
    }
    if (line_ && adds_in_line(operation.descriptor)) return reduce_in_line(messages, operation, in, out, count);
    const Parts parts(in, count, element, size_);
    const auto part_of = [&](int rank) { return at_offset(out, parts.begins(rank)); };
    reduce_parts(messages, operation, parts.ins.data(), parts.counts, part_of(rank_),
                 [&](size_t offset, auto&& bytes_of) {
                   for (int step = 1; step < size_; ++step) {
                     const int to = (rank_ + step) % size_, from = (rank_ + size_ - step) % size_;
                     messages.send(to, MessageChannel::results, part_of(rank_) + offset, bytes_of(rank_));
                     messages.receive(from, MessageChannel::results, part_of(from) + offset, bytes_of(from));
                   }
                 });
  });
}

void CarriedCommunicator::reduce(const Operation& operation, const void* in, void* out, size_t count) {
  const size_t element = size_of(operation.descriptor.dtype), bytes = count * element;
  const int root = operation.descriptor.root;
  guarded(operation, [&](CarriedMessages& messages) {
    if (bytes <= First::kRoom) {
      std::vector<const void*> to_root(size_, nullptr);
      to_root[root] = in;
      meet(messages, operation, to_root.data(), bytes);
      if (rank_ == root && count > 0) reduce_small(operation, in, out, count);
      return;
    }
    meet(messages, operation, nullptr, 0);
    const Parts parts(in, count, element, size_);
    std::vector<std::byte> own(rank_ == root ? 0 : parts.counts[rank_] * element);
    void* part = rank_ == root ? at_offset(out, parts.begins(root)) : own.data();
    reduce_parts(messages, operation, parts.ins.data(), parts.counts, part, [&](size_t offset, auto&& bytes_of) {
      if (rank_ != root) return messages.send(root, MessageChannel::results, at_offset(part, offset), bytes_of(rank_));
      for (int from = 0; from < size_; ++from) {
        if (from == root) continue;
        messages.receive(from, MessageChannel::results, at_offset(out, parts.begins(from) + offset), bytes_of(from));
      }
    });
    messages.wait_for_all();  // `own` ends
  });
}

void CarriedCommunicator::reduce_scatter(const Operation& operation, const void* const* ins, void* out, size_t count) {
  const size_t bytes = count * size_of(operation.descriptor.dtype);
  guarded(operation, [&](CarriedMessages& messages) {
    if (bytes <= First::kRoom) {
      meet(messages, operation, ins, bytes);
      if (count > 0) reduce_small(operation, ins[rank_], out, count);
      return;
    }
    meet(messages, operation, nullptr, 0);
    reduce_parts(messages, operation, ins, std::vector<size_t>(size_, count), out, [](size_t, auto&&) {});
  });
}

void CarriedCommunicator::all_gather(const Operation& operation, const void* in, void* const* outs, size_t bytes) {
  guarded(operation, [&](CarriedMessages& messages) {
    const bool with_first = bytes <= First::kRoom;
    const std::vector<const void*> whole(size_, in);
    meet(messages, operation, with_first ? whole.data() : nullptr, bytes);
    copy(outs[rank_], in, bytes);
    if (line_ && bytes * size_ > kWhole) return gather_in_line(messages, in, outs, bytes);
    for (int step = 1; step < size_; ++step) {
      const int to = (rank_ + step) % size_, from = (rank_ + size_ - step) % size_;
      if (with_first) {
        copy(outs[from], came_from(from), bytes);
        continue;
      }
      messages.receive(from, MessageChannel::data, outs[from], bytes);
      messages.send(to, MessageChannel::data, in, bytes);
    }
  });
}

void CarriedCommunicator::broadcast(const Operation& operation, void* data, size_t bytes) {
  const int root = operation.descriptor.root;
  guarded(operation, [&](CarriedMessages& messages) {
    const bool with_first = bytes <= First::kRoom;
    const std::vector<const void*> whole(size_, data);
    meet(messages, operation, with_first && rank_ == root ? whole.data() : nullptr, bytes);
    if (with_first) return copy(data, rank_ == root ? data : came_from(root), bytes);
    if (size_ == 2) {
      if (rank_ == root) return messages.send(1 - root, MessageChannel::data, data, bytes);
      messages.receive(root, MessageChannel::data, data, bytes);
      return;
    }
    c10d::BroadcastOptions options;  // a tree of the carrier's
    if (operation.context.timeout.count() > 0) options.timeout = operation.context.timeout;
    options.rootRank = root;
    std::vector<at::Tensor> tensors{
        at::from_blob(data, {static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte))};
    carrier_->broadcast(tensors, options)->wait();
  });
}

void CarriedCommunicator::gather(const Operation& operation, const void* in, void* const* outs, size_t bytes) {
  const int root = operation.descriptor.root;
  guarded(operation, [&](CarriedMessages& messages) {
    const bool with_first = bytes <= First::kRoom;
    std::vector<const void*> to_root(size_, nullptr);
    to_root[root] = in;
    meet(messages, operation, with_first ? to_root.data() : nullptr, bytes);
    if (rank_ != root) {
      if (!with_first) messages.send(root, MessageChannel::data, in, bytes);
      return;
    }
    for (int from = 0; from < size_; ++from) {
      if (from == root || with_first) {
        copy(outs[from], from == root ? in : came_from(from), bytes);
      } else {
        messages.receive(from, MessageChannel::data, outs[from], bytes);
      }
    }
  });
}

void CarriedCommunicator::scatter(const Operation& operation, const void* const* ins, void* out, size_t bytes) {
  const int root = operation.descriptor.root;
  guarded(operation, [&](CarriedMessages& messages) {
    const bool with_first = bytes <= First::kRoom;
    meet(messages, operation, with_first && rank_ == root ? ins : nullptr, bytes);
    if (rank_ == root) {
      copy(out, ins[root], bytes);
      for (int to = 0; to < size_ && !with_first; ++to)
        if (to != root) messages.send(to, MessageChannel::data, ins[to], bytes);
    } else if (with_first) {
      copy(out, came_from(root), bytes);
    } else {
      messages.receive(root, MessageChannel::data, out, bytes);
    }
  });
}

// Sizes come with the first messages: what the peers send must be what this rank expects, and the carrier would not
// say.
void CarriedCommunicator::all_to_all(const Operation& operation, const Bytes* ins, const MutableBytes* outs) {
  guarded(operation, [&](CarriedMessages& messages) {
    meet(messages, operation, nullptr, 0, ins);
    for (int peer = 0; peer < size_; ++peer) {
      if (const auto error = broken_promise(operation, rank_, peer, rank_, first_[peer].bytes, outs[peer].size))
        throw *error;
    }
    for (int step = 1; step < size_; ++step) {
      const int to = (rank_ + step) % size_, from = (rank_ + size_ - step) % size_;
      if (outs[from].size <= First::kRoom) {
        copy(outs[from].data, came_from(from), outs[from].size);
      } else {
        messages.receive(from, MessageChannel::data, outs[from].data, outs[from].size);
      }
      if (ins[to].size > First::kRoom) messages.send(to, MessageChannel::data, ins[to].data, ins[to].size);
    }
    copy(outs[rank_].data, ins[rank_].data, ins[rank_].size);
  });
}

// All ranks have met.
void CarriedCommunicator::barrier(const Operation& operation) {
  guarded(operation, [&](CarriedMessages& messages) { meet(messages, operation, nullptr, 0); });
}

}  // namespace ark
