// Where the ranks of a node meet to share memory: in steps, each of which succeeds on all ranks or fails on all alike.
//
// join() is collective and meets the ranks once more through the store (bootstrap.hpp): a socket and a page of shared
// memory for every pair, kept as long as the meeting lives. A step runs a body on every rank; what it writes into its
// card is read by all ranks afterwards, and descriptors that it gives to peers are taken by bodies of the same step.
// What fails in one rank's body is an answer that all ranks get, with its words. All ranks take the same steps.
//
// Ordering. A rank fills its card, then its stage grows (release); readers acquire the stage. Two cards take turns: one
// is written again only after a step in between, which every peer has ended and so has read the card. Stages only grow.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "shm/bootstrap.hpp"

namespace ark {

class MemoryMeeting {
 public:
  struct Options {
    int rank = 0;
    int size = 1;
    std::chrono::milliseconds timeout{0};  // of join() and of each step
    std::string name;                      // of this meeting in the group; part of its keys in the store
    std::function<void()> check;           // between waits; throws what ends the group
  };

  // Null, and `why`, where the ranks share no memory.
  static std::unique_ptr<MemoryMeeting> join(KeyValueStore& store, const Options& options, std::string& why);

  // Throws on every rank what any rank's body threw, but for Error(system): then false, and `why`, on every rank. After
  // an error of the meeting itself (a rank that does not come, or is lost) there are no more steps.
  bool step(const std::function<void()>& body, std::string& why);
  // The same where Error(system) is thrown on all ranks too.
  void step(const std::function<void()>& body);

  // In a body: this rank's card, zeroed, and any rank's of the step before. Between steps: any rank's of the last one.
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
  bool over() const { return over_; }  // there are no more steps
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
  uint32_t stage_ = 0;  // of the step that runs or ran last
  uint32_t ended_ = 0;  // of the step that ended last
  std::chrono::steady_clock::time_point deadline_{};
  bool over_ = false;
};

}  // namespace ark
