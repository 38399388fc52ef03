// Encodes and checks the handle record. The calls below define the layout.
#include "shm/handle.hpp"

#include "shm/wire.hpp"

namespace ark {

namespace {

constexpr uint32_t kHandleMagic = 0x48'4b'52'41;  // "ARKH" in memory
constexpr uint32_t kHandleVersion = 1;
constexpr char kName[] = "handle record";

}  // namespace

std::vector<uint8_t> HandleRecord::encode() const {
  wire::Writer out(kEncodedBytes);
  out.number(kHandleMagic);
  out.number(kHandleVersion);
  out.number(rank);
  out.number(size);
  out.number(static_cast<uint32_t>(sharing));
  out.number(uid);
  out.number(pid);
  out.number(release);
  out.raw(nonce);
  out.raw(host_id);
  out.number(network_space);
  out.number(segment_bytes);
  out.text(socket_name, kMaxNameBytes);
  return out.take();
}

HandleRecord HandleRecord::decode(std::span<const uint8_t> bytes) {
  wire::Reader in(kName, bytes, kEncodedBytes);
  HandleRecord record;
  in.constant("magic", kHandleMagic);
  in.constant("version", kHandleVersion);
  record.rank = in.number<uint32_t>();
  record.size = in.number<uint32_t>();
  const uint32_t sharing = in.number<uint32_t>();
  record.uid = in.number<uint32_t>();
  record.pid = in.number<uint32_t>();
  record.release = in.number<uint32_t>();
  record.nonce = in.raw<16>();
  record.host_id = in.raw<16>();
  record.network_space = in.number<uint64_t>();
  record.segment_bytes = in.number<uint64_t>();
  record.socket_name = in.text("socket name", kMaxNameBytes);
  in.finish();

  if (record.size == 0 || record.size > kMaxRanks)
    wire::reject(kName, "group size " + std::to_string(record.size) + " is not in 1.." + std::to_string(kMaxRanks));
  if (record.rank >= record.size)
    wire::reject(kName, "rank " + std::to_string(record.rank) + " of " + std::to_string(record.size));
  if (sharing < static_cast<uint32_t>(Sharing::willing) || sharing > static_cast<uint32_t>(Sharing::unable))
    wire::reject(kName, "sharing is " + std::to_string(sharing));
  record.sharing = static_cast<Sharing>(sharing);
  if (record.release > 0xff'ffff) wire::reject(kName, "release of ark_torch is " + std::to_string(record.release));
  if (record.pid > INT32_MAX) wire::reject(kName, "process id " + std::to_string(record.pid));
  if (record.segment_bytes > kMaxSegmentBytes)
    wire::reject(kName, "segment of " + std::to_string(record.segment_bytes) + " bytes");
  const bool willing = record.sharing == Sharing::willing;
  if (willing != (record.segment_bytes > 0) || willing != !record.socket_name.empty())
    wire::reject(kName, willing ? "shares memory but names no segment or socket" : "names a segment it does not share");
  for (char c : record.socket_name)
    if (!((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-'))
      wire::reject(kName, "socket name \"" + record.socket_name + "\" holds more than a-z, 0-9 and -");
  return record;
}

std::string text_of_release(uint32_t release) {
  return std::to_string(release >> 16) + "." + std::to_string(release >> 8 & 0xff) + "." +
         std::to_string(release & 0xff);
}

bool equal_constant_time(std::span<const uint8_t> a, std::span<const uint8_t> b) {
  if (a.size() != b.size()) return false;
  uint8_t difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference = static_cast<uint8_t>(difference | (a[i] ^ b[i]));
  // volatile keeps the compiler from leaving the loop at the first difference.
  volatile uint8_t result = difference;
  return result == 0;
}

}  // namespace ark
