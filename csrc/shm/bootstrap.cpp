// The stages of bootstrap.hpp, and the rules by which all ranks decide the same way.
//
// After stage 2 the decision is a pure function of the records, after stage 4 of the outcomes, and every rank has read
// all of them. Errors (a lost peer, a rank that gave up) take precedence over "not shared" on every rank.
#include "shm/bootstrap.hpp"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "shm/exchange.hpp"
#include "shm/rendezvous.hpp"
#include "util/error.hpp"
#include "util/identity.hpp"

namespace ark {

namespace {

using Milliseconds = Rendezvous::Milliseconds;
using Outcome = OutcomeMessage::Kind;

constexpr Milliseconds kPollInterval{100};
constexpr Milliseconds kLastWords{500};  // an outcome may still be in transit through the store when a socket closes

void check(const ConnectOptions& options) {
  auto fail = [&](const std::string& what) {
    ErrorContext context;
    context.rank = options.rank;
    throw Error(ErrorKind::invalid_argument, what, context);
  };
  if (options.size < 1 || options.size > static_cast<int>(kMaxRanks))
    fail("size must be 1.." + std::to_string(kMaxRanks) + ", got " + std::to_string(options.size));
  if (options.rank < 0 || options.rank >= options.size)
    fail("rank must be 0.." + std::to_string(options.size - 1) + ", got " + std::to_string(options.rank));
  if (options.timeout.count() <= 0) fail("timeout must be positive, got " + std::to_string(options.timeout.count()));
  if (options.segment_bytes == 0 || options.segment_bytes > kMaxSegmentBytes)
    fail("segment_bytes must be 1.." + std::to_string(kMaxSegmentBytes) + ", got " +
         std::to_string(options.segment_bytes));
}

template <typename Field>
std::string differing(const std::vector<HandleRecord>& records, Field field, const std::string& what) {
  for (const HandleRecord& record : records)
    if (record.*field != records[0].*field) return "rank 0 and rank " + std::to_string(record.rank) + " " + what;
  return {};
}

Neighbourhood of_one(SharedMemory own, uint32_t pid) {
  Neighbourhood only;
  only.segments.push_back(std::move(own));
  only.connections.resize(1);
  only.pids.push_back(static_cast<int>(pid));
  return only;
}

class Bootstrap {
 public:
  Bootstrap(KeyValueStore& store, const ConnectOptions& options, const Identity& identity)
      : options_(options),
        identity_(identity),
        rendezvous_(store, options.rank, options.size, options.timeout, options.interrupted) {}

  ConnectResult run() {
    rendezvous_.agree();
    try {
      return connect_agreed();
    } catch (const Error& error) {
      // Tells the others not to wait. If the store failed, they have a better error of their own.
      try {
        rendezvous_.publish(Outcome::gave_up, error.context().peer, error.what(), error.kind());
      } catch (const Error&) {
      }
      throw;
    }
  }

 private:
  ConnectResult connect_agreed() {
    ConnectResult result = connect_with(rendezvous_.nonce());
    for (uint8_t byte : rendezvous_.nonce()) {
      constexpr char kDigits[] = "0123456789abcdef";
      result.start += {kDigits[byte >> 4], kDigits[byte & 15]};
    }
    return result;
  }

  ConnectResult connect_with(const Bytes16& nonce) {
    SharedMemory own;
    Listener listener;
    HandleRecord record = describe(nonce, own, listener);
    if (options_.size == 1) return alone(std::move(own), options_.allow_sharing);
    rendezvous_.publish(record);
    const std::vector<HandleRecord> records = rendezvous_.records();
    check_releases(records);
    if (std::string reason = why_apart(records); !reason.empty())
      return {std::nullopt, std::move(reason), {}, nodes_of(records)};

    ExchangeOptions exchange_options;
    exchange_options.rank = options_.rank;
    exchange_options.records = records;
    exchange_options.deadline = rendezvous_.deadline();
    exchange_options.check = [this] { rendezvous_.check(); };
    exchange_options.on_apart = [this](int peer, const std::string& why) {
      const std::string both =
          "rank " + std::to_string(options_.rank) + " cannot share memory with rank " + std::to_string(peer) + ": ";
      rendezvous_.publish(Outcome::apart, peer, why.empty() ? why : both + why);
    };
    exchange_options.has_spoken = [this](int peer) { return rendezvous_.outcome(peer, kLastWords).has_value(); };
    ExchangeResult result = exchange(exchange_options, std::move(own), std::move(listener.fd));
    if (result.lost >= 0) {
      rendezvous_.publish(Outcome::peer_lost, result.lost, "");
      rendezvous_.raise_lost(result.lost);
    }
    if (!result.silent.empty()) rendezvous_.raise_timeout("answer on its local socket", result.silent);
    if (!result.apart) rendezvous_.publish(Outcome::connected, -1, "");
    std::string reason = conclude(result.neighbourhood);
    if (!reason.empty()) return {std::nullopt, std::move(reason), {}, nodes_of(records)};
    return {std::move(result.neighbourhood), {}, {}, {}};
  }

