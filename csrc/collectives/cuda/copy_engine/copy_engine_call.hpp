// One collective of copy_engine.hpp while it is enqueued. Piece i of a message uses slot i % slots_, the words of that
// slot and worker i % kWorkers. Between two calls of step() the host only waits for full driver queues, and everything
// that a peer may wait for is enqueued. This rank enqueues a signal before it waits for the answer.
//
// In line, everything is on the caller's stream in the order of these calls. One hardware queue for all streams gives
// the same order, so other ranks need not be in line. It needs no joins and batches words between copies and kernels,
// which cuts driver calls by more than half.
#pragma once

#include "collectives/cuda/copy_engine/copy_engine.hpp"

namespace ark {

class CopyEngine::Call {
 public:
  Call(CopyEngine& engine, CUstream stream, uint64_t copies, bool in_line = false);  // `copies`: over the link
  void finish();
  bool in_line() const { return in_line_; }
  // Tells the senders that this rank has arrived; waits for the receivers. Bit r: rank r.
  void enter(MaybeOutputs outputs, uint32_t senders);
  void await_entered(MaybeOutputs outputs, uint32_t receivers);
  void await_entered_to_add(MaybeOutputs outputs, uint32_t receivers);  // if sums are fetched

  // Takes or passes the right to use a link. Only the next copy, if it comes before the next turn or step(), uses it.
  void take_turn(int link);
  void pass_turn(int link);

  void push_part(int owner, uint64_t piece, const void* from, uint64_t bytes);
  // `fetched`: the other ranks pull the sum.
  void add_up(uint64_t piece, const void* own, void* sum, uint64_t bytes, const Add& add, bool fetched = false);
  void fetch_sum(int owner, uint64_t piece, void* to, uint64_t bytes);
  void await_sum(uint64_t piece);  // on the link's stream
  // Sends a piece to its place in the receiver's memory, or to its slot if `place` is null; receives one.
  void send(int receiver, uint64_t piece, void* place, const void* from, uint64_t bytes);
  void receive(int sender, uint64_t piece, void* to, uint64_t bytes, bool straight);
  // Receives a piece and sends it on.
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

  void over_link(void* to, const void* from, uint64_t bytes);  // after the pending waits; later signals follow it
  void tell_turn(StreamWords& words);
  // Enqueues the words in `earlier` before any that are added to `later`.
  static void order(StreamWords& earlier, StreamWords& later) {
    if (&earlier != &later) earlier.enqueue();
  }

  CopyEngine& engine_;
  const CUstream stream_;
  const bool captured_, in_line_;
  const CUstream link_, awaiting_, telling_;  // equal to link_ if there are few copies
  bool expecting_ = false;
  int passing_ = -1;                // link whose turn must be passed on, or -1
  std::vector<StreamWords> words_;  // for the two streams and the workers; in line there is only one
  StreamWords &awaits_, &tells_;
};

}  // namespace ark
