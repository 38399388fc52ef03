// The function of one stage as C++ text, while it is being written; and the operands that its tasks are given.
//
// The text depends on shapes, strides, types and operators alone, never on where something lies or what it is called:
// p0, p1, ... are the operands in the order in which the body first names them. Stages with equal text share one
// function, which is how identical layers share code.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "compiler/graph/graph.hpp"
#include "compiler/graph/stage.hpp"
#include "util/format.hpp"

namespace ark::compiler {

// What the text is compiled as: for a CPU's worker, or for all threads of a block (kernels/cuda/loop).
enum class Code : uint8_t { cpu, cuda };

class FunctionWriter {
 public:
  FunctionWriter(const Graph& graph, const Stage& stage, Code code) : graph_(graph), stage_(&stage), code_(code) {}

  bool cuda() const { return code_ == Code::cuda; }

  const Graph& graph() const { return graph_; }
  const Stage& stage() const { return *stage_; }
  // The text goes on with what the same task does next, in a block of its own, which declares the operands that it
  // names: no register holds them before.
  void turn_to(const Stage& stage);
  const Value& value(int index) const { return graph_.values()[index]; }

  // The name of the pointer to the value's first element.
  std::string pointer(int value, bool write);
  // The same of elements that the text loads and stores by functions of the device library that know of caches
  // (cuda/loop/hinted.cuh): their type says what a GPU's caches do with them.
  std::string element_pointer(int value, bool write);
  // What caches do with the value, by the stage's accesses.
  CachePolicy cache_of(int value, bool write) const;
  std::string cache_text(int value) const;  // of reads, as the device library calls it: "Cache::normal"
  // The same on a GPU, asked for where it is used (Later of cuda/loop/task.cuh) if the value is a plain operand.
  std::string pointer_later(int value, bool write);
  // Whether lines of the value's elements begin at multiples of 16 bytes, as a constant of the text: "false" where
  // their strides (in elements) say so, "true", or "kAligned", which is chosen by where the operand lies when the
  // task's turn comes (lookahead.cuh).
  std::string aligned(int value, const std::vector<int64_t>& strides);
  // Groups of warps multiply in the text, where the target has them (kernels/cuda/loop/tile_group.cuh) and kAligned, if
  // the text asks for it, is true.
  void multiply_by_groups() { by_groups_ = true; }
  bool by_groups() const { return by_groups_; }
  // Values of the buffer are no operands: they stay in the block's kept_bytes() from the first half of a task to the
  // second (prologue_fusion.hpp).
  void keep(int buffer);
  // The text's first thread of a block for what few of them do: what stands side by side begins with different ones.
  void begin_with(int thread) { first_thread_ = thread; }
  int first_thread() const { return first_thread_; }
  // Elements of the buffer are packets (cuda/loop/packets.cuh), pushed by ranks where there are any.
  void poll(int buffer, const Push& pushed) { polled_[buffer] = pushed; }
  bool is_polled(int value) const { return polled_.count(graph_.values()[value].buffer) != 0; }

  void line(const std::string& text);  // indented
  void open(const std::string& text);  // "... {"
  template <class First, class... Rest>
  void line(fmt::format_string<First, Rest...> pattern, const First& first, const Rest&... rest) {
    line(formatted(pattern, first, rest...));
  }
  template <class First, class... Rest>
  void open(fmt::format_string<First, Rest...> pattern, const First& first, const Rest&... rest) {
    open(formatted(pattern, first, rest...));
  }
  void close(const std::string& text = "}");
  // Bytes of the worker's scratch memory, aligned; returns their offset.
  int64_t scratch(int64_t bytes);
  std::string scratch_at(int64_t offset) const;

  // Throws Error(invalid_argument) that names the stage and its origin.
  [[noreturn]] void refuse(const std::string& why) const;
  template <class First, class... Rest>
  [[noreturn]] void refuse(fmt::format_string<First, Rest...> pattern, const First& first, const Rest&... rest) const {
    refuse(formatted(pattern, first, rest...));
  }

