// Compares random operations of CudaCommunicator with the shared-memory communicator, bit for bit, without PyTorch.
//
// usage: communicator_random RANKS OPERATIONS SEED KERNELS_DIR [RANK FOLDER]
// One process per rank, rank r on device r. If there are more ranks than devices, they share devices, which is slow.
// All ranks draw the same operation from (SEED, number), and every rank's input comes from (SEED, number, rank): sizes
// from zero to megabytes, any alignment, random bits half of the time. Outputs are poisoned, and some operations repeat
// without a pause. With an odd SEED half of the memory is registered, and each rank chooses the buffers' places itself.
//
// With RANK and FOLDER this process is only that rank, and meets the others in the folder (new and empty). Sizes are
// then small and time limits six times as long, for compute-sanitizer with a process per rank.
#include <sys/prctl.h>

#include <csignal>
#include <cstring>
#include <iostream>
#include <random>

#include "collectives/cpu/reduce/reduce.hpp"
#include "collectives/cpu/shm_communicator.hpp"
#include "collectives/cuda/cuda_communicator.hpp"
#include "collectives/cuda/registration.hpp"
#include "cuda/driver.hpp"
#include "jit/settings.hpp"
#include "support/processes.hpp"

using namespace ark;

namespace {

constexpr size_t kPool = size_t{160} << 20;
using Random = std::mt19937_64;

struct Arguments {
  int ranks;
  int operations;
  uint64_t seed;
  std::string kernels;
  int patience = 1;
  int largest = 23;  // size class
};

void fill(std::vector<unsigned char>& bytes, DType dtype, uint64_t seed) {
  Random random(seed);
  const bool sane = (seed & 1) != 0;
  if (sane && (dtype == DType::f32 || dtype == DType::c64)) {
    for (size_t i = 0; i + 4 <= bytes.size(); i += 4) {
      const float value = static_cast<float>(static_cast<int64_t>(random()) >> 20) * 0x1p-42f;
      std::memcpy(&bytes[i], &value, 4);
    }
  } else if (sane && dtype == DType::bf16) {
    for (size_t i = 0; i + 2 <= bytes.size(); i += 2) {
      const float value = static_cast<float>(static_cast<int64_t>(random()) >> 20) * 0x1p-42f;
      std::memcpy(&bytes[i], reinterpret_cast<const char*>(&value) + 2, 2);
    }
  } else {
    for (size_t i = 0; i < bytes.size(); i += 8) {
      const uint64_t value = random();
      std::memcpy(&bytes[i], &value, std::min<size_t>(8, bytes.size() - i));
    }
  }
}

class Rank {
 public:
  Rank(const Arguments& arguments, int rank, KeyValueStore& store) : arguments_(arguments), rank_(rank) {
    ConnectOptions connecting;
    connecting.rank = rank;
    connecting.size = arguments.ranks;
    connecting.segment_bytes = ShmCommunicator::segment_bytes(arguments.ranks);
    connecting.timeout = std::chrono::seconds(60) * arguments.patience;
    ConnectResult result = connect(store, connecting);
    ShmOptions shm;
    shm.timeout = std::chrono::seconds(60) * arguments.patience;
    cpu_ = std::make_unique<ShmCommunicator>(rank, arguments.ranks, std::move(*result.neighbourhood), shm);
  }