  // Creates the segment and the listener, if this rank is willing and able.
  HandleRecord describe(const Bytes16& nonce, SharedMemory& own, Listener& listener) {
    HandleRecord record;
    record.rank = static_cast<uint32_t>(options_.rank);
    record.size = static_cast<uint32_t>(options_.size);
    record.nonce = nonce;
    record.host_id = identity_.host_id;
    record.network_space = identity_.network_space;
    record.uid = identity_.uid;
    record.pid = identity_.pid;
    record.release = options_.release;
    if (!options_.allow_sharing) return record;
    if (options_.size > 1) {
      record.sharing = Sharing::unable;
      if (!identity_.unknown.empty()) return unable(record, identity_.unknown);
      try {
        listener = Listener::open();
      } catch (const Error& error) {
        return unable(record, error.what());
      }
    }
    own = SharedMemory::create("ark-rank-" + std::to_string(options_.rank), options_.segment_bytes);
    record.sharing = Sharing::willing;
    record.segment_bytes = options_.segment_bytes;
    record.socket_name = listener.name;
    return record;
  }

  // All ranks have read the same records, so all raise the same error.
  void check_releases(const std::vector<HandleRecord>& records) const {
    for (const HandleRecord& record : records) {
      if (record.release == records[0].release) continue;
      const auto named = [](const HandleRecord& one) {
        return "ark_torch " + text_of_release(one.release) + " on rank " + std::to_string(one.rank);
      };
      ErrorContext context{options_.rank, static_cast<int>(record.rank), "init", 0,
                           "Install the same version on all machines."};
      throw Error(ErrorKind::invalid_argument,
                  "ranks have different versions: " + named(records[0]) + ", " + named(record), context);
    }
  }

  // Publishes the reason before the record, so that readers of the record find it.
  HandleRecord unable(const HandleRecord& record, const std::string& why) {
    rendezvous_.publish(Outcome::apart, -1, "rank " + std::to_string(options_.rank) + " cannot share memory: " + why);
    return record;
  }

  ConnectResult alone(SharedMemory own, bool allowed) {
    if (!allowed) return {std::nullopt, "sharing memory is switched off", {}, {0}};
    return {of_one(std::move(own), identity_.pid), {}, {}, {}};
  }

  static std::vector<int> nodes_of(const std::vector<HandleRecord>& records) {
    std::map<std::tuple<Bytes16, uint64_t, uint32_t>, int> numbers;
    std::vector<int> nodes;
    int count = 0;
    for (const HandleRecord& record : records) {
      if (record.sharing != Sharing::willing) {
        nodes.push_back(count++);
        continue;
      }
      const auto [found, fresh] = numbers.try_emplace({record.host_id, record.network_space, record.uid}, count);
      count += fresh ? 1 : 0;
      nodes.push_back(found->second);
    }
    return nodes;
  }

  // Uses only the records and their outcomes, so every rank gets the same result.
  std::string why_apart(const std::vector<HandleRecord>& records) {
    std::vector<int> declined;
    for (const HandleRecord& record : records)
      if (record.sharing == Sharing::declined) declined.push_back(static_cast<int>(record.rank));
    if (!declined.empty()) return "sharing memory is switched off on " + name_ranks(declined);
    if (std::string reason = differing(records, &HandleRecord::host_id, "run on different machines"); !reason.empty())
      return reason;
    for (const HandleRecord& record : records) {
      if (record.sharing != Sharing::unable) continue;
      const auto said = rendezvous_.outcome(static_cast<int>(record.rank), Milliseconds(2000));
      return said ? said->text : "rank " + std::to_string(record.rank) + " cannot share memory";
    }
    if (std::string reason = differing(records, &HandleRecord::uid, "run as different users"); !reason.empty())
      return reason;
    for (const HandleRecord& record : records)
      if (record.network_space == 0) return {};  // unknown; the sockets will show
    return differing(records, &HandleRecord::network_space, "run in different containers (network namespaces)");
  }

  // Waits for all outcomes and watches the sockets for ranks that end. Returns why memory is not shared.
  std::string conclude(const Neighbourhood& all) {
    std::string reason, vague;
    for (int peer = 0; peer < options_.size; ++peer) {
      const auto said = await_outcome(peer, all);
      rendezvous_.raise_failure(said);
      if (said.kind != Outcome::apart) continue;
      if (reason.empty()) reason = said.text;
      vague = "rank " + std::to_string(peer) + " could not reach every other rank";
    }
    return reason.empty() ? vague : reason;
  }

  OutcomeMessage await_outcome(int peer, const Neighbourhood& all) {
    for (;;) {
      if (auto said = rendezvous_.outcome(peer, kPollInterval)) return *said;
      rendezvous_.check();
      for (int other = 0; other < options_.size; ++other) {
        const int socket = all.connections[other].get();
        if (socket < 0 || !has_ended(socket) || rendezvous_.outcome(other, kLastWords)) continue;
        rendezvous_.raise_lost(other);
      }
      if (Rendezvous::Clock::now() >= rendezvous_.deadline())
        rendezvous_.raise_timeout("report whether it reached the others", {peer});
    }
  }

  const ConnectOptions& options_;
  const Identity& identity_;
  Rendezvous rendezvous_;
};

}  // namespace

Neighbourhood neighbourhood_of_one(size_t segment_bytes) {
  const Identity identity = Identity::of_this_process();
  return of_one(SharedMemory::create("ark-rank", segment_bytes), identity.pid);
}

ConnectResult connect(KeyValueStore& store, const ConnectOptions& options) {
  return connect(store, options, Identity::of_this_process());
}

ConnectResult connect(KeyValueStore& store, const ConnectOptions& options, const Identity& identity) {
  check(options);
  return Bootstrap(store, options, identity).run();
}

}  // namespace ark
