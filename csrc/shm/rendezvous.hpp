// The part of the bootstrap that goes through the store: one nonce for all, a record of each, an outcome of each.
//
// A store can outlive a group: torchrun's static rendezvous keeps one TCPStore over elastic restarts and gives the new
// workers the same prefix (its dynamic rendezvous sometimes does), so any key may hold what an earlier start wrote.
// Only find and set are needed to be safe from that:
//   - every rank sets a random token under its own key;
//   - rank 0 reads all tokens, makes the nonce and offers both; a rank accepts an offer only if its own fresh token
//     is in it, and otherwise waits for another. So nobody accepts an offer made before it started.
//   - records and outcomes live under keys that contain the nonce, which nobody could have written earlier. A rank
//     whose stale token rank 0 saw does not accept, so its record stays away; rank 0 notices while it waits for that
//     record, reads the tokens again and offers the same nonce with the new ones.
// Rank 0 reads all tokens and records at once and publishes the records as one value, so that another rank asks the
// store a fixed number of times, however many ranks there are. Where that value stays away, rank 0 may have died:
// a rank then reads the records one by one.
// What must hold is that no process of the earlier start is still writing; torchrun ends all before it starts anew.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "shm/handle.hpp"
#include "shm/hello_message.hpp"
#include "shm/key_value.hpp"

namespace ark {

class Rendezvous {
 public:
  using Clock = std::chrono::steady_clock;
  using Milliseconds = std::chrono::milliseconds;

  Rendezvous(KeyValueStore& store, int rank, int size, Milliseconds timeout, std::function<bool()> interrupted);

  // Throws Error(timeout) naming the ranks that did not come. Afterwards nonce() is valid.
  void agree();
  const Bytes16& nonce() const { return nonce_; }

  // Of this rank.
  void publish(const HandleRecord& record);
  // Only the first call has an effect: an outcome is final.
  void publish(OutcomeMessage::Kind kind, int peer, const std::string& text, ErrorKind error = ErrorKind::system);

  // Everyone's, by rank. Error(timeout) names the missing; Error(mismatch) a rank that believes in another group.
  std::vector<HandleRecord> records();

  // Waits at most `patience`; nothing when the rank has not spoken by then.
  std::optional<OutcomeMessage> outcome(int rank, Milliseconds patience);

  Clock::time_point deadline() const { return deadline_; }

  // For every wait: Error(aborted) when interrupted, and once in a while looks whether another rank has given up or
  // lost somebody, which is then raised here too.
  void check();
  // Raises what another rank reported; does nothing for connected and apart.
  void raise_failure(const OutcomeMessage& outcome) const;
  [[noreturn]] void raise_lost(int peer) const;
  [[noreturn]] void raise_timeout(const std::string& stage, const std::vector<int>& missing) const;

 private:
  template <typename Find>
  auto poll(Milliseconds patience, Find find) -> decltype(find());
  std::optional<std::vector<uint8_t>> try_get(const std::string& key, Milliseconds patience);
  std::optional<Bytes16> try_token(int rank, Milliseconds patience);
  void collect_tokens();
  void accept_offer();
  void check_interrupted() const;
  std::optional<std::vector<HandleRecord>> records_of_rank_0();
  std::vector<std::vector<uint8_t>> every_record();
  HandleRecord checked(std::span<const uint8_t> bytes, int rank) const;
  bool refresh_tokens(const std::vector<int>& suspects);
  std::string prefix(const char* kind) const;
  std::string key(const char* kind, int rank) const;
  std::vector<std::string> keys(const std::string& prefix) const;  // of all ranks

  KeyValueStore& store_;
  const int rank_;
  const int size_;
  const Milliseconds timeout_;
  const Clock::time_point began_;
  const Clock::time_point deadline_;
  const std::function<bool()> interrupted_;
  Bytes16 token_{};
  std::vector<Bytes16> tokens_;  // rank 0: as offered
  Bytes16 nonce_{};
  bool outcome_published_ = false;
  Clock::time_point next_look_{};
};

// "rank 3", "ranks 1, 4 and 7".
std::string name_ranks(const std::vector<int>& ranks);

}  // namespace ark