  std::string run(std::shared_ptr<KeyValueStore> cuda_store) {
    int devices = 0;
    check(driver().device_get_count(&devices), "device count");
    context_.emplace(rank_ % devices);
    CudaCommunicator::Options options;
    options.device = rank_ % devices;
    options.device_each = arguments_.ranks <= devices;
    if (!options.device_each) largest_ = std::min(largest_, 17);
    options.timeout = std::chrono::seconds(60) * arguments_.patience;
    // Also uses the algorithms of large sizes for smaller ones.
    CudaDispatch dispatch = CudaDispatch::measured(arguments_.ranks);
    if (const uint64_t kind = arguments_.seed % 3; kind != 0)
      for (const CudaDispatchField& field : kCudaDispatchFields)
        if (const uint64_t early = field.early[kind - 1]; early != 0) dispatch.*field.value = early;
    options.dispatch = dispatch;
    std::string why;
    gpu_ = CudaCommunicator::create(rank_, arguments_.ranks, cuda_store, cpu_->health(), options, why);
    if (!gpu_) return "no communicator: " + why;
    for (CUstream& stream : streams_)
      check(driver().stream_create_with_priority(&stream, CU_STREAM_NON_BLOCKING, 0), "stream");
    for (CUdeviceptr* pool : {&in_, &out_})
      *pool = reinterpret_cast<CUdeviceptr>(ark_pool_alloc(2 * kPool, options.device, nullptr));
    if (arguments_.seed % 2 == 1 && arguments_.ranks > 1) {
      MemoryMeeting::Options meeting;
      meeting.rank = rank_, meeting.size = arguments_.ranks;
      meeting.timeout = options.timeout;
      meeting.name = "registration";
      meeting.check = [] {};
      Registration registration(MemoryMeeting::join(*cuda_store, meeting, why));
      for (const CUdeviceptr pool : {in_, out_}) {
        char* const data = reinterpret_cast<char*>(pool);
        registration.add(
            [&] {
              return RegisteredRange{data, kPool, find_shareable(data, kPool)};
            },
            [&] { return &gpu_->windows(); });
      }
    }
    for (number_ = 0; number_ < arguments_.operations; ++number_) {
      const std::string problem = one();
      if (!problem.empty()) return "operation " + std::to_string(number_) + ": " + problem;
    }
    std::string counts;
    for (int kind = 0; kind <= kKinds; ++kind)
      counts += std::string(" ") + (kind == kKinds ? "send_recv" : name_of(static_cast<Kind>(kind))) + " " +
                std::to_string(done_[kind]);
    gpu_.reset();
    return "right:" + counts;
  }

 private:
  Operation operation(Kind kind, DType dtype, ReduceOp op, int root) {
    Operation made;
    const auto limit = std::chrono::seconds(20) * arguments_.patience;
    made.context = {name_of(kind), ++sequence_, Clock::now() + limit, limit};
    made.descriptor.sequence = sequence_;
    made.descriptor.kind = kind;
    made.descriptor.dtype = dtype;
    made.descriptor.op = op;
    made.descriptor.root = root;
    made.factor = 0.75 + rank_;
    made.stream = streams_[0];
    return made;
  }

