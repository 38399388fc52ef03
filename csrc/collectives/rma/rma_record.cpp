#include "collectives/rma/rma_record.hpp"

#include "shm/handle.hpp"
#include "shm/wire.hpp"

namespace ark {

namespace {

constexpr uint32_t kMagic = 0x57'4b'52'41;  // "ARKW" in memory
constexpr uint32_t kVersion = 1;
constexpr char kRecord[] = "window record";
constexpr uint32_t kMostItem = 16;

}  // namespace

std::vector<uint8_t> RmaRecord::encode() const {
  wire::Writer out(kEncodedBytes);
  out.number(kMagic);
  out.number(kVersion);
  out.number(rank);
  out.number(size);
  out.number(window);
  out.number(elements);
  out.number(item);
  out.number(type);
  out.number(address);
  for (const uint32_t key : keys) out.number(key);
  std::string printable = reason.substr(0, kMaxReasonBytes);
  for (char& c : printable)
    if (c < ' ' || c > '~') c = '?';
  out.text(printable, kMaxReasonBytes);
  return out.take();
}

RmaRecord RmaRecord::decode(std::span<const uint8_t> bytes) {
  wire::Reader in(kRecord, bytes, kEncodedBytes);
  RmaRecord record;
  in.constant("magic", kMagic);
  in.constant("version", kVersion);
  record.rank = in.number<uint32_t>();
  record.size = in.number<uint32_t>();
  record.window = in.number<uint32_t>();
  record.elements = in.number<uint64_t>();
  record.item = in.number<uint32_t>();
  record.type = in.number<uint32_t>();
  record.address = in.number<uint64_t>();
  for (uint32_t& key : record.keys) key = in.number<uint32_t>();
  record.reason = in.text("reason", kMaxReasonBytes);
  in.finish();
  if (record.size == 0 || record.size > kMaxRanks) wire::reject(kRecord, "group size " + std::to_string(record.size));
  if (record.rank >= record.size)
    wire::reject(kRecord, "rank " + std::to_string(record.rank) + " of " + std::to_string(record.size));
  if (record.item == 0 || record.item > kMostItem)
    wire::reject(kRecord, "elements of " + std::to_string(record.item) + " bytes");
  if (record.elements > kMaxSegmentBytes / record.item)
    wire::reject(kRecord, std::to_string(record.elements) + " elements");
  if (record.address > UINT64_MAX - record.elements * record.item)
    wire::reject(kRecord, "memory at " + std::to_string(record.address));
  return record;
}

}  // namespace ark
