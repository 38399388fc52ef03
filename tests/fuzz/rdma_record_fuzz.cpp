// Fuzzes the decoders of RDMA records, which come from a store. They must throw Error(invalid_argument) or return a
// value that encodes to the same bytes.
#include <algorithm>
#include <cstdlib>

#include "dma/rdma/endpoint.hpp"
#include "driver.hpp"

namespace {

template <class Record>
void check(std::span<const uint8_t> bytes) {
  try {
    const std::vector<uint8_t> again = Record::decode(bytes).encode();
    if (!std::equal(again.begin(), again.end(), bytes.begin(), bytes.end())) std::abort();
  } catch (const ark::Error& error) {
    if (error.kind() != ark::ErrorKind::invalid_argument) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  check<ark::rdma::Endpoint>({data, size});
  check<ark::rdma::Offer>({data, size});
  return 0;
}

std::vector<std::vector<uint8_t>> fuzz_seeds() {
  ark::rdma::Endpoint endpoint;
  endpoint.to = 1;
  endpoint.size = 2;
  endpoint.pair = 0x123456;
  endpoint.inbox = 0x7f0000000000;
  endpoint.slots = 64;
  endpoint.slot_bytes = 4096;
  ark::rdma::Offer usable, unable;
  usable.size = unable.size = 2;
  usable.usable = true;
  usable.mtu = 4096;
  usable.rails = 2;
  usable.device = "mlx5_0";
  unable.reason = "no libibverbs";
  return {endpoint.encode(), usable.encode(), unable.encode()};
}
