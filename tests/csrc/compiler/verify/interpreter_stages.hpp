// The interpreter of stages, included by interpreter.hpp. It runs their tiles in random order.
#pragma once

#include <random>
#include <set>
#include <utility>

namespace ark::compiler {

// Runs one row of a program. `row` is the index in all but the last `inner` dimensions. Without reductions it computes
// the columns [begin, end) of dimension `axis`, element by element. With reductions it runs twice, because an emitter
// may load twice.
class RowRunner {
 public:
  RowRunner(Memory& memory, const RowProgram& program, const std::vector<Value>& values)
      : memory_(memory), program_(program), values_(values) {
    for (const auto& instruction : program.code) reduces_ = reduces_ || instruction.kind == Kind::reduce;
  }

  void run(Part part) {
    const size_t rows = program_.shape.size() - static_cast<size_t>(program_.inner);
    const Shape outer(program_.shape.begin(), program_.shape.begin() + static_cast<std::ptrdiff_t>(rows));
    const Shape inner(program_.shape.begin() + static_cast<std::ptrdiff_t>(rows), program_.shape.end());
    each_index(outer, [&](const Shape& row) {
      std::vector<Shape> columns;
      each_index(inner, [&](const Shape& column) {
        Shape index = row;
        index.insert(index.end(), column.begin(), column.end());
        if (part.has(index)) columns.push_back(index);
      });
      if (columns.empty()) return;
      if (reduces_) {
        run_row(columns);
        run_row(columns);
      } else {
        for (const Shape& column : columns) run_row({column});
      }
    });
  }

 private:
  using Kind = RowProgram::Instruction::Kind;

  int64_t byte(const RowProgram::Instruction& instruction, const Shape& index) const {
    int64_t at = values_[instruction.value].offset;
    for (size_t d = 0; d < index.size(); ++d) at += index[d] * instruction.strides[d];
    return at * size_of(values_[instruction.value].type);
  }

  // Returns the byte distance from the first position to the one that a store's index selects.
  template <class Element>
  int64_t through(const RowProgram::Instruction& store, const Element& element, size_t column) const {
    if (store.args.size() < 2) return 0;
    const auto& to = store.through;
    auto index = static_cast<int64_t>(element(store.args[1], column));
    if (index < 0 && to.wrap) index += to.size;
    if (index < 0 || index >= to.size) throw std::logic_error("an index out of range");
    return index * to.stride * size_of(values_[store.value].type);
  }

  double loaded(const RowProgram::Instruction& one, const Value& value, int64_t byte) {
    double sum = memory_.read(value.buffer, byte);
    if (one.parts.count == 1) return sum;
    for (int64_t part = 1; part < one.parts.count; ++part)
      sum += memory_.read(value.buffer, byte + part * one.parts.apart * size_of(value.type));
    return round_to(sum, one.type);
  }

  // A register has one element per column, or a single element if it is scalar.
  void run_row(const std::vector<Shape>& columns) {
    std::vector<std::vector<double>> registers;
    const auto element = [&](int reg, size_t column) {
      const auto& of = registers.at(reg);
      return of.at(program_.code[reg].scalar ? 0 : column);
    };
    for (const auto& instruction : program_.code) {
      std::vector<double> result;
      const size_t count = instruction.scalar ? 1 : columns.size();
      if (instruction.kind == Kind::reduce) {
        if (program_.code.at(instruction.args.at(0)).scalar) throw std::logic_error("a scalar is reduced");
        Reducer reducer(instruction.name);
        for (size_t c = 0; c < columns.size(); ++c) reducer.add(element(instruction.args[0], c));
        result.push_back(reducer.result(instruction.type));
      }
      for (size_t c = 0; c < count && instruction.kind != Kind::reduce; ++c) {
        const Value* value = instruction.value >= 0 ? &values_[instruction.value] : nullptr;
        switch (instruction.kind) {
          case Kind::load: result.push_back(loaded(instruction, *value, byte(instruction, columns[c]))); break;
          case Kind::literal: result.push_back(round_to(value->literal, instruction.type)); break;
          case Kind::index: result.push_back(static_cast<double>(columns[c].at(instruction.args.at(0)))); break;
          case Kind::op: {
            std::vector<double> x;
            std::vector<ScalarType> types;
            for (int arg : instruction.args) {
              if (instruction.scalar && !program_.code.at(arg).scalar) throw std::logic_error("a row's is a column's");
              x.push_back(element(arg, c));
              types.push_back(program_.code[arg].type);
            }
            result.push_back(apply_typed(instruction.name, x, types, instruction.type));
            break;
          }
          case Kind::store:
            if (instruction.scalar != program_.code.at(instruction.args.at(0)).scalar) {
              throw std::logic_error("a store of the wrong kind");
            }
            memory_.write(value->buffer, byte(instruction, columns[c]) + through(instruction, element, c),
                          round_to(element(instruction.args[0], c), value->type));
            break;
          case Kind::reduce: break;
        }
      }
      registers.push_back(std::move(result));
    }
  }

