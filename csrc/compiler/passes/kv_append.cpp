// Finds the stages that make an attention's queries and append to its caches, checks that they may move, and puts them
// in front of the attention. See kv_append.hpp.
#include "compiler/passes/kv_append.hpp"
#include "compiler/graph/stage_queries.hpp"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "compiler/fuse/fuse_views.hpp"
#include "compiler/graph/box.hpp"
#include "compiler/graph/stage_moves.hpp"
#include "compiler/passes/kv_new_row.hpp"
#include "compiler/passes/split_kv.hpp"
#include "cuda/loop/group.cuh"

namespace ark::compiler {

namespace {

using Instruction = RowProgram::Instruction;

// Bytes of shared memory for one of `parts` equal parts of each buffer.
int64_t kept_bytes(std::initializer_list<int64_t> buffers, int64_t parts) {
  int64_t all = 0;
  for (const int64_t bytes : buffers) all += (bytes / parts + 15) / 16 * 16;
  return all;
}

class Appender {
 public:
  Appender(Graph& graph, std::vector<Stage> stages, const Target& target)
      : graph_(graph), stages_(std::move(stages)), target_(target) {}

  std::vector<Stage> run() {
    for (size_t first = 0, last = 0; first < stages_.size(); first = last) {
      last = first + 1;
      const auto* attention = std::get_if<AttentionStage>(&stages_[first].body);
      if (attention == nullptr) continue;
      while (last < stages_.size() && is_part_of(*attention, stages_[last])) ++last;
      append(first, last);
    }
    std::vector<Stage> left;
    for (size_t at = 0; at < stages_.size(); ++at)
      if (gone_.count(at) == 0) left.push_back(std::move(stages_[at]));
    return left;
  }

 private:
  const Value& value(int index) const { return graph_.values()[static_cast<size_t>(index)]; }
  int buffer_of(int index) const { return value(index).buffer; }

  bool is_part_of(const AttentionStage& first, const Stage& stage) const {
    const auto* other = std::get_if<AttentionStage>(&stage.body);
    return other != nullptr && other->q == first.q && buffer_of(other->k) == buffer_of(first.k) &&
           buffer_of(other->v) == buffer_of(first.v);
  }

  // The last stage before `end` that writes the value's buffer.
  std::optional<size_t> writer(size_t end, int of) const {
    for (size_t at = end; at-- > 0;)
      for (const Access& access : stages_[at].accesses)
        if (access.write && buffer_of(access.value) == buffer_of(of))
          return gone_.count(at) ? std::nullopt : std::optional(at);
    return std::nullopt;
  }

  void append(size_t first, size_t last);
  bool may_move(const std::vector<size_t>& from, size_t first, size_t last) const;
  int store_into_own(Stage& stage, Value view, int64_t bytes);
  Stage whole(const Stage& part, const Stage& queries, const NewRow& key, const NewRow& value);
  bool own_tiles(const Stage& stage) const;
  bool in_equal_parts(const Stage& stage) const;

