// One collective of copy_engine.hpp while it is enqueued. What belongs to piece i of a message lies in slot i % slots_,
// has the words of that slot and is handled by worker i % kWorkers. Between two calls of step() the host waits for
// nothing but full queues of the driver; what a peer may wait for is enqueued by then. On one stream or another, what
// this rank tells is enqueued before it awaits what answers it (copy_engine.hpp: one queue).
//
// In line: all of it is on the caller's stream, in the order of these calls, which is what one queue for all streams
// makes of them anyway, so that it does not matter what the other ranks do. Nothing is to be joined, and words gather
// from one copy or kernel to the next: an all_reduce of two ranks in two pieces is 13 calls of the driver instead
// of 32.
#pragma once

#include "collectives/cuda/copy_engine/copy_engine.hpp"

namespace ark {

class CopyEngine::Call {
 public:
  Call(CopyEngine& engine, CUstream stream, uint64_t copies, bool in_line = false);  // so many over the link
  void finish();
  bool in_line() const { return in_line_; }
  // Tells those who send to this rank that it has come; awaits those to whom it sends. Bit r: rank r.
  void enter(MaybeOutputs outputs, uint32_t senders);
  void await_entered(MaybeOutputs outputs, uint32_t receivers);
  void await_entered_to_add(MaybeOutputs outputs, uint32_t receivers);  // where sums are fetched

  // To use a link, and that only the next copy does, if one comes before the next turn or step().
  void take_turn(int link);
  void pass_turn(int link);

  void push_part(int owner, uint64_t piece, const void* from, uint64_t bytes);
  // `fetched`: the others come for the sum.
  void add_up(uint64_t piece, const void* own, void* sum, uint64_t bytes, const Add& add, bool fetched = false);
  void fetch_sum(int owner, uint64_t piece, void* to, uint64_t bytes);
  void await_sum(uint64_t piece);  // on the link's stream
  // A piece of a message, to its place in the receiver's memory or, where that is null, its slot; and receiving it.
  void send(int receiver, uint64_t piece, void* place, const void* from, uint64_t bytes);
  void receive(int sender, uint64_t piece, void* to, uint64_t bytes, bool straight);
  // Receives it and sends it on.
  void forward(int sender, uint64_t piece, void* to, uint64_t bytes, bool straight, int next, void* place);
  void copy_own(void* to, const void* from, uint64_t bytes);
  void step();

 private:
  CUstream worker(uint64_t piece) const { return in_line_ ? stream_ : engine_.work_[piece % kWorkers]; }
  StreamWords& words_of(uint64_t piece) { return in_line_ ? awaits_ : words_[2 + piece % kWorkers]; }  // its worker's
  template <class Do>
  void for_each(uint32_t ranks, const Do& what) const {
    for (int r = 0; r < engine_.size_; ++r)
      if (r != engine_.rank_ && (ranks >> r & 1) != 0) what(r);
  }

  void over_link(void* to, const void* from, uint64_t bytes);  // behind what is awaited; what is told next follows
  void tell_turn(StreamWords& words);
  // What is in `earlier` is enqueued before anything that gathers in `later`.
  static void order(StreamWords& earlier, StreamWords& later) {
    if (&earlier != &later) earlier.enqueue();
  }

  CopyEngine& engine_;
  const CUstream stream_;
  const bool captured_, in_line_;
  const CUstream link_, awaiting_, telling_;  // the link's own where there are few copies
  bool expecting_ = false;
  int passing_ = -1;                // whose turn is to be told
  std::vector<StreamWords> words_;  // of those two streams and of the workers'; in line the one of all
  StreamWords &awaits_, &tells_;
};

}  // namespace ark
