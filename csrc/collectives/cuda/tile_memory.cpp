// Shares places and hands them out.
#include "collectives/cuda/tile_memory.hpp"

#include <algorithm>

#include "protocol/atomics.hpp"
#include "util/error.hpp"

namespace ark {

namespace {

constexpr uint64_t kControlPrint = 0x74696c6573000001, kDataPrint = 0x74696c6573000002;
constexpr uint64_t kPlaceAlign = 4096;
constexpr uint64_t kMostPlaces = 8;  // besides the staging place

}  // namespace

std::unique_ptr<TileMemory> TileMemory::create(CudaCommunicator& communicator, std::string& why) {
  auto control = communicator.share(sizeof(device::TileControl), kControlPrint, why);
  if (!control) return nullptr;
  return std::unique_ptr<TileMemory>(new TileMemory(communicator, std::move(control)));
}

TileMemory::TileMemory(const CudaCommunicator& communicator, std::unique_ptr<CudaCommunicator::Shared> control)
    : rank_(communicator.rank()),
      size_(communicator.size()),
      most_bytes_(communicator.buffer_bytes()),
      control_(std::move(control)),
      report_(communicator.device(), sizeof(device::TileReport)) {}

bool TileMemory::reserve(CudaCommunicator& communicator, uint64_t bytes, bool capturing, std::string& why) {
  if (bytes <= bytes_) return true;
  if (capturing) {
    throw Error(ErrorKind::invalid_argument,
                "the first call with a result of " + std::to_string(bytes) +
                    " bytes is under graph capture, where ranks cannot meet",
                ErrorContext{rank_, -1, "", 0, "Call it once, on all ranks, before the capture begins."});
  }
  const uint64_t each = (bytes + kPlaceAlign - 1) / kPlaceAlign * kPlaceAlign;
  const uint64_t places = 1 + std::min(kMostPlaces, std::max<uint64_t>(most_bytes_ / each, 1) - 1);
  auto shared = communicator.share(each * places, kDataPrint ^ each, why);
  if (!shared) return false;
  // Nothing writes to the old memory any more: this rank's launches have ended, and so have peers' stores for them.
  communicator.settle();
  data_ = std::make_shared<Data>(std::move(shared), places);
  bytes_ = each;
  return true;
}

TileMemory::Place TileMemory::place(uint64_t number) const {
  Place place;
  place.data = data_->shared->memory[rank_] + number * bytes_;
  for (int r = 0; r < size_; ++r) {
    place.seen[r] = data_->shared->seen[r] + number * bytes_;
    if (number == 0) place.peers[r] = data_->shared->memory[r];
  }
  place.keep = data_;
  return place;
}

TileMemory::Place TileMemory::staging() const {
  return place(0);
}

std::optional<TileMemory::Place> TileMemory::take() {
  for (size_t number = 1; number < data_->taken.size(); ++number) {
    if (data_->taken[number].exchange(true)) continue;
    Place mine = place(number);
    mine.keep = std::shared_ptr<void>(nullptr, [data = data_, number](void*) { data->taken[number] = false; });
    return mine;
  }
  return std::nullopt;
}

device::TileLinks TileMemory::links(const Place& place) const {
  device::TileLinks links{};
  for (int r = 0; r < size_; ++r) {
    links.control[r] = reinterpret_cast<device::TileControl*>(control_->memory[r]);
    links.place[r] = reinterpret_cast<uint64_t>(r == rank_ ? place.data : place.seen[r]);
  }
  links.status = control_->status;
  links.report = static_cast<device::TileReport*>(report_.device());
  links.rank = rank_, links.ranks = size_;
  return links;
}

std::optional<device::TileReport> TileMemory::failure() const {
  const auto& report = *static_cast<const device::TileReport*>(report_.host());
  if (protocol::load_acquire(report.failure) == device::TileReport::none) return std::nullopt;
  return report;
}

}  // namespace ark
