// Builds the queues of measured tasks, runs them, and derives a Target's figures. See measure.hpp.
#include "compiler/runtime/measure.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "compiler/runtime/worker_pool.hpp"
#include "cpu/loop.hpp"
#include "util/error.hpp"

namespace ark::compiler {

const char kMeasuredSource[] = "#include \"cpu/measure.hpp\"\n";

namespace {

constexpr int kRounds = 8;
constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr int kEmpty = 256;  // empty tasks
constexpr int64_t kNumber = sizeof(float);

using Function = decltype(cpu::TaskEntry::function);

// The value below which `share` of the numbers are.
double quantile(std::vector<double> of, double share) {
  const auto at = of.begin() + static_cast<int64_t>(share * static_cast<double>(of.size()));
  std::nth_element(of.begin(), at, of.end());
  return *at;
}

double microseconds(uint64_t begin, uint64_t end) {
  return static_cast<double>(end - begin) * 1e-3;
}

// Queues of tasks that a launch runs once through.
class Queues {
 public:
  explicit Queues(int workers) : tasks_(static_cast<size_t>(workers)) {}

  // Adds a task that waits for event `wait` and signals event `signal`; -1: none. Each event is signalled once.
  void add(int worker, Function function, std::array<char*, 3> operands, int64_t end, int wait = -1, int signal = -1) {
    cpu::TaskEntry task{};
    task.function = function;
    task.end = end;
    task.task = count_++;
    task.operands = static_cast<int32_t>(operands_.size());
    task.operand_count = static_cast<int32_t>(operands.size());
    for (char* one : operands) {
      operands_.push_back({cpu::Operand::input, static_cast<uint32_t>(inputs_.size()), 0});
      inputs_.push_back(one);
    }
    task.waits = static_cast<int32_t>(waits_.size());
    task.wait_count = wait < 0 ? 0 : 1;
    if (wait >= 0) waits_.push_back({wait, 1});
    task.signals = static_cast<int32_t>(signals_.size());
    task.signal_count = signal < 0 ? 0 : 1;
    if (signal >= 0) signals_.push_back(signal);
    events_ = std::max({events_, wait + 1, signal + 1});
    tasks_[static_cast<size_t>(worker)].push_back(task);
  }

  void run() {
    stamps_.assign(static_cast<size_t>(count_), {});
    wait_ends_.assign(waits_.size() + 1, 0);
    run(1, true);
  }
  // Runs the first worker's queue `steps` times without stamps, which would take longer than an empty task. Returns
  // microseconds per run.
  double run_alone(uint64_t steps) {
    const uint64_t begin = cpu::now_ns();
    run(steps, false);
    return microseconds(begin, cpu::now_ns()) / static_cast<double>(steps);
  }

  // Over all tasks.
  double median_task_us() const {
    std::vector<double> all;
    for (const cpu::Stamp& one : stamps_) all.push_back(microseconds(one.begin_ns, one.end_ns));
    return quantile(std::move(all), 0.5);
  }

  // For a ring: times from the end of each task to the end of the next one's wait for it.
  void add_handed_us(std::vector<double>& all) const {
    for (size_t i = 1; i < stamps_.size(); ++i) all.push_back(microseconds(stamps_[i - 1].end_ns, wait_ends_[i - 1]));
  }

 private:
  void run(uint64_t steps, bool stamped) {
    std::vector<cpu::EventCount> events(static_cast<size_t>(events_) + 1);
    std::vector<cpu::QueueEntry> queues;
    for (const auto& one : tasks_) queues.push_back({one.data(), static_cast<int32_t>(one.size()), nullptr, 0});
    const cpu::Tables tables{
        queues.data(), operands_.data(), waits_.data(), signals_.data(), 0, static_cast<uint64_t>(count_)};
    cpu::Report report{};
    cpu::Launch launch{};
    launch.abi = cpu::kAbi;
    launch.workers = static_cast<uint32_t>(tasks_.size());
    launch.inputs = inputs_.data();
    launch.events = events.data();
    launch.report = &report;
    launch.stamps = stamped ? stamps_.data() : nullptr;
    launch.wait_ends = wait_ends_.data();
    launch.stamped = launch.step = 1;
    launch.steps = steps;
    launch.waits = waits_.size();
    launch.timeout_ns = 1'000'000'000u;
    struct Job {
      const cpu::Launch& launch;
      const cpu::Tables& tables;
    } job{launch, tables};
    WorkerPool::run(
        static_cast<int>(tasks_.size()),
        [](void* argument, int worker) {
          const Job& mine = *static_cast<const Job*>(argument);
          cpu::run_worker(mine.launch, mine.tables, worker);
        },
        &job);
    if (report.abort != 0) throw Error(ErrorKind::timeout, "workers did not hand over a task within a second");
  }