  Memory& memory_;
  const RowProgram& program_;
  const std::vector<Value>& values_;
  bool reduces_ = false;
};

// Applies a product's finishing program to one of its sums, and to that of a dual product's second one.
inline double finished(const MatmulStage& product, const std::vector<Value>& values, double sum, double second) {
  const std::vector<RowProgram::Instruction>& code = product.finish;
  using Kind = RowProgram::Instruction::Kind;
  std::vector<double> registers;
  for (const auto& one : code) {
    std::vector<double> x;
    std::vector<ScalarType> types;
    for (int arg : one.args) {
      x.push_back(registers.at(arg));
      types.push_back(code[arg].type);
    }
    if (one.kind == Kind::store) return x.at(0);
    const double loaded = product.second.b >= 0 && one.value == product.second.sum ? second : sum;
    registers.push_back(one.kind == Kind::load      ? round_to(loaded, one.type)
                        : one.kind == Kind::literal ? round_to(values[one.value].literal, one.type)
                                                    : apply_typed(one.name, x, types, one.type));
  }
  throw std::logic_error("a product's program without a store");
}

inline int axis_of(const Stage& stage, int value) {
  for (const Access& access : stage.accesses) {
    if (access.value == value) return access.axis;
  }
  throw std::logic_error("a value without an access");
}

// Computes the indices [begin, end) of the dimension that tiles of the product cut.
inline void run_product(Memory& memory, const Graph& graph, const Stage& stage, const MatmulStage& matmul,
                        int64_t begin, int64_t end) {
  const auto& values = graph.values();
  const Value& out = values[matmul.out];
  const auto rank = static_cast<int>(out.shape.size());
  const int axis = matmul.axis == MatmulStage::Axis::columns ? rank - 1
                   : matmul.axis == MatmulStage::Axis::rows  ? rank - 2
                                                             : axis_of(stage, matmul.out);
  int64_t batch = 1;
  for (int d = 0; d < rank - 2; ++d) batch *= out.shape[d];
  if (out.shape[rank - 2] != matmul.m || out.shape[rank - 1] != matmul.n || batch != matmul.batch ||
      values[matmul.a].shape.back() != matmul.k || values[matmul.a].shape[rank - 2] != matmul.m) {
    throw std::logic_error("a product's sizes");
  }
  if (matmul.codes.bits != 0) return run_dequant_matmul(memory, values, matmul, {axis, begin, end});
  const auto bias_of = [&](int bias) { return bias >= 0 ? &values[bias] : nullptr; };
  const auto finish = [&](double sum, const Shape& index) {
    const MatmulStage::Second& second = matmul.second;
    const double other =
        second.b >= 0 ? product_at(memory, values[matmul.a], values[second.b], bias_of(second.bias), index) : 0;
    return matmul.finish.empty() ? sum : finished(matmul, values, sum, other);
  };
  run_matmul(memory, values[matmul.a], values[matmul.b], bias_of(matmul.bias), out, {axis, begin, end}, finish);
}

inline void run_body(Memory& memory, const Graph& graph, const Stage& stage, int64_t begin, int64_t end) {
  const auto& values = graph.values();
  if (const auto* program = std::get_if<RowProgram>(&stage.body)) {
    const int64_t scale =
        program->axis < 0 ? 1 : std::max<int64_t>(1, program->shape[static_cast<size_t>(program->axis)] / stage.extent);
    RowRunner(memory, *program, values).run({program->axis, begin * scale, end * scale});
  } else if (const auto* matmul = std::get_if<MatmulStage>(&stage.body)) {
    run_product(memory, graph, stage, *matmul, begin, end);
  } else if (const auto* several = std::get_if<ProductsStage>(&stage.body)) {
    for (const MatmulStage& product : several->products)
      run_product(memory, graph, stage, product, begin * product.n / stage.extent, end * product.n / stage.extent);
  } else if (const auto* attention = std::get_if<AttentionStage>(&stage.body)) {
    run_attention(memory, *attention, values, {axis_of(stage, attention->out), begin, end});
  } else if (const auto* combine = std::get_if<CombineStage>(&stage.body)) {
    run_combine(memory, *combine, values, {axis_of(stage, combine->out), begin, end});
  } else if (const auto* gather = std::get_if<GatherStage>(&stage.body)) {
    run_gather(memory, *gather, values, {axis_of(stage, gather->out), begin, end});
  } else if (const auto* scatter = std::get_if<ScatterStage>(&stage.body)) {
    run_scatter(memory, *scatter, values, {axis_of(stage, scatter->source), begin, end});
  } else {
    throw std::logic_error("the interpreter does not know this stage");
  }
  for (const Stage& next : stage.tail) run_body(memory, graph, next, begin, end);
}

using ByteSet = std::set<std::pair<int, int64_t>>;

// Returns the bytes at which elements of the access's part begin.
inline ByteSet declared(const Graph& graph, const Stage& stage, int64_t begin, int64_t end, bool write) {
  ByteSet bytes;
  for (const Access& access : stage.accesses) {
    if (access.write != write) continue;
    const Value& value = graph.values()[access.value];
    Part part;
    if (access.axis >= 0) {
      const int64_t length = value.shape.at(access.axis);
      part = {access.axis, begin * length / stage.extent, end * length / stage.extent};
    }
    each_index(value.shape, [&](const Shape& index) {
      if (part.has(index)) bytes.insert({value.buffer, byte_of(value, index)});
    });
  }
  return bytes;
}

// Runs one tile. Throws if it accesses undeclared bytes, or bytes that another tile of the stage wrote (`written`).
inline void run_tile(Memory& memory, const Graph& graph, const Stage& stage, int64_t begin, int64_t end,
                     ByteSet& written) {
  ByteSet own;
  const auto reads = declared(graph, stage, begin, end, false), writes = declared(graph, stage, begin, end, true);
  memory.watch = [&](int buffer, int64_t byte, bool write) {
    if (written.count({buffer, byte}) > 0) {
      throw std::logic_error("stage " + stage.name + ": two tiles meet in byte " + std::to_string(byte) +
                             " of buffer " + std::to_string(buffer));
    }
    if (write) own.insert({buffer, byte});
    if (!write && !stage.tail.empty() && own.count({buffer, byte}) > 0) return;
    if ((write ? writes : reads).count({buffer, byte}) > 0) return;
    throw std::logic_error("stage " + stage.name + " tile [" + std::to_string(begin) + ", " + std::to_string(end) +
                           ") " + (write ? "writes" : "reads") + " byte " + std::to_string(byte) + " of buffer " +
                           std::to_string(buffer) + ", which no access declares");
  };
  run_body(memory, graph, stage, begin, end);
  memory.watch = nullptr;
  written.insert(own.begin(), own.end());
}

// Runs all stages in order, each cut into random tiles, in random order.
inline void run_stages(Memory& memory, const Graph& graph, const std::vector<Stage>& stages, std::mt19937& random) {
  for (const Stage& stage : stages) {
    std::vector<std::pair<int64_t, int64_t>> tiles;
    const int64_t pieces = (stage.extent + stage.grain - 1) / stage.grain;
    for (int64_t begin = 0; begin < pieces;) {
      const int64_t end = std::min<int64_t>(pieces, begin + 1 + static_cast<int64_t>(random() % 4));
      tiles.emplace_back(begin * stage.grain, std::min(end * stage.grain, stage.extent));
      begin = end;
    }
    std::shuffle(tiles.begin(), tiles.end(), random);
    ByteSet written;
    for (const auto& [begin, end] : tiles) run_tile(memory, graph, stage, begin, end, written);
  }
}

}  // namespace ark::compiler
