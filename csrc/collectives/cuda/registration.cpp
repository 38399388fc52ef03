// The messages between ranks about registered memory, and the mappings that follow.
#include "collectives/cuda/registration.hpp"

#include "shm/symmetric_memory.hpp"

namespace ark {

namespace {

// What a window keeps alive.
struct Held {
  std::shared_ptr<const ShareableSegment> own;
  std::vector<std::shared_ptr<const DeviceMemory>> peers;
};

const char* const kCalls[] = {"", "register", "register_mem_pool", "deregister", "deregister_mem_pool"};

}  // namespace

struct Registration::Card {
  Verb verb;
  uint32_t id;             // remove: the window's id
  uint64_t bytes;          // of the range; add_all and remove_all: number of ranges
  uint64_t offset;         // of the range in its segment
  uint64_t segment;        // number in this process
  uint64_t segment_bytes;  // size of the whole segment
};

// One step: exchanges every rank's call and its numbers and checks that they agree.
void Registration::say(Verb verb, const std::function<void(Card&)>& fill) {
  meeting_->step([&] {
    Card& card = meeting_->own_card<Card>();
    card.verb = verb;
    fill(card);
  });
  const Card& first = meeting_->card_of<Card>(0);
  for (int rank = 1; rank < meeting_->size(); ++rank) {
    const Card& other = meeting_->card_of<Card>(rank);
    const auto differ = [&](const std::string& ours, const std::string& theirs) {
      throw Error(ErrorKind::mismatch, "rank 0 " + ours + ", rank " + std::to_string(rank) + " " + theirs,
                  ErrorContext{meeting_->rank(), rank, "", 0, "Make the same calls in the same order on every rank."});
    };
    const auto call_of = [](const Card& card) { return std::string("called ") + kCalls[static_cast<int>(card.verb)]; };
    if (other.verb != first.verb) differ(call_of(first), call_of(other));
    const char* what = verb == Verb::add || verb == Verb::remove ? " bytes" : " segments";
    if (other.bytes != first.bytes)
      differ("gave " + std::to_string(first.bytes) + what, "gave " + std::to_string(other.bytes) + what);
    if (other.id != first.id) differ("gave registered memory", "gave another");
  }
}

uint32_t Registration::add(const Offer& offer, const Place& place) {
  RegisteredRange own{};
  say(Verb::add, [&](Card& card) {
    own = offer();
    card.bytes = own.bytes;
    card.offset = static_cast<uint64_t>(own.data - own.segment->memory.data());
    card.segment = own.segment->number;
    card.segment_bytes = own.segment->memory.size();
  });
  return share(own, place);
}

uint32_t Registration::share(const RegisteredRange& own, const Place& place) {
  Windows* windows = nullptr;
  auto held = std::make_shared<Held>();
  held->own = own.segment;
  const int me = meeting_->rank();
  Windows::Base base{}, seen{};
  meeting_->step([&] {
    windows = place();
    if (windows == nullptr) return;
    base[me] = own.data;
    SymmetricMemory::share(*meeting_, own.segment->memory, [&](int peer, UniqueFd fd) {
      const Card& card = meeting_->card_of<Card>(peer);
      held->peers.push_back(mapped(peer, card.segment, card.segment_bytes, own.segment->device, std::move(fd)));
      base[peer] = held->peers.back()->data() + card.offset;
    });
    meeting_->own_card<Windows::Base>() = base;
  });
  if (windows == nullptr) return 0;
  for (int peer = 0; peer < meeting_->size(); ++peer) seen[peer] = meeting_->card_of<Windows::Base>(peer)[me];
  windows->add(++last_id_, own.data, own.bytes, base, seen, std::move(held));
  return last_id_;
}

std::shared_ptr<const DeviceMemory> Registration::mapped(int peer, uint64_t segment, uint64_t bytes, int device,
                                                         UniqueFd fd) {
  const std::pair key(peer, segment);
  if (const auto known = mapped_.find(key); known != mapped_.end()) {
    if (auto memory = known->second.lock()) return memory;
  }
  std::erase_if(mapped_, [](const auto& entry) { return entry.second.expired(); });
  auto memory = std::make_shared<const DeviceMemory>(DeviceMemory::import(device, fd, bytes));
  mapped_[key] = memory;
  return memory;
}

std::vector<uint32_t> Registration::add_all(const std::function<std::vector<RegisteredRange>()>& offer,
                                            const Place& place) {
  std::vector<RegisteredRange> ranges;
  say(Verb::add_all, [&](Card& card) {
    ranges = offer();
    card.bytes = ranges.size();
  });
  std::vector<uint32_t> ids;
  Windows* windows = nullptr;
  const auto noting = [&] { return windows = place(); };
  try {
    for (const RegisteredRange& range : ranges) {
      const uint32_t id = add([&] { return range; }, noting);
      if (id == 0) return {};
      ids.push_back(id);
    }
  } catch (const Error&) {
    // No caller knows these windows yet, and no operation of this group was issued meanwhile.
    for (const uint32_t id : ids) windows->remove(id);
    throw;
  }
  return ids;
}

void Registration::remove(const Offer& offer, Windows* windows, const std::function<bool()>& quiet) {
  uint32_t id = 0;
  say(Verb::remove, [&](Card& card) {
    const RegisteredRange own = offer();
    card.bytes = own.bytes;
    id = card.id = windows == nullptr ? 0 : windows->id_of(own.data, own.bytes);
    if (id != 0) return;
    throw Error(ErrorKind::invalid_argument, "the tensor is not registered with this group",
                ErrorContext{-1, -1, "", 0, "Pass the tensor that register() was given, or one of the same memory."});
  });
  end(*windows, id, quiet);
}

void Registration::remove_all(const std::vector<uint32_t>* ids, Windows* windows, const std::function<bool()>& quiet) {
  say(Verb::remove_all, [&](Card& card) {
    if (ids == nullptr) {
      throw Error(ErrorKind::invalid_argument, "the pool is not registered with this group",
                  ErrorContext{-1, -1, "", 0, "Pass a pool that register_mem_pool() was given."});
    }
    card.bytes = ids->size();
    card.id = ids->empty() ? 0 : ids->front();
  });
  if (windows == nullptr) return;
  for (const uint32_t id : *ids) end(*windows, id, quiet);
}

// No later operation finds the window, but earlier ones may still run.
void Registration::end(Windows& windows, uint32_t id, const std::function<bool()>& quiet) {
  std::shared_ptr<void> held = windows.remove(id);
  if (held && !quiet()) windows.keep(std::move(held));
}

}  // namespace ark
