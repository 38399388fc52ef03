// Fuzzes every decoder of the bootstrap with arbitrary bytes. It must throw Error(invalid_argument) or return a value
// that encodes to the same bytes. Anything else (another exception, a crash, a lossy decode) aborts.
#include <algorithm>
#include <cstdlib>

#include "driver.hpp"
#include "shm/handle.hpp"
#include "shm/hello_message.hpp"
#include "util/error.hpp"

namespace {

template <typename Decode>
void check(std::span<const uint8_t> bytes, Decode decode) {
  try {
    const std::vector<uint8_t> again = decode(bytes).encode();
    if (!std::equal(again.begin(), again.end(), bytes.begin(), bytes.end())) std::abort();
  } catch (const ark::Error& error) {
    if (error.kind() != ark::ErrorKind::invalid_argument) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span<const uint8_t> bytes(data, size);
  check(bytes, ark::HandleRecord::decode);
  check(bytes, ark::HelloMessage::decode);
  check(bytes, ark::OutcomeMessage::decode);
  for (uint32_t ranks : {0u, 1u, 2u, 3u, 65536u})
    check(bytes, [ranks](std::span<const uint8_t> b) { return ark::OfferMessage::decode(b, ranks); });
  return 0;
}

std::vector<std::vector<uint8_t>> fuzz_seeds() {
  ark::HandleRecord record;
  record.rank = 1;
  record.size = 2;
  std::vector<std::vector<uint8_t>> seeds{record.encode()};
  record.sharing = ark::Sharing::willing;
  record.nonce.fill(0x5a);
  record.host_id.fill(0xc3);
  record.network_space = 4026531833;
  record.uid = record.pid = 1000;
  record.segment_bytes = 1 << 20;
  record.socket_name = "ark-0123456789abcdef0123456789abcdef";
  seeds.push_back(record.encode());

  ark::HelloMessage hello;
  hello.from = 1;
  hello.size = 2;
  hello.segment_bytes = 1 << 20;
  hello.nonce = record.nonce;
  seeds.push_back(hello.encode());

  ark::OutcomeMessage outcome;
  seeds.push_back(outcome.encode());
  outcome.kind = ark::OutcomeMessage::Kind::apart;
  outcome.text = "rank 0 cannot share memory with rank 1: no";
  outcome.peer = 1;
  seeds.push_back(outcome.encode());

  seeds.push_back(ark::OfferMessage{record.nonce, {record.nonce, record.host_id}}.encode());
  return seeds;
}
