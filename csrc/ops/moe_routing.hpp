// Where each choice of a token for an expert goes, computed from all ranks' counts per expert. It uses no tensors;
// tested by tests/csrc/kernels/moe_routing_test.cpp.
//
// Experts are spread evenly: rank r has experts r * local to (r + 1) * local - 1. On their rank, rows are ordered by
// expert, then by source rank, then by token and choice. Slots of a rank's own choices are ordered by expert, then
// token and choice. Rows travel in slot order in both directions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace ark::ops {

class MoeRouting {
 public:
  // counts[r * experts + e]: choices of rank r's tokens for expert e. `experts` is a multiple of `ranks`.
  MoeRouting(int ranks, int64_t experts, std::vector<int64_t> counts)
      : ranks_(ranks),
        experts_(experts),
        local_(experts / ranks),
        counts_(std::move(counts)),
        first_row_(counts_.size()),
        first_slot_(static_cast<size_t>(ranks * (experts + 1))),
        rows_(static_cast<size_t>(ranks)) {
    for (int64_t e = 0; e < experts_; ++e) {
      int64_t& rows = rows_[static_cast<size_t>(owner(e))];
      for (int r = 0; r < ranks_; ++r) first_row_[at(r, e)] = rows, rows += counts_[at(r, e)];
    }
    for (int r = 0; r < ranks_; ++r) {
      int64_t slot = 0;
      for (int64_t e = 0; e < experts_; ++e) first_slot_[slot_at(r, e)] = slot, slot += counts_[at(r, e)];
      first_slot_[slot_at(r, experts_)] = slot;
    }
  }

  int ranks() const { return ranks_; }
  int64_t experts() const { return experts_; }
  int64_t local() const { return local_; }  // experts per rank
  int owner(int64_t expert) const { return static_cast<int>(expert / local_); }
  int64_t count(int rank, int64_t expert) const { return counts_[at(rank, expert)]; }
  int64_t rows(int rank) const { return rows_[static_cast<size_t>(rank)]; }  // that it receives from all ranks
  int64_t choices(int rank) const { return first_slot(rank, experts_); }     // that go to an expert
  int64_t sent(int from, int to) const { return first_slot_of(from, to + 1) - first_slot_of(from, to); }
  // On the expert's rank: the first row from rank `source`.
  int64_t first_row(int source, int64_t expert) const { return first_row_[at(source, expert)]; }
  int64_t first_slot(int rank, int64_t expert) const { return first_slot_[slot_at(rank, expert)]; }
  int64_t first_slot_of(int rank, int owner) const { return first_slot(rank, owner * local_); }

  // On rank `owner`: its rows from rank `source`, in that rank's slot order.
  std::vector<int64_t> rows_of(int source, int owner) const {
    std::vector<int64_t> rows;
    rows.reserve(static_cast<size_t>(sent(source, owner)));
    for (int64_t e = owner * local_; e < (owner + 1) * local_; ++e)
      for (int64_t i = 0; i < count(source, e); ++i) rows.push_back(first_row(source, e) + i);
    return rows;
  }

  // For every choice of this rank's tokens: its row on the expert's rank, and its slot; -1 if it goes nowhere.
  template <class I, class O>
  void place(int rank, const I* experts, int64_t choices, O* row, O* slot) const {
    std::vector<int64_t> before(static_cast<size_t>(experts_));
    for (int64_t i = 0; i < choices; ++i) {
      const int64_t e = experts[i];
      if (e < 0) {
        row[i] = slot[i] = -1;
        continue;
      }
      const int64_t number = before[static_cast<size_t>(e)]++;
      row[i] = static_cast<O>(first_row(rank, e) + number);
      slot[i] = static_cast<O>(first_slot(rank, e) + number);
    }
  }

 private:
  size_t at(int rank, int64_t expert) const { return static_cast<size_t>(rank * experts_ + expert); }
  size_t slot_at(int rank, int64_t expert) const { return static_cast<size_t>(rank * (experts_ + 1) + expert); }

  int ranks_;
  int64_t experts_, local_;
  std::vector<int64_t> counts_, first_row_, first_slot_, rows_;
};

}  // namespace ark::ops