  Graph& graph_;
  std::vector<Stage> stages_;
  const Target& target_;
  std::set<size_t> gone_;
};

// Whether the stages may move to where [first, last) is, and no other stage reads what the first of them writes.
bool Appender::may_move(const std::vector<size_t>& from, size_t first, size_t last) const {
  for (const size_t at : from)
    for (size_t between = at + 1; between < first; ++between)
      if (gone_.count(between) == 0 && conflict(graph_, stages_[at], stages_[between])) return false;
  for (const Access& write : stages_[from[0]].accesses)
    for (size_t at = 0; write.write && at < stages_.size(); ++at)
      for (const Access& access : stages_[at].accesses)
        if (buffer_of(access.value) == buffer_of(write.value) && (at < first || at >= last) && at != from[0])
          return false;
  return true;
}

// Redirects the only store of the stage's program to a new temporary with this view. Returns the view.
int Appender::store_into_own(Stage& stage, Value view, int64_t bytes) {
  Instruction& store = *only_store(std::get<RowProgram>(stage.body));
  Buffer buffer;
  buffer.bytes = bytes;
  view.buffer = graph_.add_buffer(buffer);
  store.value = view_value(graph_, view);
  std::erase_if(stage.accesses, [](const Access& access) { return access.write; });
  stage.accesses.push_back({store.value, std::get<RowProgram>(stage.body).axis, true});
  return store.value;
}

// One part of the attention, preceded by the programs that make its queries, its new key and its new value.
Stage Appender::whole(const Stage& part, const Stage& queries, const NewRow& key, const NewRow& value) {
  Stage attends = part;
  AttentionStage& body = std::get<AttentionStage>(attends.body);
  const Value q = this->value(body.q), k = this->value(body.k), v = this->value(body.v);
  Stage whole = queries;
  const Value stored = this->value(only_store(std::get<RowProgram>(whole.body))->value);
  Value own_q = q;
  own_q.buffer =
      this->value(store_into_own(whole, stored, graph_.buffers()[static_cast<size_t>(q.buffer)].bytes)).buffer;
  body.q = view_value(graph_, own_q);
  body.added = key.place;
  Value cache = k;
  cache.offset = key.cache;
  cache.shape[2] = key.place.size;  // all parts' tasks have the same operands
  body.added.cache = view_value(graph_, cache);
  whole.tail.clear();
  for (const bool of_key : {true, false}) {
    const NewRow& row = of_key ? key : value;
    const int64_t heads = k.shape[1], columns = (of_key ? k : v).shape[3];
    Stage program = row.stage;
    Value view = of_key ? k : v;
    view.buffer = this->value(store_into_own(program, row.row, heads * columns * size_of(view.type))).buffer;
    view.offset = 0;
    view.shape = {1, heads, 1, columns};
    view.strides = {heads * columns, columns, columns, 1};
    (of_key ? body.added.k : body.added.v) = view_value(graph_, view);
    program.extent = part.extent;
    program.grain = 1;
    whole.tail.push_back(std::move(program));
  }
  attends.accesses[0].value = body.q;
  for (const int changed : {body.k, body.v}) attends.accesses.push_back({changed, 1, true});
  std::vector<Access> outer = attends.accesses;
  for (const int made : {body.added.k, body.added.v}) attends.accesses.push_back({made, 1, false});
  attends.accesses.push_back({body.added.position, -1, false});
  outer.erase(outer.begin());
  outer.push_back({body.added.position, -1, false});
  for (const Stage& program : whole.tail) outer.insert(outer.end(), program.accesses.begin(), program.accesses.end());
  whole.accesses.insert(whole.accesses.end(), outer.begin(), outer.end());
  whole.tail.push_back(std::move(attends));
  whole.extent = part.extent;
  whole.grain = 1;
  whole.flops = part.flops;
  whole.bytes = part.bytes;
  whole.replicable = false;
  whole.kind = part.kind;
  whole.name = part.name;
  whole.origin = part.origin;
  whole.indexed = key.stage.indexed.empty() ? key.stage.name + " (" + key.stage.origin + ")" : key.stage.indexed;
  return whole;
}

// Whether each tile's own programs write what its attention reads.
bool Appender::own_tiles(const Stage& stage) const {
  for (int64_t tile = 0; tile < stage.extent; ++tile)
    for (const Access& access : stage.tail.back().accesses)
      for (const Access& made : stage.accesses)
        if (!access.write && made.write && buffer_of(made.value) == buffer_of(access.value) &&
            !covers(box_of(graph_, stage, made, tile, tile + 1), box_of(graph_, stage, access, tile, tile + 1)))
          return false;
  return true;
}

// Whether each buffer that the programs write consists of equal parts, one per head, in order: then one head's can be
// kept at a time.
bool Appender::in_equal_parts(const Stage& stage) const {
  for (const int buffer : made_buffers(graph_, stage)) {
    const int64_t bytes = graph_.buffers()[static_cast<size_t>(buffer)].bytes;
    if (bytes % stage.extent != 0) return false;
    for (int64_t tile = 0; tile < stage.extent; ++tile)
      for (const Access& access : stage.accesses) {
        if (!access.write || buffer_of(access.value) != buffer) continue;
        const Box box = box_of(graph_, stage, access, tile, tile + 1);
        if (box.offset < bytes / stage.extent * tile || box.end() > bytes / stage.extent * (tile + 1)) return false;
      }
  }
  return true;
}

void Appender::append(size_t first, size_t last) {
  const AttentionStage attention = std::get<AttentionStage>(stages_[first].body);
  const Value q = value(attention.q), k = value(attention.k), v = value(attention.v);
  const int64_t heads = k.shape[1];
  // Every part's task repeats the programs, and a worker with many heads makes their rows one after the other, where
  // separate stages share all of it out.
  constexpr int64_t kMostHeads = 2;  // of a worker: as many as were measured (docs/measurements.md)
  const bool in_parts = last - first > 1, repeats = in_parts || heads > kMostHeads * target_.workers;
  if (!takes_few_rows(graph_, attention) || q.shape[0] != 1 || stages_[first].extent != heads) return;
  const auto queries = writer(first, attention.q), keys = writer(first, attention.k),
             values = writer(first, attention.v);
  if (!queries || !keys || !values || *keys == *values || k.buffer == v.buffer) return;
  const Buffer& of_queries = graph_.buffers()[static_cast<size_t>(q.buffer)];
  const int64_t row_bytes = heads * size_of(k.type);
  if (of_queries.kind != Buffer::Kind::temporary ||
      kept_bytes({of_queries.bytes, row_bytes * k.shape[3], row_bytes * v.shape[3]}, heads) > loop::kKeptBytes)
    return;
  Stage turned = stages_[*queries];
  auto* program = std::get_if<RowProgram>(&turned.body);
  Instruction* const store = program == nullptr || !turned.tail.empty() ? nullptr : only_store(*program);
  if (store == nullptr || store->args.size() != 1 || program->axis < 0 ||
      program->shape[static_cast<size_t>(program->axis)] % heads != 0 ||
      store->strides[static_cast<size_t>(program->axis)] == 0)
    return;
  const std::optional<NewRow> key = new_row(graph_, stages_[*keys], k), one = new_row(graph_, stages_[*values], v);
  if (!key || !one) return;
  if (repeats && (key->sequences > 1 || one->sequences > 1)) return;
  const auto &at = key->place, &beside = one->place;
  const Value place = value(at.position), other = value(beside.position);
  if (place.buffer != other.buffer || place.offset != other.offset || place.type != other.type ||
      at.size != beside.size || at.wrap != beside.wrap || !may_move({*queries, *keys, *values}, first, last))
    return;
  // The blocks must follow each other from the first position to the last: one of them contains the new position.
  int64_t next = 0;
  std::vector<Stage> parts;
  for (size_t part = first; part < last; ++part) {
    const auto& body = std::get<AttentionStage>(stages_[part].body);
    const Value &keys_of = value(body.k), &values_of = value(body.v);
    const int64_t from = keys_of.offset - key->cache, step = keys_of.strides[2];
    const int64_t values_from = values_of.offset - one->cache, values_step = values_of.strides[2];
    if (from != next * step || values_from != next * values_step) return;
    next += keys_of.shape[2];
    parts.push_back(whole(stages_[part], turned, *key, *one));
    if (!own_tiles(parts.back())) return;
    if (!keeps_all_heads(graph_, parts.back()) && (repeats || !in_equal_parts(parts.back()))) return;
  }
  if (next != at.size) return;
  std::move(parts.begin(), parts.end(), stages_.begin() + static_cast<std::ptrdiff_t>(first));
  gone_.insert({*queries, *keys, *values});
}

}  // namespace

std::vector<Stage> fuse_kv_append(Graph& graph, std::vector<Stage> stages, const Target& target) {
  return Appender(graph, std::move(stages), target).run();
}

std::vector<int> made_buffers(const Graph& graph, const Stage& stage) {
  std::vector<int> made;
  const auto add = [&](const Stage& one) {
    const auto* program = std::get_if<RowProgram>(&one.body);
    for (size_t i = 0; program != nullptr && i < program->code.size(); ++i)
      if (program->code[i].kind == Instruction::Kind::store)
        made.push_back(graph.values()[static_cast<size_t>(program->code[i].value)].buffer);
  };
  add(stage);
  for (const Stage& next : stage.tail) add(next);
  return made;
}

bool keeps_all_heads(const Graph& graph, const Stage& stage) {
  int64_t all = 0;
  for (const int buffer : made_buffers(graph, stage))
    all += kept_bytes({graph.buffers()[static_cast<size_t>(buffer)].bytes}, 1);
  return all <= loop::kKeptBytes;
}

}  // namespace ark::compiler
