// Tests every collective over shared memory, with threads as ranks. Results are compared with plain loops, algorithms
// with each other bit for bit, and all ranks must report failures the same way.
#include <algorithm>

#include "collectives/cpu/ranks.hpp"

namespace ark::test {
namespace {

constexpr size_t kSizes[] = {0, 1, 3, 17, 1000, 4099, 70001};

ShmOptions options_with(Algorithm algorithm, uint32_t chunk, uint64_t max_bytes) {
  ShmOptions options = default_options();
  for (Kind kind : {Kind::all_reduce, Kind::reduce}) {
    options.rules.push_back({kind, algorithm, 2, 0, 1000, max_bytes, chunk, 0});
    options.rules.push_back({kind, Algorithm::two_shot, 2, 0, 1000, ~uint64_t{0}, 4096, 0});
  }
  for (Kind kind :
       {Kind::all_gather, Kind::reduce_scatter, Kind::broadcast, Kind::gather, Kind::scatter, Kind::all_to_all}) {
    options.rules.push_back({kind, Algorithm::one_shot, 2, 0, 1000, ~uint64_t{0}, chunk, 0});
  }
  return options;
}

// Adds in float32 in rank order, independently of the kernels.
std::vector<float> rank_order_sum(const std::vector<std::vector<float>>& inputs) {
  std::vector<float> sums = inputs[0];
  for (size_t r = 1; r < inputs.size(); ++r) {
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += inputs[r][i];
  }
  return sums;
}

class Collectives : public testing::TestWithParam<std::tuple<int, uint32_t>> {
 protected:
  int size() const { return std::get<0>(GetParam()); }
  // Small chunks: one shot for small tensors, two shots above. Large chunks: always one shot, in several chunks.
  ShmOptions options() const {
    const uint32_t chunk = std::get<1>(GetParam());
    return options_with(Algorithm::one_shot, chunk, chunk > 2048 ? ~uint64_t{0} : 2048);
  }
};

TEST_P(Collectives, AllReduceAndReduce) {
  expect_no_errors(run_ranks(
      size(),
      [&](ShmCommunicator& group, int rank) {
        uint64_t sequence = 0;
        for (size_t count : kSizes) {
          std::vector<std::vector<float>> inputs;
          for (int r = 0; r < size(); ++r) inputs.push_back(random_floats(count, r * 31 + count));
          const auto expected = rank_order_sum(inputs);
          std::vector<float> out(count, -1), in_place = inputs[rank];
          group.all_reduce(operation(Kind::all_reduce, ++sequence, DType::f32, count), inputs[rank].data(), out.data(),
                           count);
          EXPECT_EQ(out, expected);
          group.all_reduce(operation(Kind::all_reduce, ++sequence, DType::f32, count), in_place.data(), in_place.data(),
                           count);
          EXPECT_EQ(in_place, expected);
          const int root = static_cast<int>(count % size());
          std::vector<float> rooted(count, -1);
          const auto untouched = inputs[rank];
          group.reduce(operation(Kind::reduce, ++sequence, DType::f32, count, ReduceOp::sum, root), inputs[rank].data(),
                       rank == root ? rooted.data() : nullptr, count);
          if (rank == root) {
            EXPECT_EQ(rooted, expected);
          }
          EXPECT_EQ(inputs[rank], untouched);
        }
      },
      options()));
}

TEST_P(Collectives, GatherScatterBroadcast) {
  expect_no_errors(run_ranks(
      size(),
      [&](ShmCommunicator& group, int rank) {
        uint64_t sequence = 0;
        for (size_t count : kSizes) {
          const size_t bytes = count * sizeof(float);
          const int root = static_cast<int>((count + 1) % size());
          const auto mine = random_floats(count, rank + 7);
          std::vector<std::vector<float>> outs(size(), std::vector<float>(count, -1));
          std::vector<void*> places;
          for (auto& out : outs) places.push_back(out.data());
          group.all_gather(operation(Kind::all_gather, ++sequence, DType::f32, count), mine.data(), places.data(),
                           bytes);
          for (int r = 0; r < size(); ++r) EXPECT_EQ(outs[r], random_floats(count, r + 7));
          for (auto& out : outs) std::fill(out.begin(), out.end(), -1.f);
          group.gather(operation(Kind::gather, ++sequence, DType::f32, count, ReduceOp::sum, root), mine.data(),
                       places.data(), bytes);
          for (int r = 0; r < size(); ++r) {
            EXPECT_EQ(outs[r], rank == root ? random_floats(count, r + 7) : std::vector<float>(count, -1));
          }
          std::vector<std::vector<float>> parts;
          std::vector<const void*> sources;
          for (int r = 0; r < size(); ++r) parts.push_back(random_floats(count, 100 * rank + r));
          for (auto& part : parts) sources.push_back(part.data());
          std::vector<float> received(count, -1);
          group.scatter(operation(Kind::scatter, ++sequence, DType::f32, count, ReduceOp::sum, root), sources.data(),
                        received.data(), bytes);
          EXPECT_EQ(received, random_floats(count, 100 * root + rank));
          std::vector<float> data = mine;
          group.broadcast(operation(Kind::broadcast, ++sequence, DType::f32, count, ReduceOp::sum, root), data.data(),
                          bytes);
          EXPECT_EQ(data, random_floats(count, root + 7));
          group.barrier(operation(Kind::barrier, ++sequence, DType::raw8, 0));
        }
      },
      options()));
}

TEST_P(Collectives, ReduceScatterAndAllToAll) {
  expect_no_errors(run_ranks(
      size(),
      [&](ShmCommunicator& group, int rank) {
        uint64_t sequence = 0;
        for (size_t count : kSizes) {
          auto part_of = [&](int from, int to) { return random_floats(count, from * 1000 + to); };
          std::vector<std::vector<float>> mine;
          std::vector<const void*> sources;
          for (int r = 0; r < size(); ++r) mine.push_back(part_of(rank, r));
          for (auto& part : mine) sources.push_back(part.data());
          std::vector<float> out(count, -1);
          group.reduce_scatter(operation(Kind::reduce_scatter, ++sequence, DType::f32, count), sources.data(),
                               out.data(), count);
          std::vector<std::vector<float>> theirs;
          for (int r = 0; r < size(); ++r) theirs.push_back(part_of(r, rank));
          EXPECT_EQ(out, rank_order_sum(theirs));
          // Uneven: rank a sends count * ((a + 2 b) % 3) floats to rank b.
          auto length = [&](int from, int to) { return count * ((from + 2 * to) % 3); };
          std::vector<std::vector<float>> sent, received;
          std::vector<ark::Bytes> ins;
          std::vector<MutableBytes> outs;
          for (int r = 0; r < size(); ++r) sent.push_back(random_floats(length(rank, r), rank * 77 + r));
          for (int r = 0; r < size(); ++r) received.emplace_back(length(r, rank), -1.f);
          for (int r = 0; r < size(); ++r) {
            ins.push_back({sent[r].data(), sent[r].size() * sizeof(float)});
            outs.push_back({received[r].data(), received[r].size() * sizeof(float)});
          }
          group.all_to_all(operation(Kind::all_to_all, ++sequence, DType::f32, 0), ins.data(), outs.data());
          for (int r = 0; r < size(); ++r) EXPECT_EQ(received[r], random_floats(length(r, rank), r * 77 + rank));
        }
      },
      options()));
}

INSTANTIATE_TEST_SUITE_P(Ranks, Collectives,
                         testing::Combine(testing::Values(1, 2, 3, 5), testing::Values(2048u, 65536u)));

TEST(CollectivesBits, NeitherAlgorithmNorChunkChangesThem) {
  constexpr int kRanks = 3;
  constexpr size_t kCount = 5003;
  std::vector<std::vector<float>> results;
  for (const ShmOptions& options :
       {options_with(Algorithm::one_shot, 65536, 65536), options_with(Algorithm::one_shot, 64, ~uint64_t{0}),
        options_with(Algorithm::two_shot, 64, ~uint64_t{0}), options_with(Algorithm::two_shot, 4096, ~uint64_t{0}),
        options_with(Algorithm::two_shot, 1 << 20, ~uint64_t{0})}) {
    std::vector<std::vector<float>> outs(kRanks, std::vector<float>(kCount));
    expect_no_errors(run_ranks(
        kRanks,
        [&](ShmCommunicator& group, int rank) {
          const auto in = random_floats(kCount, rank);
          group.all_reduce(operation(Kind::all_reduce, 1, DType::f32, kCount), in.data(), outs[rank].data(), kCount);
        },
        options));
    for (auto& out : outs) results.push_back(out);
  }
  for (const auto& result : results)
    EXPECT_EQ(std::memcmp(result.data(), results[0].data(), kCount * sizeof(float)), 0);
}

TEST(CollectivesBits, FactorsOfEveryRankAreUsed) {
  for (uint64_t one_shot_bytes : {uint64_t{4096}, uint64_t{0}}) {
    expect_no_errors(run_ranks(
        3,
        [&](ShmCommunicator& group, int rank) {
          const std::vector<float> in(100, 1.f);
          std::vector<float> out(100);
          auto op = operation(Kind::all_reduce, 1, DType::f32, 100, ReduceOp::premul_sum);
          op.factor = rank + 0.5;
          group.all_reduce(op, in.data(), out.data(), 100);
          EXPECT_EQ(out, std::vector<float>(100, 4.5f));
        },
        options_with(Algorithm::one_shot, 4096, one_shot_bytes)));
  }
}

// All ranks that disagree must get an error, and no output byte may be written.
void expect_mismatch(const std::function<Operation(int rank)>& op_of, bool debug, const std::string& words) {
  ShmOptions options = default_options();
  options.debug = debug;
  const auto errors = run_ranks(
      3,
      [&](ShmCommunicator& group, int rank) {
        const Operation op = op_of(rank);
        std::vector<float> data(64, 1.f), out(64, -7.f);
        try {
          if (op.descriptor.kind == Kind::all_reduce)
            group.all_reduce(op, data.data(), out.data(), op.descriptor.count);
          if (op.descriptor.kind == Kind::broadcast) group.broadcast(op, data.data(), op.descriptor.count * 4);
          group.barrier(operation(Kind::barrier, op.descriptor.sequence + 1, DType::raw8, 0));
        } catch (...) {
          EXPECT_EQ(out, std::vector<float>(64, -7.f));
          throw;
        }
      },
      options);
  for (const auto& error : errors) {
    ASSERT_TRUE(error);
    EXPECT_EQ(error->kind(), ErrorKind::mismatch) << error->what();
    EXPECT_NE(std::string(error->what()).find(words), std::string::npos) << error->what();
  }
}

TEST(Mismatch, CountDtypeOpKindAndRoot) {
  auto all_reduce = [](size_t count, DType dtype = DType::f32, ReduceOp op = ReduceOp::sum) {
    return operation(Kind::all_reduce, 1, dtype, count, op);
  };
  expect_mismatch([&](int rank) { return all_reduce(rank == 1 ? 9 : 8); }, false, "9 x float32");
  expect_mismatch([&](int rank) { return all_reduce(8, rank == 2 ? DType::i32 : DType::f32); }, false, "int32");
  expect_mismatch([&](int rank) { return all_reduce(8, DType::f32, rank == 0 ? ReduceOp::max : ReduceOp::sum); }, false,
                  "MAX");
  expect_mismatch(
      [&](int rank) {
        return rank == 1 ? operation(Kind::broadcast, 1, DType::f32, 8, ReduceOp::sum, 0) : all_reduce(8);
      },
      false, "broadcast(");
  expect_mismatch(
      [&](int rank) { return operation(Kind::broadcast, 1, DType::f32, 8, ReduceOp::sum, rank == 2 ? 2 : 0); }, true,
      "root 2");
}

TEST(Failure, LateRankIsNamedByAll) {
  const auto errors = run_ranks(3, [&](ShmCommunicator& group, int rank) {
    if (rank == 2) {
      std::this_thread::sleep_for(milliseconds(700));
      return;
    }
    float value = 1;
    group.all_reduce(operation(Kind::all_reduce, 4, DType::f32, 1, ReduceOp::sum, -1, milliseconds(200)), &value,
                     &value, 1);
  });
  for (int rank : {0, 1}) {
    ASSERT_TRUE(errors[rank]);
    EXPECT_EQ(errors[rank]->kind(), ErrorKind::timeout) << errors[rank]->what();
    EXPECT_EQ(errors[rank]->context().peer, 2);
    EXPECT_NE(std::string(errors[rank]->what()).find("all_reduce #4"), std::string::npos);
  }
}

TEST(Failure, AbortReachesEveryRankAndStays) {
  const auto errors = run_ranks(3, [&](ShmCommunicator& group, int rank) {
    if (rank == 1) {
      std::this_thread::sleep_for(milliseconds(50));
      group.health().fail(Error(ErrorKind::aborted, "abort() was called", ErrorContext{1, 1, "abort", 0, {}}));
    }
    float value = 1;
    group.all_reduce(operation(Kind::all_reduce, 1, DType::f32, 1), &value, &value, 1);
  });
  for (const auto& error : errors) {
    ASSERT_TRUE(error);
    EXPECT_EQ(error->kind(), ErrorKind::aborted);
    EXPECT_EQ(error->context().peer, 1);
  }
}

TEST(Failure, WhoLeavesAfterDoingItsPartDoesNoHarm) {
  for (int round = 0; round < 20; ++round) {
    expect_no_errors(run_ranks(3, [&](ShmCommunicator& group, int) {
      float value = 1;
      group.all_reduce(operation(Kind::all_reduce, 1, DType::f32, 1), &value, &value, 1);
      EXPECT_EQ(value, 3.f);
    }));
  }
}

TEST(Failure, WhoLeavesWhileOthersAreLateDoesNoHarm) {
  expect_no_errors(run_ranks(3, [&](ShmCommunicator& group, int rank) {
    if (rank == 1) std::this_thread::sleep_for(milliseconds(300));  // rank 2 has left; the root waits for this rank
    const float value = 1;
    float sum = 0;
    group.reduce(operation(Kind::reduce, 1, DType::f32, 1, ReduceOp::sum, 0), &value, &sum, 1);
    if (rank == 0) {
      EXPECT_EQ(sum, 3.f);
    }
  }));
}

TEST(Failure, WhoLeavesWithoutDoingItsPartIsNamed) {
  const auto errors = run_ranks(3, [&](ShmCommunicator& group, int rank) {
    if (rank == 1) return;  // leaves with a goodbye
    float value = 1;
    group.all_reduce(operation(Kind::all_reduce, 1, DType::f32, 1), &value, &value, 1);
  });
  for (int rank : {0, 2}) {
    ASSERT_TRUE(errors[rank]);
    EXPECT_EQ(errors[rank]->kind(), ErrorKind::peer_lost);
    EXPECT_EQ(errors[rank]->context().peer, 1) << errors[rank]->what();
  }
}

TEST(MonitoredBarrier, NamesTheMissingAndLeavesTheGroupUsable) {
  expect_no_errors(run_ranks(4, [&](ShmCommunicator& group, int rank) {
    const OperationContext all{"monitored_barrier", 1, Clock::now() + milliseconds(20000), milliseconds(20000)};
    group.monitored_barrier(all, false);
    if (rank != 2 && rank != 3) {
      const OperationContext brief{"monitored_barrier", 2, Clock::now() + milliseconds(150), milliseconds(150)};
      try {
        group.monitored_barrier(brief, true);
        ADD_FAILURE() << "rank " << rank << " passed";
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::timeout);
        if (rank == 0) {
          EXPECT_NE(std::string(error.what()).find("Ranks 2, 3 failed to pass"), std::string::npos);
        }
      }
    }
    group.barrier(operation(Kind::barrier, 1, DType::raw8, 0));
  }));
}

}  // namespace
}  // namespace ark::test
