// Sums over several nodes have the bits of the CPU's groups, in each order and with each kind of partial sums: for
// every type that rounds, on nodes of several ranks, in and out of place, in one hop, in parts and in slices.
#include <algorithm>
#include <cstring>
#include <random>
#include <set>
#include <span>

#include "collectives/cpu/staged_reduce.hpp"
#include "collectives/cuda/between/nodes_world.hpp"
#include "support/night.hpp"

namespace ark::rdma_test {
namespace {

struct Case {
  Form form;
  SumOrder sums;
};
void PrintTo(const Case& one, std::ostream* out) {
  PrintTo(one.form, out);
  *out << text_of(one.sums);
}

// Values of moderate exponents and both signs, whose sums show in which order and how often they were rounded.
std::vector<uint8_t> input_of(int rank, size_t bytes) {
  std::mt19937 random(static_cast<uint32_t>(rank));
  std::vector<uint8_t> all(bytes);
  for (size_t i = 0; i < bytes; i += 4) {
    const uint32_t word = static_cast<uint32_t>(random()) & 0xbfbfbfbf;
    std::memcpy(all.data() + i, &word, std::min<size_t>(4, bytes - i));
  }
  return all;
}

double factor_of(int rank) {  // of PREMUL_SUM; no product of it with a short float is exact
  return 1.0 / (3 + rank);
}

// As the CPU's groups add (process_group/carriers).
std::vector<uint8_t> sum_of(const World& world, int nodes, const SumOrder& sums, DType dtype, ReduceOp op,
                            const std::vector<std::vector<uint8_t>>& inputs, size_t count) {
  std::vector<uint8_t> out(count * size_of(dtype));
  std::vector<const void*> sources;
  std::vector<double> factors;
  const auto given = [&] { return op == ReduceOp::premul_sum ? factors.data() : nullptr; };
  if (sums.flat || nodes == world.size()) {
    for (const auto& input : inputs) sources.push_back(input.data());
    for (int r = 0; r < world.size(); ++r) factors.push_back(factor_of(r));
    find_reduce(dtype, op)(out.data(), nullptr, sources.data(), world.size(), count, given());
    return out;
  }
  const StagedReduce reduction(dtype, op, world.size(), false, !sums.input_partials);
  std::vector<std::vector<uint8_t>> partials(nodes, std::vector<uint8_t>(count * reduction.partial_size()));
  std::vector<const void*> wholes;
  for (int node = 0; node < nodes; ++node) {
    sources.clear(), factors.clear();
    for (int r = 0; r < world.size(); ++r)
      if (world.node_of(r) == node) sources.push_back(inputs[r].data()), factors.push_back(factor_of(r));
    reduction.partial(partials[node].data(), sources.data(), static_cast<int>(sources.size()), count, given());
    wholes.push_back(partials[node].data());
  }
  reduction.combine(out.data(), wholes.data(), nodes, count, nullptr);
  return out;
}

class NodesSums : public NodesTest, public ::testing::WithParamInterface<Case> {};

TEST_P(NodesSums, HaveTheBitsOfTheCpu) {
  const auto& [form, sums] = GetParam();
  World world(form);
  world.sums = [sums = sums](int) { return sums; };
  const int size = world.size();
  const std::pair<DType, ReduceOp> kinds[] = {
      {DType::bf16, ReduceOp::sum},       {DType::f8_e4m3fn, ReduceOp::avg},  {DType::f32, ReduceOp::sum},
      {DType::f16, ReduceOp::premul_sum}, {DType::f64, ReduceOp::premul_sum}, {DType::c64, ReduceOp::premul_sum},
      {DType::f16, ReduceOp::avg},        {DType::c32, ReduceOp::product},    {DType::f8_e5m2, ReduceOp::sum},
      {DType::bf16, ReduceOp::product},   {DType::f64, ReduceOp::avg},        {DType::bf16, ReduceOp::max},
      {DType::i32, ReduceOp::sum}};
  // A rank's block: a tail alone, one hop, parts with odd ends, and what takes several slices.
  const size_t blocks[] = {1, 777, 9001, 40003};
  const size_t most_blocks = 2 + test::cases(2);
  struct Work {
    DType dtype;
    ReduceOp op;
    size_t each;
    std::vector<std::vector<uint8_t>> inputs;
    std::vector<uint8_t> expected;
  };
  std::vector<Work> works;
  std::set<std::string> told;  // kinds whose bits tell these settings from the others
  for (const auto& [dtype, op] : std::span(kinds).first(test::cases(std::size(kinds))))
    for (size_t i = 0; i < std::min(most_blocks + (dtype == DType::bf16 && op == ReduceOp::sum), std::size(blocks));
         ++i) {
      Work work{dtype, op, blocks[i], {}, {}};
      const size_t count = work.each * size;
      for (int r = 0; r < size; ++r) work.inputs.push_back(input_of(r, count * size_of(dtype)));
      const auto with = [&](SumOrder other) { return sum_of(world, form.nodes, other, dtype, op, work.inputs, count); };
      work.expected = with(sums);
      const bool alone = with({}) != with({true, false});
      if (alone) told.insert(name_of(dtype));
      if (i > 1 && form.places > 1 && (dtype == DType::bf16 || dtype == DType::f16) && op != ReduceOp::max) {
        EXPECT_NE(with({}), with({false, true})) << name_of(dtype) << " " << name_of(op);
      }
      works.push_back(std::move(work));
    }
  for (const char* const name : {"bfloat16", "float32"}) EXPECT_EQ(told.count(name), form.places > 1 ? 1U : 0U) << name;
  EXPECT_FALSE(told.count("int32"));

  expect_quiet(world.run([&](Communicator& group, World::Rank&, int me) {
    for (const Work& work : works) {
      const size_t count = work.each * size, element = size_of(work.dtype), bytes = work.each * element;
      const std::string what =
          std::string(name_of(work.dtype)) + " " + name_of(work.op) + " of " + std::to_string(work.each) + " a rank";
      const auto operation = [&](Kind kind, size_t counted, int root = -1) {
        Operation made = world.operation(kind, work.dtype, counted, work.op, root);
        made.factor = factor_of(me);
        return made;
      };
      for (const bool in_place : {false, true}) {
        auto in = work.inputs[me];
        std::vector<uint8_t> out(in.size());
        group.all_reduce(operation(Kind::all_reduce, count), in.data(), in_place ? in.data() : out.data(), count);
        EXPECT_TRUE((in_place ? in : out) == work.expected) << "all_reduce, " << what;
        if (!in_place) {
          EXPECT_TRUE(in == work.inputs[me]) << "input of all_reduce, " << what;
        }
      }
      const int root = static_cast<int>(work.each) % size;
      auto in = work.inputs[me];
      group.reduce(operation(Kind::reduce, count, root), in.data(), me == root ? in.data() : nullptr, count);
      EXPECT_TRUE(in == (me == root ? work.expected : work.inputs[me])) << "reduce, " << what;

      in = work.inputs[me];
      std::vector<const void*> ins;
      for (int r = 0; r < size; ++r) ins.push_back(in.data() + bytes * r);
      // As FSDP calls it: the result takes the place of this rank's own block.
      std::vector<uint8_t> out(bytes);
      for (void* const to : {static_cast<void*>(out.data()), const_cast<void*>(ins[me])}) {
        group.reduce_scatter(operation(Kind::reduce_scatter, work.each), ins.data(), to, work.each);
        EXPECT_EQ(std::memcmp(to, work.expected.data() + bytes * me, bytes), 0) << "reduce_scatter, " << what;
      }
    }
  }));
}
INSTANTIATE_TEST_SUITE_P(Of, NodesSums,
                         ::testing::Values(Case{{2, 2, 4}, {}}, Case{{2, 2, 4}, {true, false}},
                                           Case{{2, 2, 0}, {false, true}}, Case{{3, 2, 3, 1, true}, {}},
                                           Case{{3, 1, 3}, {}}));
INSTANTIATE_TEST_SUITE_P(Uneven, NodesSums,
                         ::testing::Values(Case{Form::of({2, 3}, 5), {}},
                                           Case{Form::of({3, 2}, 0, true), {false, true}},
                                           Case{Form::of({3, 1, 2}, 6, true), {true, false}}));
INSTANTIATE_TEST_SUITE_P(Night, NodesSums,
                         ::testing::Values(Case{{3, 2, 0, 1, true}, {true, false}}, Case{{2, 3, 6}, {}},
                                           Case{{2, 3, 6, 1, true}, {true, true}},
                                           Case{Form::of({2, 3}, 1), {true, false}}, Case{Form::of({3, 1, 2}, 2), {}},
                                           Case{Form::of({1, 2, 3}, 3, true), {false, true}}));

// Eight ranks a node: the most that kernels take.
TEST_F(NodesTest, FullNodesInTheOrderOfAllRanks) {
  const Form form{2, 8, 0, 1, true};
  World world(form);
  world.sums = [](int) { return SumOrder{true, false}; };
  constexpr size_t kCount = 20011;
  std::vector<std::vector<uint8_t>> inputs, results;
  for (int r = 0; r < world.size(); ++r) inputs.push_back(input_of(r, kCount * 2));
  results = inputs;
  expect_quiet(world.run([&](Communicator& group, World::Rank&, int me) {
    group.all_reduce(world.operation(Kind::all_reduce, DType::bf16, kCount), results[me].data(), results[me].data(),
                     kCount);
  }));
  const auto expected = sum_of(world, 2, {true, false}, DType::bf16, ReduceOp::sum, inputs, kCount);
  for (int r = 0; r < world.size(); ++r) EXPECT_TRUE(results[r] == expected) << r;
}

TEST_F(NodesTest, RanksOfOtherSettingsAreNamed) {
  for (const SumOrder other : {SumOrder{true, false}, SumOrder{false, true}}) {
    World world({2, 2, 0});
    world.sums = [&](int rank) { return rank == 2 ? other : SumOrder{}; };
    const auto thrown = world.run([](Communicator&, World::Rank&, int) { FAIL(); });
    for (int r = 0; r < world.size(); ++r) {
      const std::string peer = r == 2 ? "rank 0 has other ones" : "rank 2 has other ones";
      EXPECT_NE(thrown[r].find("ranks disagree"), std::string::npos) << thrown[r];
      EXPECT_NE(thrown[r].find(peer), std::string::npos) << thrown[r];
      EXPECT_NE(thrown[r].find("ARK_PARTIALS"), std::string::npos) << thrown[r];
    }
  }
}

}  // namespace
}  // namespace ark::rdma_test
