// A meeting at which the ranks of a node share memory, in steps that succeed on all ranks or fail on all ranks.
//
// join() is collective and connects the ranks through the store (bootstrap.hpp): a socket and a page of shared memory
// per pair, kept for the meeting's life. All ranks take the same steps. A step runs a body on every rank. Afterwards
// all ranks can read the cards that bodies filled; peers take descriptors within the same step. If one body fails, all
// ranks get its error.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "shm/bootstrap.hpp"

namespace ark {

// Memory ordering: a rank fills its card and then advances its stage (release), which readers acquire. There are two
// cards in turn: a card is rewritten only after a step in between, which every peer has ended, so it has read the card.
// Stages only grow.
class MemoryMeeting {
 public:
  struct Options {
    int rank = 0;
    int size = 1;
    std::chrono::milliseconds timeout{0};  // of join() and of each step
    std::string name;                      // of this meeting in the group; part of its keys in the store
    std::function<void()> check;           // called between waits; throws what ends the group
  };

  // Returns null, and sets `why`, if the ranks share no memory.
  static std::unique_ptr<MemoryMeeting> join(KeyValueStore& store, const Options& options, std::string& why);

  // If a body throws Error(system), returns false and sets `why` on every rank. Any other error of a body is thrown on
  // every rank. After an error of the meeting itself (a rank is late or lost) no more steps are possible.
  bool step(const std::function<void()>& body, std::string& why);
  // The same, but throws Error(system) on all ranks too.
  void step(const std::function<void()>& body);

  // In a body: this rank's zeroed card, and any rank's card of the previous step. Between steps: any rank's last card.
  template <class Card>
  Card& own_card() {
    static_assert(sizeof(Card) <= kCardBytes && alignof(Card) <= 8);
    return *reinterpret_cast<Card*>(card(options_.rank, stage_));
  }
  template <class Card>
  const Card& card_of(int rank) {
    static_assert(sizeof(Card) <= kCardBytes && alignof(Card) <= 8);
    return *reinterpret_cast<const Card*>(card(rank, ended_));
  }

  // In a body: hands a descriptor to a peer, which takes it in the same step.
  void give(int peer, const UniqueFd& fd);
  UniqueFd take(int peer);

  void set_timeout(std::chrono::milliseconds timeout) { options_.timeout = timeout; }
  bool over() const { return over_; }  // no more steps are possible
  int rank() const { return options_.rank; }
  int size() const { return options_.size; }

 private:
  static constexpr size_t kCardBytes = 128;
  struct Slot;
  struct Page;
  MemoryMeeting(const Options& options, Neighbourhood hood);
  Page& page(int rank) const;
  Slot& slot(int rank, uint32_t stage) const;
  void* card(int rank, uint32_t stage) const;
  void await_all();
  void pause(int peer);
  void check_there(int peer) const;
  std::string told_by(int peer, const Slot& slot) const;

  Options options_;
  Neighbourhood hood_;
  uint32_t stage_ = 0;  // of the running or last step
  uint32_t ended_ = 0;  // of the last step that ended
  std::chrono::steady_clock::time_point deadline_{};
  bool over_ = false;
};

}  // namespace ark