  std::string one() {
    Random random(arguments_.seed * 1000003 + number_);
    const int n = arguments_.ranks;
    const int kind_number = static_cast<int>(random() % (kKinds + 1));
    const bool transfer = kind_number == kKinds;
    const Kind kind = transfer ? Kind::all_to_all : static_cast<Kind>(kind_number);
    const bool reduces = kind == Kind::all_reduce || kind == Kind::reduce || kind == Kind::reduce_scatter;
    DType dtype;
    ReduceOp op = ReduceOp::sum;
    do {
      dtype = static_cast<DType>(random() % kDTypes);
      if (random() % 2) dtype = random() % 2 ? DType::bf16 : DType::f32;
      op = random() % 2 ? ReduceOp::sum : static_cast<ReduceOp>(random() % kReduceOps);
    } while (reduces && why_unsupported(dtype, op) != nullptr);
    if (!reduces) dtype = DType::raw8;
    const size_t element = size_of(dtype);
    const bool rooted =
        kind == Kind::reduce || kind == Kind::broadcast || kind == Kind::gather || kind == Kind::scatter;
    const int root = rooted ? static_cast<int>(random() % n) : -1;
    const int size_class = std::min(static_cast<int>(random() % 24), largest_);
    size_t count = random() % ((size_t{1} << std::min(size_class, 20)) + 1);
    if (size_class == 23) count = (size_t{1} << (22 + random() % 3)) + random() % 1000;
    count = std::min(count, kPool / 2 / element / n);
    const size_t bytes = count * element;
    const bool gathers = kind == Kind::all_gather || kind == Kind::gather;
    const bool spreads = kind == Kind::reduce_scatter || kind == Kind::scatter;
    std::vector<size_t> sends(n), receives(n);  // all_to_all
    for (int from = 0; from < n; ++from)
      for (int to = 0; to < n; ++to) {
        size_t size = random() % 4 == 0 ? 0 : random() % (bytes + 1);
        if (transfer && from == to) size = 0;
        if (from == rank_) sends[to] = size;
        if (to == rank_) receives[from] = size;
      }
    size_t in_bytes = spreads ? bytes * n : bytes, out_bytes = gathers ? bytes * n : bytes;
    if (kind == Kind::all_to_all) {
      in_bytes = out_bytes = 0;
      for (int r = 0; r < n; ++r) in_bytes += sends[r], out_bytes += receives[r];
    }
    if (kind == Kind::barrier) in_bytes = out_bytes = 0;
    const bool in_place = (kind == Kind::all_reduce && random() % 2) || kind == Kind::broadcast;
    const size_t in_at = random() % 16, out_at = random() % 16;
    const int repeats = static_cast<int>(random() % 3) + 1;

    std::vector<unsigned char> in(in_bytes), expected(out_bytes, 0xa5), found(out_bytes);
    fill(in, dtype, arguments_.seed + 77 * number_ + 1000000007 * rank_);
    if (in_place) expected = in;
    const Operation on_cpu = operation(kind, dtype, op, root);
    call(*cpu_, on_cpu, kind, transfer, in.data(), expected.data(), count, bytes, sends, receives);
    Operation on_gpu = on_cpu;
    // For copy engines, either all ranks pass registered memory or none does.
    const uint64_t smallest = arguments_.seed % 3 == 2 ? 4096 : 8 << 20;
    Random own(arguments_.seed * 77 + number_ * 8 + (arguments_.seed % 3 == 1 || bytes < smallest ? rank_ : 0));
    const CUdeviceptr gpu_in = in_ + in_at + own() % 2 * kPool;
    const CUdeviceptr gpu_out = in_place ? gpu_in : out_ + out_at + own() % 2 * kPool;
    for (int turn = 0; turn < repeats; ++turn) {
      copy(gpu_in, in.data(), in_bytes);
      if (!in_place) check(driver().memset_d8_async(gpu_out, 0xa5, out_bytes, streams_[0]), "memset");
      check(driver().memset_d8_async(gpu_out + out_bytes, 0x5a, 16, streams_[0]), "memset");
      if (transfer) {
        check(driver().stream_synchronize(streams_[0]), "stream");
        transfers(on_gpu, gpu_in, gpu_out, sends, receives);
      } else {
        call(*gpu_, on_gpu, kind, false, reinterpret_cast<void*>(gpu_in), reinterpret_cast<void*>(gpu_out), count,
             bytes, sends, receives);
      }
    }
    std::vector<unsigned char> guard(16);
    copy_back(found, gpu_out);
    copy_back(guard, gpu_out + out_bytes);
    check(driver().stream_synchronize(streams_[0]), "stream");
    gpu_->check(on_gpu.context);
    ++done_[kind_number];
    const std::string what = std::string(transfer ? "send_recv" : name_of(kind)) + " dtype " +
                             std::to_string(static_cast<int>(dtype)) + " op " + std::to_string(static_cast<int>(op)) +
                             " count " + std::to_string(count) + " offsets " + std::to_string(in_at) + " " +
                             std::to_string(out_at) + " root " + std::to_string(root);
    if (guard != std::vector<unsigned char>(16, 0x5a)) return what + ": wrote behind its output";
    if (found == expected) return {};
    size_t at = 0, wrong = 0;
    for (size_t i = out_bytes; i-- > 0;)
      if (found[i] != expected[i]) at = i, ++wrong;
    return what + ": " + std::to_string(wrong) + " of " + std::to_string(out_bytes) + " bytes differ, first at " +
           std::to_string(at) + ": " + std::to_string(found[at]) + " instead of " + std::to_string(expected[at]);
  }

  void call(Communicator& group, const Operation& op, Kind kind, bool transfer, void* in, void* out, size_t count,
            size_t bytes, const std::vector<size_t>& sends, const std::vector<size_t>& receives) {
    const int n = arguments_.ranks;
    std::vector<const void*> ins(n);
    std::vector<void*> outs(n);
    for (int r = 0; r < n; ++r) {
      ins[r] = static_cast<char*>(in) + r * bytes;
      outs[r] = static_cast<char*>(out) + r * bytes;
    }
    const bool is_root = op.descriptor.root == rank_;
    switch (kind) {
      case Kind::all_reduce: return group.all_reduce(op, in == out ? out : in, out, count);
      case Kind::reduce: return group.reduce(op, in, is_root ? out : nullptr, count);
      case Kind::reduce_scatter: return group.reduce_scatter(op, ins.data(), out, count);
      case Kind::all_gather: return group.all_gather(op, in, outs.data(), bytes);
      case Kind::broadcast: return group.broadcast(op, out, bytes);
      case Kind::gather: return group.gather(op, in, is_root ? outs.data() : nullptr, bytes);
      case Kind::scatter: return group.scatter(op, is_root ? ins.data() : nullptr, out, bytes);
      case Kind::barrier: return group.barrier(op);
      case Kind::all_to_all: break;
    }
    (void)transfer;
    std::vector<Bytes> from;
    std::vector<MutableBytes> to;
    for (int r = 0; r < n; ++r) {
      from.push_back({in, sends[r]});
      to.push_back({out, receives[r]});
      in = static_cast<char*>(in) + sends[r];
      out = static_cast<char*>(out) + receives[r];
    }
    group.all_to_all(op, from.data(), to.data());
  }

