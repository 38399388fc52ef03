// Waits on the store in slices, to notice interruption, the deadline and errors of other ranks.
#include "shm/rendezvous.hpp"

#include <algorithm>
#include <thread>

#include "util/error.hpp"
#include "util/identity.hpp"

namespace ark {

namespace {

constexpr char kToken[] = "memory/token/";

using Milliseconds = Rendezvous::Milliseconds;

constexpr Milliseconds kFirstSlice{20};
constexpr Milliseconds kLongestSlice{200};
constexpr Milliseconds kAlone{500};  // after this a rank no longer relies on rank 0
constexpr Milliseconds kProbe{0};    // for a key that either exists or does not
constexpr std::chrono::microseconds kShortestPause{100};
constexpr Milliseconds kLongestPause{20};

Milliseconds longer(Milliseconds slice) {
  return std::min(slice * 2, kLongestSlice);
}

}  // namespace

std::string name_ranks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

Rendezvous::Rendezvous(KeyValueStore& store, int rank, int size, Milliseconds timeout,
                       std::function<bool()> interrupted)
    : store_(store),
      rank_(rank),
      size_(size),
      timeout_(timeout),
      // An unlimited timeout must not overflow the clock.
      began_(Clock::now()),
      deadline_(began_ + std::min<Milliseconds>(timeout, std::chrono::hours(24 * 365))),
      interrupted_(std::move(interrupted)) {}

std::string Rendezvous::prefix(const char* kind) const {
  return std::string("memory/") + kind + "/" + to_hex(nonce_) + "/";
}

std::string Rendezvous::key(const char* kind, int rank) const {
  return prefix(kind) + std::to_string(rank);
}

std::vector<std::string> Rendezvous::keys(const std::string& prefix) const {
  std::vector<std::string> all;
  for (int r = 0; r < size_; ++r) all.push_back(prefix + std::to_string(r));
  return all;
}

void Rendezvous::check_interrupted() const {
  if (!interrupted_ || !interrupted_()) return;
  ErrorContext context;
  context.rank = rank_;
  throw Error(ErrorKind::aborted, "the group was aborted while it was being set up", context);
}

void Rendezvous::raise_timeout(const std::string& stage, const std::vector<int>& missing) const {
  ErrorContext context;
  context.rank = rank_;
  context.peer = missing.size() == 1 ? missing.front() : -1;
  context.remedy = "Look at that rank's output; raise the timeout if it starts slowly.";
  throw Error(ErrorKind::timeout,
              name_ranks(missing) + " did not " + stage + " within " + std::to_string(timeout_.count()) + " ms",
              context);
}

void Rendezvous::raise_lost(int peer) const {
  ErrorContext context;
  context.rank = rank_;
  context.peer = peer;
  context.remedy = "Look at that rank's output for the reason.";
  throw Error(ErrorKind::peer_lost, "rank " + std::to_string(peer) + " ended while the group was being set up",
              context);
}

void Rendezvous::raise_failure(const OutcomeMessage& outcome) const {
  if (outcome.kind == OutcomeMessage::Kind::peer_lost) raise_lost(static_cast<int>(outcome.peer));
  if (outcome.kind != OutcomeMessage::Kind::gave_up) return;
  ErrorContext context;
  context.rank = rank_;
  const bool blames = outcome.peer != OutcomeMessage::kNobody;
  context.peer = static_cast<int>(blames ? outcome.peer : outcome.rank);
  throw Error(outcome.error,
              "the group cannot be set up because rank " + std::to_string(outcome.rank) + " failed: " + outcome.text,
              context);
}

void Rendezvous::check() {
  check_interrupted();
  const auto now = Clock::now();
  if (now < next_look_) return;
  next_look_ = now + kLongestSlice;
  if (const auto bytes = try_get(key("failure", 0), kProbe)) raise_failure(OutcomeMessage::decode(*bytes));
}

// Polls less and less often, and less often with more ranks, so that a thousand waiting ranks do not overload the
// store.
template <typename Find>
auto Rendezvous::poll(Milliseconds patience, Find find) -> decltype(find()) {
  const auto start = Clock::now();
  const auto until = std::min(start + patience, deadline_);
  for (;;) {
    if (auto value = find()) return value;
    const auto now = Clock::now();
    if (now >= until) return std::nullopt;
    const Clock::duration longest = kLongestPause + Milliseconds(size_ / 10);
    const Clock::duration pause = std::clamp<Clock::duration>((now - began_) / 16, kShortestPause, longest);
    std::this_thread::sleep_for(std::min<Clock::duration>(pause, until - now));
  }
}

std::optional<std::vector<uint8_t>> Rendezvous::try_get(const std::string& key, Milliseconds patience) {
  return poll(patience, [&] { return store_.find(key); });
}

std::optional<Bytes16> Rendezvous::try_token(int rank, Milliseconds patience) {
  const auto bytes = try_get(kToken + std::to_string(rank), patience);
  if (!bytes || bytes->size() != 16) return std::nullopt;
  Bytes16 token;
  std::copy(bytes->begin(), bytes->end(), token.begin());
  return token;
}

void Rendezvous::agree() {
  token_ = random_bytes16();
  if (size_ == 1) {
    nonce_ = token_;
    return;
  }
  store_.set(kToken + std::to_string(rank_), {token_.begin(), token_.end()});
  if (rank_ == 0)
    collect_tokens();
  else
    accept_offer();
}

void Rendezvous::collect_tokens() {
  const std::vector<std::string> wanted = keys(kToken);
  const auto all_tokens = [&]() -> std::optional<std::vector<Bytes16>> {
    const auto values = store_.find_all(wanted);
    if (!values) return std::nullopt;
    std::vector<Bytes16> tokens;
    for (const auto& value : *values) {
      if (value.size() != sizeof(Bytes16)) return std::nullopt;
      std::copy(value.begin(), value.end(), tokens.emplace_back().begin());
    }
    return tokens;
  };
  for (Milliseconds slice = kFirstSlice;; slice = longer(slice)) {
    if (auto tokens = poll(slice, all_tokens)) {
      tokens_ = std::move(*tokens);
      break;
    }
    check_interrupted();
    if (Clock::now() < deadline_) continue;
    std::vector<int> missing;
    for (int late = 1; late < size_; ++late)
      if (!try_token(late, kProbe)) missing.push_back(late);
    raise_timeout("join the group", missing.empty() ? std::vector<int>{1} : missing);
  }
  tokens_[0] = token_;
  nonce_ = random_bytes16();
  store_.set("memory/offer", OfferMessage{nonce_, tokens_}.encode());
}

void Rendezvous::accept_offer() {
  for (Milliseconds slice = kFirstSlice;; slice = longer(slice)) {
    if (const auto bytes = try_get("memory/offer", slice)) {
      try {
        const OfferMessage offer = OfferMessage::decode(*bytes, static_cast<uint32_t>(size_));
        if (equal_constant_time(offer.tokens[rank_], token_)) {
          nonce_ = offer.nonce;
          return;
        }
      } catch (const Error& error) {
        if (error.kind() != ErrorKind::invalid_argument) throw;  // from an earlier start, perhaps of another size
      }
      std::this_thread::sleep_for(slice / 4);
    }
    check_interrupted();
    if (Clock::now() < deadline_) continue;
    std::vector<int> missing;
    for (int r = 0; r < size_; ++r)
      if (r != rank_ && !try_token(r, kProbe)) missing.push_back(r);
    raise_timeout("join the group", missing.empty() ? std::vector<int>{0} : missing);
  }
}

// Rank 0 may have read a token of an earlier start. Returns true if it made a new offer.
bool Rendezvous::refresh_tokens(const std::vector<int>& suspects) {
  bool changed = false;
  for (int r : suspects) {
    const auto token = try_token(r, kProbe);
    if (!token || *token == tokens_[r]) continue;
    tokens_[r] = *token;
    changed = true;
  }
  if (changed) store_.set("memory/offer", OfferMessage{nonce_, tokens_}.encode());
  return changed;
}

void Rendezvous::publish(const HandleRecord& record) {
  store_.set(key("record", rank_), record.encode());
}

void Rendezvous::publish(OutcomeMessage::Kind kind, int peer, const std::string& text, ErrorKind error) {
  if (outcome_published_ || size_ == 1) return;
  outcome_published_ = true;
  OutcomeMessage outcome;
  outcome.kind = kind;
  outcome.nonce = nonce_;
  outcome.rank = static_cast<uint32_t>(rank_);
  outcome.peer = peer < 0 || peer == rank_ ? OutcomeMessage::kNobody : static_cast<uint32_t>(peer);
  outcome.error = error;
  outcome.text = text;
  store_.set(key("outcome", rank_), outcome.encode());
  // A common key, so that a waiting rank need not read all outcomes. Any one of several failures will do.
  if (kind == OutcomeMessage::Kind::peer_lost || kind == OutcomeMessage::Kind::gave_up)
    store_.set(key("failure", 0), outcome.encode());
}

std::vector<HandleRecord> Rendezvous::records() {
  if (rank_ != 0)
    if (auto records = records_of_rank_0()) return std::move(*records);
  const std::vector<std::vector<uint8_t>> encoded = every_record();
  std::vector<HandleRecord> records;
  std::vector<uint8_t> together;
  for (int r = 0; r < size_; ++r) {
    records.push_back(checked(encoded[r], r));
    together.insert(together.end(), encoded[r].begin(), encoded[r].end());
  }
  if (rank_ == 0) store_.set(key("records", 0), together);
  return records;
}

std::optional<std::vector<HandleRecord>> Rendezvous::records_of_rank_0() {
  const auto until = std::min(Clock::now() + std::min(kAlone + Milliseconds(2 * size_), timeout_ / 4), deadline_);
  for (Milliseconds slice = kFirstSlice; Clock::now() < until; slice = longer(slice)) {
    const auto together = try_get(key("records", 0), slice);
    if (!together) {
      check();
      continue;
    }
    const size_t each = together->size() / size_;
    std::vector<HandleRecord> records;
    for (int r = 0; r < size_; ++r) records.push_back(checked(std::span(*together).subspan(each * r, each), r));
    return records;
  }
  return std::nullopt;
}

std::vector<std::vector<uint8_t>> Rendezvous::every_record() {
  const std::vector<std::string> wanted = keys(prefix("record"));
  for (Milliseconds slice = kFirstSlice;; slice = longer(slice)) {
    if (auto all = poll(slice, [&] { return store_.find_all(wanted); })) return std::move(*all);
    check();
    const bool over = Clock::now() >= deadline_;
    if (!over && rank_ != 0) continue;
    std::vector<int> missing;
    for (int late = 0; late < size_; ++late)
      if (!try_get(key("record", late), kProbe)) missing.push_back(late);
    if (missing.empty()) continue;
    if (over) raise_timeout("publish where its memory is", missing);
    if (refresh_tokens(missing)) slice = kFirstSlice;
  }
}

HandleRecord Rendezvous::checked(std::span<const uint8_t> bytes, int rank) const {
  HandleRecord record = HandleRecord::decode(bytes);
  if (record.rank == static_cast<uint32_t>(rank) && record.size == static_cast<uint32_t>(size_) &&
      equal_constant_time(record.nonce, nonce_))
    return record;
  ErrorContext context;
  context.rank = rank_;
  context.peer = rank;
  throw Error(ErrorKind::mismatch,
              "rank " + std::to_string(rank) + " published the record of rank " + std::to_string(record.rank) + " of " +
                  std::to_string(record.size) + " in a group of " + std::to_string(size_),
              context);
}

std::optional<OutcomeMessage> Rendezvous::outcome(int rank, Milliseconds patience) {
  const auto bytes = try_get(key("outcome", rank), patience);
  if (!bytes) return std::nullopt;
  OutcomeMessage outcome = OutcomeMessage::decode(*bytes);
  if (outcome.rank != static_cast<uint32_t>(rank) || !equal_constant_time(outcome.nonce, nonce_)) return std::nullopt;
  return outcome;
}

}  // namespace ark
