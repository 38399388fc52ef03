// Hand-written stages of a Llama decoding step, with the sizes and cuts of make_stages() but no operators.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "compiler/fuse/random_stages.hpp"

namespace ark::compiler::test {

struct LlamaSizes {
  int layers = 16;
  int64_t hidden = 2048, heads = 32, kv_heads = 8, head = 64, ffn = 8192, vocabulary = 128256, length = 1024;
  ScalarType type = ScalarType::bf16;
};

class LlamaStages {
 public:
  explicit LlamaStages(const LlamaSizes& sizes) : sizes_(sizes) {}

  StageGraph make() {
    const LlamaSizes& s = sizes_;
    const int64_t kv = s.kv_heads * s.head;
    const int position = add(Buffer::Kind::input, {1}, ScalarType::i64);
    const int ids = add(Buffer::Kind::input, {1}, ScalarType::i64);
    const int table = parameter({s.vocabulary, s.hidden});
    int residual = temporary({1, s.hidden});
    GatherStage gather{table, {ids}, residual, 0};
    begin("gather", "embedding", gather, 1).replicable = true;
    reads(table), reads(ids), writes(residual);
    last().bytes = 2.0 * s.hidden * size_of(s.type);
    for (int layer = 0; layer < s.layers; ++layer) {
      layer_ = "model.layers." + std::to_string(layer);
      const int normed = norm(residual);
      const int q = matmul(normed, s.heads * s.head, "wq");
      const int k = matmul(normed, kv, "wk");
      const int v = matmul(normed, kv, "wv");
      const int cache_k = add(Buffer::Kind::input, {1, s.kv_heads, s.length, s.head}, s.type, false, true);
      const int cache_v = add(Buffer::Kind::input, {1, s.kv_heads, s.length, s.head}, s.type, false, true);
      const int q_turned = rotary(q, s.heads);
      const int k_turned = rotary(k, s.kv_heads);
      scatter(cache_k, position, k_turned);
      scatter(cache_v, position, v);
      const int attended = temporary({1, s.heads * s.head});
      const int queries = view(q_turned, {1, s.heads, 1, s.head}), sums = view(attended, {1, s.heads, 1, s.head});
      begin("attention", "attention", AttentionStage{queries, cache_k, cache_v, -1, sums, 1, true}, s.kv_heads);
      reads(queries, 1), reads(cache_k, 1), reads(cache_v, 1), reads(position);
      writes(sums, 1);
      const int projected = matmul(attended, s.hidden, "wo");
      residual = pointwise(residual, projected, "add");
      const int normed_again = norm(residual);
      const int gate = matmul(normed_again, s.ffn, "w1");
      const int up = matmul(normed_again, s.ffn, "w3");
      const int product = pointwise(gate, up, "silu+mul");
      residual = pointwise(residual, matmul(product, s.hidden, "w2"), "add");
    }
    const int logits = add(Buffer::Kind::output, {1, s.vocabulary}, s.type);
    matmul(norm(residual), s.vocabulary, "output", logits);
    return std::move(made_);
  }

 private:
  int add(Buffer::Kind kind, const Shape& shape, ScalarType type, bool parameter = false, bool mutated = false) {
    Buffer buffer;
    buffer.kind = kind;
    buffer.parameter = parameter;
    buffer.mutated = mutated;
    if (kind == Buffer::Kind::input) buffer.argument = inputs_++;
    if (kind == Buffer::Kind::output) buffer.argument = 0;
    buffer.bytes = size_of(type);
    for (const int64_t length : shape) buffer.bytes *= length;
    Value value;
    value.buffer = made_.graph.add_buffer(buffer);
    return dense(value.buffer, shape, type);
  }
  int dense(int buffer, const Shape& shape, ScalarType type) {
    Value value;
    value.buffer = buffer;
    value.type = type;
    value.shape = shape;
    value.strides.resize(shape.size());
    int64_t stride = 1;
    for (size_t dim = shape.size(); dim-- > 0;) value.strides[dim] = stride, stride *= shape[dim];
    return made_.graph.add_value(value);
  }
  int view(int value, const Shape& shape) { return dense(made_.graph.values()[value].buffer, shape, sizes_.type); }
  int parameter(const Shape& shape) { return add(Buffer::Kind::input, shape, sizes_.type, true); }
  int temporary(const Shape& shape) { return add(Buffer::Kind::temporary, shape, sizes_.type); }
  Stage& last() { return made_.stages.back(); }
  template <typename Body>
  Stage& begin(const char* kind, const std::string& name, Body body, int64_t extent, int64_t grain = 1) {
    Stage stage;
    stage.body = std::move(body);
    stage.kind = kind;
    stage.name = name;
    stage.origin = layer_ + "." + name;
    stage.extent = extent;
    stage.grain = grain;
    made_.stages.push_back(std::move(stage));
    return last();
  }
  void touch(int value, int axis, bool write) {
    last().accesses.push_back({value, axis, write});
    last().bytes += static_cast<double>(made_.graph.values()[value].elements() * size_of(sizes_.type));
  }
  void reads(int value, int axis = -1) { touch(value, axis, false); }
  void writes(int value, int axis = -1) { touch(value, axis, true); }

  int norm(int input) {
    const int out = temporary({1, sizes_.hidden});
    begin("rows", "rms_norm", RowProgram{}, 1).replicable = true;
    reads(input), reads(parameter({sizes_.hidden})), writes(out);
    return out;
  }
  int matmul(int input, int64_t columns, const std::string& name, int out = -1) {
    const int64_t depth = made_.graph.values()[input].shape[1];
    const int weight = parameter({columns, depth});
    if (out < 0) out = temporary({1, columns});
    begin("matmul", name, MatmulStage{input, weight, out, -1, 1, 1, columns, depth, MatmulStage::Axis::columns},
          columns, 16);
    reads(input), reads(weight, 0), writes(out, 1);
    last().flops = 2.0 * static_cast<double>(columns * depth);
    return out;
  }
  int rotary(int input, int64_t heads) {
    const int out = temporary({1, heads * sizes_.head});
    begin("rows", "rotary", RowProgram{}, heads).replicable = true;
    reads(view(input, {heads, sizes_.head}), 0), writes(view(out, {heads, sizes_.head}), 0);
    return out;
  }
  void scatter(int base, int position, int source) {
    begin("scatter", "cache", ScatterStage{base, position, source, 2}, sizes_.kv_heads);
    reads(position), reads(view(source, {1, sizes_.kv_heads, 1, sizes_.head}), 1), writes(base, 1);
    last().bytes = 2.0 * static_cast<double>(sizes_.kv_heads * sizes_.head * size_of(sizes_.type));
  }
  int pointwise(int a, int b, const std::string& name) {
    const int64_t columns = made_.graph.values()[a].shape[1];
    const int out = temporary({1, columns});
    begin("rows", name, RowProgram{}, columns, 16).replicable = true;
    reads(a, 1), reads(b, 1), writes(out, 1);
    return out;
  }

  LlamaSizes sizes_;
  StageGraph made_;
  std::string layer_ = "model";
  int inputs_ = 0;
};

}  // namespace ark::compiler::test