  // The range of indices that a tile takes of a dimension of that length: "begin" where it is the extent.
  std::string tile_begin(int64_t length) const { return scaled("begin", length); }
  std::string tile_end(int64_t length) const { return scaled("end", length); }
  // The same where a loop looks whether it is over: on a GPU asked for each time, so that no register holds it while
  // what is in the loop runs. Not in the first half of a task, which has another tile.
  std::string tile_past(int64_t length) const { return scaled(cuda() ? "context.past()" : "end", length); }
  // The dimension of the value that tiles cut by the stage's accesses; -1: none.
  int axis_of(int value, bool write) const;

  std::string body() const;  // with the declarations of the operands
  const std::vector<int>& operands() const { return operands_; }
  // By operand: whether aligned() depends on it.
  const std::vector<bool>& aligned() const { return aligned_; }
  int64_t scratch_bytes() const { return scratch_; }

 private:
  std::string scaled(const std::string& name, int64_t length) const;
  size_t operand(int value, bool write);
  std::string named(int value, bool write, CachePolicy cache);

  const Graph& graph_;
  const Stage* stage_;
  const Code code_;
  std::vector<int> operands_;  // values
  std::vector<bool> written_, aligned_;
  std::vector<std::set<CachePolicy>> caches_;  // by operand: of all places that name it
  struct Block {
    size_t begin;  // of the text
    std::string indent;
    std::set<size_t> named, kept;  // operands, kept values
  };
  std::vector<Block> blocks_{{0, "  ", {}, {}}};
  std::map<int, Push> polled_;    // by buffer
  std::map<int, int64_t> kept_;   // buffer -> where it begins
  std::vector<int> kept_values_;  // that have been named
  int64_t kept_end_ = 0;
  std::string text_;
  int depth_ = 1;
  int first_thread_ = 0;
  int64_t scratch_ = 0;
  bool by_groups_ = false;
};

// "float", "bf16", ...: elements of the type in cpu/types.hpp.
const char* cpp_type(ScalarType type);
// A literal of the value's type as lanes: "splat(0x1p-1f)".
std::string cpp_lanes(const Value& literal);
// "i0 * 64 + i1 * 2", "0" where all strides are.
std::string cpp_offset(const std::vector<std::string>& indices, const std::vector<int64_t>& strides);

void emit_rows(FunctionWriter& to, const RowProgram& program);
void emit_matmul(FunctionWriter& to, const MatmulStage& matmul);
// "{.depth = 64, ...}": the product's strides, for all targets' kernels.
std::string product_shape(FunctionWriter& to, const MatmulStage& matmul);
// A product of coded weights.
void emit_dequant_matmul(FunctionWriter& to, const MatmulStage& matmul);
// Of several, one, as an argument of dequant_products().
std::string dequant_share(FunctionWriter& to, const MatmulStage& matmul, size_t number);
void emit_products(FunctionWriter& to, const ProductsStage& stage);
// `make`: writes what makes the queries and the position that is added, for one head of keys, tile [begin, end).
void emit_attention(FunctionWriter& to, const AttentionStage& attention, const std::function<void()>& make = {});
void emit_combine(FunctionWriter& to, const CombineStage& combine);
void emit_gather(FunctionWriter& to, const GatherStage& gather);
void emit_scatter(FunctionWriter& to, const ScatterStage& scatter);
void emit_select(FunctionWriter& to, const SelectStage& select);
void emit_scan(FunctionWriter& to, const ScanStage& scan);
void emit_bag(FunctionWriter& to, const BagStage& bag);
void emit_experts(FunctionWriter& to, const ExpertsStage& experts);
void emit_check(FunctionWriter& to, const CheckStage& check);
void emit_collective(FunctionWriter& to, const CollectiveStage& collective);
void emit_stop(FunctionWriter& to, const StopStage& stop);

}  // namespace ark::compiler
