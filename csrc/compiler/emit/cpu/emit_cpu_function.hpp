// The function of one stage as C++ text under construction, and the operands that its tasks pass.
//
// The text depends only on shapes, strides, types and operators, never on addresses or names: p0, p1, ... are the
// operands in the order in which the body first names them. Stages with equal text share one function, which is how
// identical layers share code.
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

// Where the text runs: on a CPU's worker, or on all threads of a block (kernels/cuda/loop).
enum class Code : uint8_t { cpu, cuda };

class FunctionWriter {
 public:
  FunctionWriter(const Graph& graph, const Stage& stage, Code code) : graph_(graph), stage_(&stage), code_(code) {}

  bool cuda() const { return code_ == Code::cuda; }

  const Graph& graph() const { return graph_; }
  const Stage& stage() const { return *stage_; }
  // Continues with the stage that the same task runs next, in its own scope. The scope declares the operands that
  // it names, so no register holds them before.
  void turn_to(const Stage& stage);
  const Value& value(int index) const { return graph_.values()[index]; }

  // The name of the pointer to the value's first element.
  std::string pointer(int value, bool write);
  // The same for elements that the text accesses through the device library's cache-aware functions
  // (cuda/loop/hinted.cuh). The pointer's type carries the cache policy.
  std::string element_pointer(int value, bool write);
  // The value's cache policy, by the stage's accesses.
  CachePolicy cache_of(int value, bool write) const;
  // How the stage asks for the value ahead of its loads: ", Prefetch::ahead", or nothing where that is the kernel's own
  // choice. A template argument.
  std::string prefetch_text(int value) const;
  std::string cache_text(int value) const;  // for reads, as the device library spells it: "Cache::normal"
  // The same on a GPU, but loaded where it is used (Later of cuda/loop/task.cuh) if the value is a plain operand.
  std::string pointer_later(int value, bool write);
  // Whether lines of the value's elements start at multiples of 16 bytes, as a constant in the text: "false" if their
  // strides (in elements) rule it out, "true", or "kAligned": true, but where the function has a variant, which the
  // operand's address decides on when the task's turn comes (lookahead.cuh).
  std::string aligned(int value, const std::vector<int64_t>& strides);
  // The text multiplies with warp groups if the target has them (kernels/cuda/loop/tile_group.cuh) and kAligned, if the
  // text uses it, is true.
  void multiply_by_groups() { by_groups_ = true; }
  bool by_groups() const { return by_groups_; }
  // A task's first half has begun to copy what the products of its second read (stage_scales()).
  void have_scales_staged() { scales_staged_ = true; }
  bool scales_staged() const { return scales_staged_; }
  // The buffer's values are not operands: they stay in the block's kept_bytes() from a task's first half to its second
  // (prologue_fusion.hpp). With several `parts`, of equal size, only part `begin` stays there: the text handles one
  // after the other (kv_append.hpp).
  void keep(int buffer, int64_t parts = 1);
  // The elements of a part if only one part is kept; else 0.
  int64_t kept_part(int value) const;
  // The first thread for work that takes few of a block's threads. Concurrent pieces of work start at different ones.
  // `parts`: as for keep(). The text then runs once per part, between code that needs all registers.
  void begin_with(int thread, int64_t parts) {
    first_thread_ = thread;
    parts_ = parts;
  }
  int first_thread() const { return first_thread_; }
  int64_t parts() const { return parts_; }
  // The buffer's elements are packets (cuda/loop/packets.cuh), pushed by ranks if there are any.
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
  // Reserves aligned bytes in the worker's scratch memory; returns their offset.
  int64_t scratch(int64_t bytes);
  std::string scratch_at(int64_t offset) const;

  // Throws Error(invalid_argument) naming the stage and its origin.
  [[noreturn]] void refuse(const std::string& why) const;
  template <class First, class... Rest>
  [[noreturn]] void refuse(fmt::format_string<First, Rest...> pattern, const First& first, const Rest&... rest) const {
    refuse(formatted(pattern, first, rest...));
  }

