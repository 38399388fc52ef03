// Random stage graphs for plan_stages(): buffers, views, and stages that declare their accesses but contain no
// operators. The simulator (simulated_plan.hpp) decides what a tile computes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "compiler/schedule/plan.hpp"

namespace ark::compiler::test {

struct StageGraph {
  Graph graph;
  std::vector<Stage> stages;
};

// Matrices of a few sizes that divide each other. Stages read them whole or cut them by rows or columns, in place or
// not, through transposed views and halves. Some stages are replicable, some inputs are mutated, some are parameters.
class RandomStages {
 public:
  explicit RandomStages(uint64_t seed) : random_(seed) {}

  StageGraph make(int stages) {
    const int inputs = pick(1, 4);
    for (int input = 0; input < inputs; ++input) {
      const bool parameter = chance(3);
      add_matrix(Buffer::Kind::input, parameter, !parameter && chance(3));
    }
    for (int stage = 0; stage < stages; ++stage) add_stage();
    add_last();
    return std::move(made_);
  }

 private:
  struct Matrix {
    int value;  // the whole matrix
    int buffer;
    int64_t rows, columns;
    bool writable;
    bool temporary;
  };
  int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }
  bool chance(int one_in) { return pick(1, one_in) == 1; }
  int64_t pick_length() { return int64_t{4} << pick(0, 3); }
  const Matrix& any() { return matrices_[chance(2) ? pick(0, size() - 1) : pick(std::max(0, size() - 4), size() - 1)]; }
  int size() const { return static_cast<int>(matrices_.size()); }

  int add_value(int buffer, Shape shape, Shape strides, int64_t offset = 0) {
    Value value;
    value.buffer = buffer;
    value.shape = std::move(shape);
    value.strides = std::move(strides);
    value.offset = offset;
    return made_.graph.add_value(value);
  }
  Matrix add_matrix(Buffer::Kind kind, bool parameter = false, bool mutated = false) {
    return add_sized(kind, pick_length(), pick_length(), parameter, mutated);
  }
  Matrix add_sized(Buffer::Kind kind, int64_t rows, int64_t columns, bool parameter = false, bool mutated = false) {
    Buffer buffer;
    buffer.kind = kind;
    if (kind == Buffer::Kind::input) buffer.argument = inputs_++;
    if (kind == Buffer::Kind::output) buffer.argument = outputs_++;
    buffer.bytes = rows * columns * 4;
    buffer.parameter = parameter;
    buffer.mutated = mutated;
    Matrix matrix;
    matrix.buffer = made_.graph.add_buffer(buffer);
    matrix.value = add_value(matrix.buffer, {rows, columns}, {columns, 1});
    matrix.rows = rows;
    matrix.columns = columns;
    matrix.writable = mutated || kind != Buffer::Kind::input;
    matrix.temporary = kind == Buffer::Kind::temporary;
    matrices_.push_back(matrix);
    return matrix;
  }
  // Returns the same bytes with rows and columns exchanged.
  int transposed(const Matrix& matrix) {
    return add_value(matrix.buffer, {matrix.columns, matrix.rows}, {1, matrix.columns});
  }
  void add_reads(Stage& stage, int64_t extent) {
    for (int read = pick(0, 2); read >= 0; --read) {
      const Matrix from = any();
      Access access;
      access.value = from.value;
      if (!chance(2)) {  // cut along a dimension that divides the extent, or that the extent divides
        for (const int axis : {pick(0, 1), 0, 1}) {
          const int64_t length = axis == 0 ? from.rows : from.columns;
          if (length % extent != 0 && extent % length != 0) continue;
          access.axis = axis;
          if (chance(3)) access.value = transposed(from), access.axis = 1 - axis;
          if (extent > length) stage.grain = std::max(stage.grain, extent / length);
          break;
        }
      }
      stage.accesses.push_back(access);
    }
  }
  void add_stage() {
    Stage stage;
    stage.kind = "random";
    stage.name = "stage_" + std::to_string(made_.stages.size());
    stage.origin = "model.layers." + std::to_string(made_.stages.size());
    const bool in_place = chance(4) && std::any_of(matrices_.begin(), matrices_.end(),
                                                   [](const Matrix& matrix) { return matrix.writable; });
    Matrix out{};
    int halves = 1;
    const int64_t earlier = size();
    if (in_place) {
      do out = any();
      while (!out.writable);
    } else {
      const auto kind = chance(6) ? Buffer::Kind::output : Buffer::Kind::temporary;
      halves = chance(6) ? 2 : 1;
      out = add_matrix(kind);
      matrices_.pop_back();  // the stage that writes it must not read it
    }
    const int axis = pick(0, 1);
    for (int half = 0; half < halves; ++half) {  // two stages write one half each
      Stage part = stage;
      const int64_t rows = out.rows / halves;
      part.extent = axis == 0 ? rows : out.columns;
      if (chance(4) && part.extent % 4 == 0) part.grain = 4;
      if (!in_place || earlier > 1) add_reads(part, part.extent);
      std::erase_if(part.accesses, [&](const Access& access) {
        return made_.graph.values()[access.value].buffer == out.buffer;  // tiles would conflict
      });
      Access write;
      write.value = halves == 1
                        ? out.value
                        : add_value(out.buffer, {rows, out.columns}, {out.columns, 1}, half * rows * out.columns);
      write.axis = axis;
      if (in_place) part.accesses.push_back(write);  // each tile reads what it writes
      write.write = true;
      part.accesses.push_back(write);
      part.replicable = out.temporary && !in_place && chance(2);
      part.bytes = static_cast<double>(pick(1, part.replicable ? 8 : 40)) * 1e3;
      part.flops = part.replicable ? 0 : static_cast<double>(pick(0, 40)) * 1e3;
      made_.stages.push_back(std::move(part));
    }
    if (!in_place) matrices_.push_back(out);
  }
  // Adds an output that reads everything that nothing else has read, so that no error stays hidden.
  void add_last() {
    Stage stage;
    stage.kind = "random";
    stage.name = "last";
    std::vector<char> read(made_.graph.buffers().size(), 0);
    for (const Stage& other : made_.stages) {
      for (const Access& access : other.accesses) {
        if (!access.write) read[made_.graph.values()[access.value].buffer] = 1;
      }
    }
    for (const Matrix& matrix : matrices_) {
      if (!read[matrix.buffer]) stage.accesses.push_back({matrix.value, -1, false});
    }
    const Matrix out = add_sized(Buffer::Kind::output, 32, 4);
    stage.extent = 32;
    stage.accesses.push_back({out.value, 0, true});
    stage.bytes = 1e5;
    made_.stages.push_back(std::move(stage));
  }

  std::mt19937_64 random_;
  StageGraph made_;
  std::vector<Matrix> matrices_;
  int inputs_ = 0, outputs_ = 0;
};

// The loop's end condition: every worker reads the first element of the last output.
inline void add_stop(StageGraph& made) {
  Value value;
  value.buffer = static_cast<int>(made.graph.buffers().size()) - 1;
  value.shape = {1};
  value.strides = {1};
  Stage stage;
  stage.body = StopStage{made.graph.add_value(value)};
  stage.accesses.push_back({std::get<StopStage>(stage.body).value, -1, false});
  stage.replicable = true;
  stage.kind = stage.name = "stop";
  stage.bytes = 4;
  made.stages.push_back(std::move(stage));
}

}  // namespace ark::compiler::test
