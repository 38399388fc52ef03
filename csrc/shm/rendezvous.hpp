// The part of the bootstrap that goes through the store: one nonce for all, then a record and an outcome of each rank.
//
// A store can outlive a group: torchrun keeps one TCPStore over elastic restarts and may reuse the prefix, so any key
// may hold a value of an earlier start. No process of the earlier start may still be writing; torchrun ensures that.
// Rank 0 reads all tokens and records and publishes the records as one value. So other ranks make a fixed number of
// requests. If that value is missing, rank 0 may have died, and a rank reads the records one by one.
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

// Protection against old values needs only find and set:
//   - Every rank sets a random token under its own key.
//   - Rank 0 reads all tokens, creates the nonce and offers both. A rank accepts an offer only if it contains the
//   rank's
//     fresh token, so no rank accepts an offer from before its start.
//   - Records and outcomes use keys that contain the nonce, which cannot exist earlier. If rank 0 saw a stale token,
//   that
//     rank does not accept and its record is missing. Rank 0 then reads the tokens again and repeats the offer.
class Rendezvous {
 public:
  using Clock = std::chrono::steady_clock;
  using Milliseconds = std::chrono::milliseconds;

  Rendezvous(KeyValueStore& store, int rank, int size, Milliseconds timeout, std::function<bool()> interrupted);

  // Throws Error(timeout) that names missing ranks. Afterwards nonce() is valid.
  void agree();
  const Bytes16& nonce() const { return nonce_; }

  // Publishes this rank's record.
  void publish(const HandleRecord& record);
  // Only the first call has an effect, because an outcome is final.
  void publish(OutcomeMessage::Kind kind, int peer, const std::string& text, ErrorKind error = ErrorKind::system);

  // All records, by rank. Error(timeout) names missing ranks; Error(mismatch) names a rank of another group.
  std::vector<HandleRecord> records();

  // Waits at most `patience` and returns nothing if the rank has published no outcome by then.
  std::optional<OutcomeMessage> outcome(int rank, Milliseconds patience);

  Clock::time_point deadline() const { return deadline_; }

  // Called in every wait. Throws Error(aborted) if interrupted. At times it checks whether another rank has given up or
  // lost a peer, and throws that here too.
  void check();
  // Throws what another rank reported; does nothing for connected and apart.
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
  std::vector<Bytes16> tokens_;  // on rank 0: as offered
  Bytes16 nonce_{};
  bool outcome_published_ = false;
  Clock::time_point next_look_{};
};

// For example "rank 3" or "ranks 1, 4 and 7".
std::string name_ranks(const std::vector<int>& ranks);

}  // namespace ark
