// Encodes and checks the RDMA records, and decides from all offers whether the group uses RDMA. The decision depends
// only on the offers, so every rank reaches the same one without further communication.
#include "dma/rdma/endpoint.hpp"

#include <algorithm>

#include "dma/rdma/options.hpp"
#include "shm/handle.hpp"
#include "shm/wire.hpp"

namespace ark::rdma {

namespace {

constexpr uint32_t kOfferMagic = 0x4f'4b'52'41;     // "ARKO" in memory
constexpr uint32_t kEndpointMagic = 0x45'4b'52'41;  // "ARKE"
constexpr uint32_t kVersion = 2;                    // of both records and of the protocol on the connection
constexpr char kOffer[] = "RDMA offer", kEndpoint[] = "RDMA handle record";
constexpr uint32_t kMost24 = (1u << 24) - 1;
constexpr uint32_t kMostSlots = 1 << 10, kMostSlotBytes = 1 << 20;

void check_ranks(const char* what, uint32_t rank, uint32_t size) {
  if (size == 0 || size > kMaxRanks)
    wire::reject(what, "group size " + std::to_string(size) + " is not in 1.." + std::to_string(kMaxRanks));
  if (rank >= size) wire::reject(what, "rank " + std::to_string(rank) + " of " + std::to_string(size));
}

bool is_mtu(uint32_t bytes) {
  return bytes >= 256 && bytes <= 4096 && (bytes & (bytes - 1)) == 0;
}

}  // namespace

std::vector<uint8_t> Offer::encode() const {
  wire::Writer out(kEncodedBytes);
  out.number(kOfferMagic);
  out.number(kVersion);
  out.number(rank);
  out.number(size);
  out.number(static_cast<uint32_t>(wish));
  out.number(static_cast<uint32_t>(usable));
  out.number(static_cast<uint32_t>(ethernet));
  out.number(rails);
  out.number(mtu);
  out.number(mtu_asked);
  out.text(device, kMaxDeviceBytes);
  out.text(reason, kMaxReasonBytes);
  return out.take();
}

Offer Offer::decode(std::span<const uint8_t> bytes) {
  wire::Reader in(kOffer, bytes, kEncodedBytes);
  Offer offer;
  in.constant("magic", kOfferMagic);
  in.constant("version", kVersion);
  offer.rank = in.number<uint32_t>();
  offer.size = in.number<uint32_t>();
  const uint32_t wish = in.number<uint32_t>(), usable = in.number<uint32_t>(), ethernet = in.number<uint32_t>();
  offer.rails = in.number<uint32_t>();
  offer.mtu = in.number<uint32_t>();
  offer.mtu_asked = in.number<uint32_t>();
  offer.device = in.text("device", kMaxDeviceBytes);
  offer.reason = in.text("reason", kMaxReasonBytes);
  in.finish();
  check_ranks(kOffer, offer.rank, offer.size);
  if (wish > static_cast<uint32_t>(Wish::gloo)) wire::reject(kOffer, "wish is " + std::to_string(wish));
  if (usable > 1) wire::reject(kOffer, "usable is " + std::to_string(usable));
  if (ethernet > 1) wire::reject(kOffer, "link layer is " + std::to_string(ethernet));
  offer.wish = static_cast<Wish>(wish);
  offer.usable = usable == 1;
  offer.ethernet = ethernet == 1;
  if (offer.usable ? !is_mtu(offer.mtu) : offer.mtu != 0)
    wire::reject(kOffer, "MTU is " + std::to_string(offer.mtu) + " bytes");
  if (offer.usable ? offer.rails == 0 || offer.rails > kMostRails : offer.rails != 0)
    wire::reject(kOffer, std::to_string(offer.rails) + " rails");
  if (offer.mtu_asked != 0 && !is_mtu(offer.mtu_asked))
    wire::reject(kOffer, "asks for an MTU of " + std::to_string(offer.mtu_asked) + " bytes");
  if (offer.usable != !offer.device.empty() || offer.usable == !offer.reason.empty())
    wire::reject(kOffer,
                 offer.usable ? "usable, and without a device or with a reason" : "not usable without a reason");
  return offer;
}

Decision decide(const std::vector<Offer>& offers, int rank) {
  const Offer* asks = nullptr;
  const Offer* declines = nullptr;
  const Offer* unable = nullptr;
  const Offer* other_link = nullptr;
  for (const Offer& offer : offers) {
    if (offer.wish == Wish::rdma && !asks) asks = &offer;
    if (offer.wish == Wish::gloo && !declines) declines = &offer;
    if (!offer.usable && !unable) unable = &offer;
    if (offer.usable && offers[0].usable && offer.ethernet != offers[0].ethernet && !other_link) other_link = &offer;
  }
  Decision decision;
  const auto no = [&](int peer, const std::string& why, const std::string& remedy) {
    if (asks)
      throw Error(ErrorKind::invalid_argument,
                  "rank " + std::to_string(asks->rank) + " asks for RDMA between nodes (ARK_NET=rdma), and " + why,
                  ErrorContext{rank, peer, "init", 0, remedy});
    decision.reason = why;
    return decision;
  };
  if (declines)
    return no(static_cast<int>(declines->rank), "rank " + std::to_string(declines->rank) + " has ARK_NET=gloo",
              "Set ARK_NET alike on all ranks.");
  if (unable)
    return no(static_cast<int>(unable->rank),
              "rank " + std::to_string(unable->rank) + " has no RDMA: " + unable->reason,
              "`ark doctor` on that machine says more; ARK_NET=auto takes Gloo where RDMA cannot be.");
  if (other_link)
    return no(static_cast<int>(other_link->rank),
              "rank 0 has " + std::string(offers[0].ethernet ? "RoCE" : "InfiniBand") + " (" + offers[0].device +
                  ") and rank " + std::to_string(other_link->rank) + " has " +
                  (other_link->ethernet ? "RoCE" : "InfiniBand") + " (" + other_link->device + ")",
              "Choose devices of one network with ARK_RDMA_DEVICE.");
  // Every port must support the path's MTU; otherwise packets vanish without an error.
  const auto least =
      std::min_element(offers.begin(), offers.end(), [](const Offer& a, const Offer& b) { return a.mtu < b.mtu; });
  for (const Offer& offer : offers) {
    if (offer.mtu_asked == 0) continue;
    if (offer.mtu_asked > least->mtu || (offers[0].mtu_asked != offer.mtu_asked)) {
      const bool large = offer.mtu_asked > least->mtu;
      const Offer& who = large ? *least : offers[0];
      const std::string has =
          large ? "the port of rank " + std::to_string(who.rank) + " (" + who.device + ") has " +
                      std::to_string(who.mtu) + " bytes"
                : "rank " + std::to_string(who.rank) +
                      (who.mtu_asked ? " asks for " + std::to_string(who.mtu_asked) + " bytes" : " asks for none");
      throw Error(ErrorKind::invalid_argument,
                  "rank " + std::to_string(offer.rank) + " asks for an MTU of " + std::to_string(offer.mtu_asked) +
                      " bytes (ARK_RDMA_MTU), and " + has,
                  ErrorContext{rank, static_cast<int>(who.rank), "init", 0,
                               "Set ARK_RDMA_MTU alike on all ranks, to at most the least MTU of their ports, or unset "
                               "it."});
    }
  }
  decision.rdma = true;
  decision.mtu = static_cast<int>(offers[0].mtu_asked ? offers[0].mtu_asked : least->mtu);
  decision.reason = std::string(offers[0].ethernet ? "RoCE" : "InfiniBand") + ", MTU " + std::to_string(decision.mtu);
  for (const Offer& offer : offers) {
    if (offer.mtu == least->mtu || offers[0].mtu_asked) continue;
    decision.reason += " (the least: rank " + std::to_string(least->rank) + "; rank " + std::to_string(offer.rank) +
                       " has " + std::to_string(offer.mtu) + ")";
    break;
  }
  const auto fewest =
      std::min_element(offers.begin(), offers.end(), [](const Offer& a, const Offer& b) { return a.rails < b.rails; });
  const auto most =
      std::max_element(offers.begin(), offers.end(), [](const Offer& a, const Offer& b) { return a.rails < b.rails; });
  decision.rails = static_cast<int>(fewest->rails);
  if (most->rails > 1) decision.reason += ", " + std::to_string(fewest->rails) + " rails";
  if (most->rails > fewest->rails)
    decision.reason += " (the least: rank " + std::to_string(fewest->rank) + "; rank " + std::to_string(most->rank) +
                       " has " + std::to_string(most->rails) + ")";
  return decision;
}

std::vector<uint8_t> Endpoint::encode() const {
  wire::Writer out(kEncodedBytes);
  out.number(kEndpointMagic);
  out.number(kVersion);
  out.number(from);
  out.number(to);
  out.number(size);
  out.number(pair);
  out.number(first_packet);
  out.raw(gid);
  out.number(lid);
  out.number(key);
  out.number(inbox);
  out.number(slots);
  out.number(slot_bytes);
  return out.take();
}

Endpoint Endpoint::decode(std::span<const uint8_t> bytes) {
  wire::Reader in(kEndpoint, bytes, kEncodedBytes);
  Endpoint endpoint;
  in.constant("magic", kEndpointMagic);
  in.constant("version", kVersion);
  endpoint.from = in.number<uint32_t>();
  endpoint.to = in.number<uint32_t>();
  endpoint.size = in.number<uint32_t>();
  endpoint.pair = in.number<uint32_t>();
  endpoint.first_packet = in.number<uint32_t>();
  endpoint.gid = in.raw<16>();
  endpoint.lid = in.number<uint32_t>();
  endpoint.key = in.number<uint32_t>();
  endpoint.inbox = in.number<uint64_t>();
  endpoint.slots = in.number<uint32_t>();
  endpoint.slot_bytes = in.number<uint32_t>();
  in.finish();
  check_ranks(kEndpoint, endpoint.from, endpoint.size);
  check_ranks(kEndpoint, endpoint.to, endpoint.size);
  if (endpoint.pair == 0 || endpoint.pair > kMost24)
    wire::reject(kEndpoint, "queue pair " + std::to_string(endpoint.pair) + " is not in 1.." + std::to_string(kMost24));
  if (endpoint.first_packet > kMost24)
    wire::reject(kEndpoint, "first packet " + std::to_string(endpoint.first_packet) + " has more than 24 bits");
  if (endpoint.lid > 0xffff) wire::reject(kEndpoint, "LID " + std::to_string(endpoint.lid) + " has more than 16 bits");
  if (endpoint.slots == 0 || endpoint.slots > kMostSlots)
    wire::reject(kEndpoint, std::to_string(endpoint.slots) + " slots");
  if (endpoint.slot_bytes == 0 || endpoint.slot_bytes > kMostSlotBytes)
    wire::reject(kEndpoint, "slots of " + std::to_string(endpoint.slot_bytes) + " bytes");
  const uint64_t bytes_in_all = uint64_t{endpoint.slots} * endpoint.slot_bytes;
  if (endpoint.inbox == 0 || endpoint.inbox > UINT64_MAX - bytes_in_all)
    wire::reject(kEndpoint, "inbox at " + std::to_string(endpoint.inbox));
  return endpoint;
}

}  // namespace ark::rdma
