// Data-parallel training on two processes without Python: LibTorch for the mathematics, ark for the gradients.
//
// The parent forks before any thread exists. The two ranks meet through a file, sum a tensor, then train one linear
// model, each on its own half of the data, averaging gradients after every backward pass. Both must end with the same
// bits, close to the weights that generated the data.
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include "process_group/process_group_ark.hpp"

namespace {

constexpr int kRanks = 2;
constexpr int kSteps = 200;
constexpr int kRows = 256;
constexpr int kFeatures = 8;

void all_reduce(ark::ProcessGroupArk& group, const at::Tensor& tensor, c10d::ReduceOp op) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  if (auto work = group.allreduce(tensors, options)) work->wait();
}

bool sums_up(ark::ProcessGroupArk& group, int rank) {
  auto tensor = torch::arange(4, torch::kFloat) + rank;
  all_reduce(group, tensor, c10d::ReduceOp::SUM);
  return torch::equal(tensor, 2 * torch::arange(4, torch::kFloat) + 1);
}

// Trains on this rank's half and returns the weights.
at::Tensor train(ark::ProcessGroupArk& group, int rank, const at::Tensor& truth) {
  torch::manual_seed(1 + rank);  // own data on each rank
  auto inputs = torch::randn({kRows, kFeatures});
  auto targets = inputs.matmul(truth);
  torch::manual_seed(7);  // equal initial weights
  auto weights = torch::randn({kFeatures, 1}).requires_grad_();
  torch::optim::SGD optimizer({weights}, torch::optim::SGDOptions(0.1));
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    auto loss = torch::mse_loss(inputs.matmul(weights), targets);
    loss.backward();
    all_reduce(group, weights.grad(), c10d::ReduceOp::AVG);
    optimizer.step();
    if (rank == 0 && step % 50 == 0) std::printf("step %3d  loss %.3e\n", step, loss.item<double>());
  }
  return weights.detach();
}

int run(int rank, const std::string& path) {
  torch::set_num_threads(1);
  auto store = c10::make_intrusive<c10d::FileStore>(path, kRanks);
  auto options = c10::make_intrusive<ark::ProcessGroupArk::Options>();
  options->timeout = std::chrono::seconds(60);
  auto group = ark::ProcessGroupArk::create(store, rank, kRanks, options);

  if (!sums_up(*group, rank)) return std::fprintf(stderr, "rank %d: wrong sum\n", rank), 1;
  auto truth = torch::linspace(-1, 1, kFeatures).unsqueeze(1);
  auto weights = train(*group, rank, truth);

  // Equal on both ranks to the last bit, because maximum and minimum agree.
  auto largest = weights.clone();
  auto smallest = weights.clone();
  all_reduce(*group, largest, c10d::ReduceOp::MAX);
  all_reduce(*group, smallest, c10d::ReduceOp::MIN);
  const bool same = torch::equal(largest, smallest);
  const bool learnt = torch::allclose(weights, truth, 1e-3, 1e-3);
  if (rank == 0) std::printf("ranks agree: %s, learnt: %s\n", same ? "yes" : "no", learnt ? "yes" : "no");
  group->shutdown();
  return same && learnt ? 0 : 1;
}

int run_guarded(int rank, const std::string& path) {
  try {
    return run(rank, path);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    return 1;
  }
}

}  // namespace

int main() {
  char folder[] = "/tmp/ark-example-XXXXXX";
  if (mkdtemp(folder) == nullptr) return std::perror("mkdtemp"), 1;
  const std::string path = std::string(folder) + "/store";
  pid_t children[kRanks];
  for (int rank = 0; rank < kRanks; ++rank) {
    children[rank] = fork();
    if (children[rank] < 0) return std::perror("fork"), 1;
    if (children[rank] == 0) std::exit(run_guarded(rank, path));
  }
  int failed = 0;
  for (pid_t child : children) {
    int status = 0;
    if (waitpid(child, &status, 0) < 0 || status != 0) ++failed;
  }
  unlink(path.c_str());
  rmdir(folder);
  return failed == 0 ? 0 : 1;
}
