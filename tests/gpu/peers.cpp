// Tests whether values arrive in peers' memory (collectives/cuda/peer_test.hpp), on real devices, without PyTorch.
//
// usage: peers RANKS LIAR KERNELS_DIR
// One process per rank, rank r on device r. Rank LIAR maps its own memory in place of the last other rank's (-1: none
// does), so that its kernel and copies miss their target, as with broken peer access. Prints each rank's verdict.
#include <sys/prctl.h>

#include <csignal>
#include <iostream>

#include "collectives/cuda/peer_test.hpp"
#include "cuda/driver.hpp"
#include "jit/settings.hpp"
#include "shm/symmetric_memory.hpp"
#include "support/processes.hpp"

using namespace ark;

namespace {

std::string verdict(int rank, int ranks, int liar, const std::filesystem::path& folder) {
  test::DirectoryStore store(folder);
  const ArenaLayout layout(ranks);
  const std::chrono::milliseconds timeout(60000);
  std::string why;
  const auto meeting = MemoryMeeting::join(store, {rank, ranks, timeout, "arena", [] {}}, why);
  if (!meeting) return why;
  SymmetricMemory::Options options;
  options.rank = rank, options.size = ranks, options.device = rank;
  options.bytes = layout.total;
  std::vector<DeviceMemory> memory = SymmetricMemory::create(*meeting, options, why);
  if (memory.empty()) return why;
  if (rank == liar) memory[rank == ranks - 1 ? ranks - 2 : ranks - 1] = DeviceMemory::allocate(rank, layout.total);
  PeerTest test;
  test.device = rank, test.layout = &layout, test.memory = &memory, test.copies = true;
  std::string text = "arrive";
  for (int time = 0; time < 2; ++time)  // the second time the result is known
    if (!test.passes(*meeting, why)) text = why;
  meeting->step([] {});  // no rank unmaps memory that others still write
  return text;
}

}  // namespace

int main(int count, char** values) {
  if (count != 4) {
    std::cerr << "usage: peers RANKS LIAR KERNELS_DIR\n";
    return 2;
  }
  const int size = std::stoi(values[1]), liar = std::stoi(values[2]);
  test::TemporaryDirectory directory;
  test::Ranks ranks(size, [&](int rank) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    jit::Settings settings;
    settings.version = "test";
    settings.kernels_dir = values[3];
    settings.toolkit_dirs = {"/usr/local/cuda"};
    jit::configure(settings);
    return verdict(rank, size, liar, directory.path());
  });
  for (const test::Result& result : ranks.wait(100)) std::cout << result.text << std::endl;
  return 0;
}