  // The tile's range of indices in a dimension of this length: "begin" if that is the extent.
  std::string tile_begin(int64_t length) const { return scaled("begin", length); }
  std::string tile_end(int64_t length) const { return scaled("end", length); }
  // The same for a loop's end condition. On a GPU it is reloaded each time, so that no register holds it across the
  // loop's body. Not for a task's first half, whose tile differs.
  std::string tile_past(int64_t length) const { return scaled(cuda() ? "context.past()" : "end", length); }
  // The dimension of the value that tiles cut, by the stage's accesses; -1: none.
  int axis_of(int value, bool write) const;

  std::string body() const;  // with the operands' declarations
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
  std::vector<std::set<CachePolicy>> caches_;  // by operand: of all uses
  struct Block {
    size_t begin;  // offset in the text
    std::string indent;
    std::set<size_t> named, kept;  // operands, kept values
  };
  std::vector<Block> blocks_{{0, "  ", {}, {}}};
  std::map<int, Push> polled_;  // by buffer
  struct Kept {
    int64_t offset = 0;
    int64_t part = 0;  // bytes of a part; 0: the whole buffer is kept
  };
  std::map<int, Kept> kept_;      // by buffer
  std::vector<int> kept_values_;  // named so far
  int64_t kept_end_ = 0;
  std::string text_;
  int depth_ = 1;
  int first_thread_ = 0;
  int64_t parts_ = 1;
  int64_t scratch_ = 0;
  bool by_groups_ = false, scales_staged_ = false;
};

// "float", "bf16", ...: the element type in cpu/types.hpp.
const char* cpp_type(ScalarType type);
// A literal of the value's type as lanes: "splat(0x1p-1f)".
std::string cpp_lanes(const Value& literal);
// "i0 * 64 + i1 * 2"; "0" if all strides are.
std::string cpp_offset(const std::vector<std::string>& indices, const std::vector<int64_t>& strides);

void emit(FunctionWriter& to, const RowProgram& program);
void emit(FunctionWriter& to, const MatmulStage& matmul);
// "{.depth = 64, ...}": the product's strides, for the kernels of all targets.
std::string product_shape(FunctionWriter& to, const MatmulStage& matmul);
// A product with quantized weights.
void emit_dequant_matmul(FunctionWriter& to, const MatmulStage& matmul);
// One of several such products, as an argument of dequant_products().
std::string dequant_share(FunctionWriter& to, const MatmulStage& matmul, size_t number);
// Whether stage_scales() pays: the products have scales before their sums are complete, and those of a column are
// adjacent (others cost more time than they save). They are inputs, which the task's first half does not write.
bool may_stage_scales(const FunctionWriter& to, std::span<const MatmulStage> products);
// Copies scales of coded weights to shared memory while the task's first half makes the products' rows.
void stage_scales(FunctionWriter& to, std::span<const MatmulStage> products);
void emit(FunctionWriter& to, const ProductsStage& stage);
// `make`: writes the code that makes the queries and the appended position for one KV head, tile [begin, end).
void emit(FunctionWriter& to, const AttentionStage& attention, const std::function<void()>& make = {});
void emit(FunctionWriter& to, const CombineStage& combine);
void emit(FunctionWriter& to, const GatherStage& gather);
void emit(FunctionWriter& to, const ScatterStage& scatter);
void emit(FunctionWriter& to, const SelectStage& select);
void emit(FunctionWriter& to, const ScanStage& scan);
void emit(FunctionWriter& to, const BagStage& bag);
void emit(FunctionWriter& to, const ExpertsStage& experts);
void emit(FunctionWriter& to, const CheckStage& check);
void emit(FunctionWriter& to, const CollectiveStage& collective);
void emit(FunctionWriter& to, const StopStage& stop);

}  // namespace ark::compiler