  // Messages to and from every peer at once, each on its own stream.
  void transfers(Operation op, CUdeviceptr in, CUdeviceptr out, const std::vector<size_t>& sends,
                 const std::vector<size_t>& receives) {
    for (int peer = 0; peer < arguments_.ranks; ++peer) {
      op.stream = streams_[1 + 2 * peer];
      if (sends[peer] != 0) gpu_->send(op, reinterpret_cast<void*>(in), sends[peer], peer);
      op.stream = streams_[2 + 2 * peer];
      if (receives[peer] != 0) gpu_->recv(op, reinterpret_cast<void*>(out), receives[peer], peer);
      in += sends[peer], out += receives[peer];
    }
    for (CUstream stream : streams_) check(driver().stream_synchronize(stream), "stream");
  }

  void copy(CUdeviceptr to, const std::vector<unsigned char>::pointer from, size_t bytes) {
    if (bytes != 0) check(driver().memcpy_async(to, reinterpret_cast<CUdeviceptr>(from), bytes, streams_[0]), "memcpy");
  }
  void copy_back(std::vector<unsigned char>& to, CUdeviceptr from) {
    if (!to.empty())
      check(driver().memcpy_async(reinterpret_cast<CUdeviceptr>(to.data()), from, to.size(), streams_[0]), "memcpy");
  }

  const Arguments& arguments_;
  const int rank_;
  std::unique_ptr<ShmCommunicator> cpu_;
  std::unique_ptr<CudaCommunicator> gpu_;
  std::optional<CurrentContext> context_;
  CUstream streams_[1 + 2 * 8] = {};
  CUdeviceptr in_ = 0, out_ = 0;
  int number_ = 0;
  int largest_ = arguments_.largest;
  uint64_t sequence_ = 0;
  int done_[kKinds + 1] = {};
};

}  // namespace

int main(int count, char** values) {
  if (count != 5 && count != 7) {
    std::cerr << "usage: communicator_random RANKS OPERATIONS SEED KERNELS_DIR [RANK FOLDER]\n";
    return 2;
  }
  Arguments arguments{std::stoi(values[1]), std::stoi(values[2]), std::stoull(values[3]), values[4]};
  auto run = [&](int rank, const std::filesystem::path& folder) {
    jit::Settings settings;
    settings.version = "test";
    settings.kernels_dir = arguments.kernels;
    settings.toolkit_dirs = {"/usr/local/cuda"};
    jit::configure(settings);
    for (const char* name : {"cpu", "cuda"}) std::filesystem::create_directory(folder / name);
    test::DirectoryStore store(folder / "cpu");
    const auto cuda_store = std::make_shared<test::DirectoryStore>(folder / "cuda");
    return Rank(arguments, rank, store).run(cuda_store);
  };
  if (count == 7) {
    arguments.patience = 6;
    arguments.largest = 18;
    try {
      const std::string text = run(std::stoi(values[5]), values[6]);
      std::cout << text << std::endl;
      return text.starts_with("right:") ? 0 : 1;
    } catch (const std::exception& error) {
      std::cout << error.what() << std::endl;
      return 1;
    }
  }
  test::TemporaryDirectory directory;
  test::Ranks ranks(arguments.ranks, [&](int rank) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    return run(rank, directory.path());
  });
  bool right = true;
  for (const test::Result& result : ranks.wait(400)) {
    std::cout << result.text << std::endl;
    right = right && result.text.starts_with("right:");
  }
  return right ? 0 : 1;
}