  std::vector<std::vector<cpu::TaskEntry>> tasks_;
  std::vector<const void*> inputs_;
  std::vector<cpu::Operand> operands_;
  std::vector<cpu::WaitFor> waits_;
  std::vector<cpu::Stamp> stamps_;   // by task, in the order added
  std::vector<uint64_t> wait_ends_;  // by wait
  std::vector<int32_t> signals_;
  int events_ = 0;
  int32_t count_ = 0;
};

// A part of memory per worker, first touched by that worker. Uses pages like those of tensors.
class Memory {
 public:
  Memory(int workers, int64_t part) : workers_(workers), part_((part + 4095) / 4096 * 4096) {
    void* made = ::mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) throw system_error("no memory to measure what work costs", errno);
    data_ = static_cast<char*>(made);
    on_all([](char* data, int64_t size) { std::memset(data, 0, static_cast<size_t>(size)); });
  }
  ~Memory() { ::munmap(data_, bytes()); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  char* part(int worker) const { return data_ + worker * part_; }

  // Evicts the memory from all caches, so that little of it measures like much.
  void evict() {
#if defined(__x86_64__)
    on_all([](char* data, int64_t size) {
      for (int64_t at = 0; at < size; at += 64) __builtin_ia32_clflush(data + at);
      __builtin_ia32_mfence();
    });
#endif
  }

 private:
  size_t bytes() const {
    return static_cast<size_t>(workers_ * part_);
  }
  template <class Body>
  void on_all(Body) {
    WorkerPool::run(
        workers_,
        [](void* memory, int worker) {
          const auto& mine = *static_cast<Memory*>(memory);
          Body()(mine.part(worker), mine.part_);
        },
        this);
  }

  const int workers_;
  const int64_t part_;
  char* data_ = nullptr;
};

}  // namespace

Target measured(Target target, const jit::LoadedLibrary& library) {
  const auto function = [&](const char* name) { return reinterpret_cast<Function>(library.symbol(name)); };
  const auto* shape = static_cast<const int64_t*>(library.symbol("ark_measured_shape"));
  const int64_t depth = shape[0], columns = shape[1], rows = shape[2];
  const int64_t matrix = depth * columns * kNumber;
  const int64_t block = rows * depth * kNumber, result = rows * columns * kNumber;
  const int64_t third = block / 4;  // operands of additions, small enough to stay cached
  const int workers = target.workers;
  constexpr int kMatrices = 24;  // 6 MB
  Memory memory(workers, block + result + kMatrices * matrix);

  Queues far(workers), products(workers), pointwise(workers), near(workers), ring(workers), empty(1);
  for (int worker = 0; worker < workers; ++worker) {
    char *a = memory.part(worker), *out = a + block, *matrices = out + result;
    for (int i = 0; i < kMatrices; ++i)
      far.add(worker, function("ark_measured_row"), {a, matrices + i * matrix, out}, columns);
    for (int i = 0; i < 4; ++i)
      products.add(worker, function("ark_measured_block"), {a, matrices + i * matrix, out}, columns);
    for (int i = 0; i < 64; ++i)
      near.add(worker, function("ark_measured_add"), {a, a + third, a + 2 * third}, third / kNumber);
    for (int i = 0; i < 8; ++i)
      pointwise.add(worker, function("ark_measured_gelu"), {a, a, a + 2 * third}, third / kNumber);
  }
  for (int i = 0; i < kEmpty; ++i) {
    char* a = memory.part(0) + i * 64;
    empty.add(0, function("ark_measured_nothing"), {a, a, a}, 1);
  }
  // A chain of tasks that goes round the workers.
  for (int i = 0; i < 64; ++i) {
    char* a = memory.part(i % workers);
    ring.add(i % workers, function("ark_measured_nothing"), {a, a, a}, 1, i - 1, i);
  }
  // Interleave the measurements, so that a disturbance affects few samples of each. Parameters are read from memory, in
  // products of few rows and of many, by all workers at once.
  double far_us = kNever, product_us = kNever, pointwise_us = kNever, near_us = kNever, empty_us = kNever;
  std::vector<double> handed_us;
  for (int round = 0; round < kRounds; ++round) {
    for (const auto& [queues, best] :
         {std::pair(&far, &far_us), {&products, &product_us}, {&pointwise, &pointwise_us}, {&near, &near_us}}) {
      memory.evict();
      queues->run();
      *best = std::min(*best, queues->median_task_us());
      if (workers == 1) continue;
      ring.run();
      ring.add_handed_us(handed_us);
    }
    empty_us = std::min(empty_us, empty.run_alone(16) / kEmpty);
  }
  target.bytes_per_us = static_cast<double>(matrix) / far_us;
  target.flops_per_us = static_cast<double>(2 * rows * depth * columns) / product_us;
  target.pointwise_per_us = static_cast<double>(14 * third / kNumber) / pointwise_us;
  target.cached_bytes_per_us = static_cast<double>(3 * third) / near_us;
  target.task_us = empty_us;
  // On a busy machine workers share a processor, and most waits last until one yields. If all do, there is nothing to
  // learn here.
  constexpr double kSpinUs = 5;
  if (const double quick = workers > 1 ? quantile(handed_us, 0.1) : kNever; quick < kSpinUs) target.wait_us = quick;
  return target;
}

}  // namespace ark::compiler
