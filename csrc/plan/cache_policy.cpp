// The choice behind cache_policy.hpp.
#include "plan/cache_policy.hpp"

#include <algorithm>
#include <set>
#include <variant>

#include "error.hpp"
#include "plan/append_positions.hpp"

namespace ark::plan {

namespace {

// Of a step that fits into the cache beside what the launch and other work bring there.
constexpr double kNearShare = 0.8;

const Value& value_of(const Plan& plan, const Access& access) {
  return plan.graph.values()[static_cast<size_t>(access.value)];
}

double bytes_of(const Plan& plan, const Access& access) {
  const Value& value = value_of(plan, access);
  int64_t elements = 1;  // an expanded dimension is one
  for (size_t d = 0; d < value.shape.size(); ++d)
    if (value.strides[d] != 0) elements *= value.shape[d];
  return static_cast<double>(elements * size_of(value.type));
}

// The product of few rows whose matrix streams past its rows: kernels/cuda/loop/matmul.cuh takes kernels that load
// with hints for up to 4 rows of halves (16 where its columns' depth is adjacent) and 8 of float.
bool streams_matrix(const Plan& plan, const MatmulStage& matmul) {
  const auto value = [&](int index) { return plan.graph.values()[static_cast<size_t>(index)]; };
  const Value a = value(matmul.a), b = value(matmul.b);
  if (size_of(b.type) != 2) return matmul.m <= 8;
  const bool depth_adjacent = b.shape.size() >= 2 && b.strides[b.strides.size() - 2] == 1;
  return matmul.m <= 4 || (matmul.m <= 16 && depth_adjacent && a.type == b.type);
}

bool is_streamed_matrix(const Plan& plan, const Stage& stage, const Access& access) {
  if (access.write) return false;
  if (const auto* experts = std::get_if<ExpertsStage>(&stage.body)) return access.value == experts->table;
  const auto matmuls = matmuls_of(stage);
  return std::any_of(matmuls.begin(), matmuls.end(),
                     [&](const MatmulStage& one) { return one.b == access.value && streams_matrix(plan, one); });
}

// Keys and values of attention that warps share out by positions (kFewQueries of kernels/cuda/loop/attention.cuh).
bool is_streamed_state(const Plan& plan, const Stage& stage, const Access& access) {
  const AttentionStage* const attention = attention_of(stage);
  if (attention == nullptr || access.write || (access.value != attention->k && access.value != attention->v))
    return false;
  const Shape& q = plan.graph.values()[static_cast<size_t>(attention->q)].shape;
  const Shape& k = plan.graph.values()[static_cast<size_t>(attention->k)].shape;
  return q.size() == 4 && k.size() == 4 && k[1] > 0 && q[1] / k[1] * q[2] <= 16;
}

// Whether a stage's operands are elements that its text loads and stores one by one or in runs.
bool by_elements(const Stage& stage, const Access& access) {
  if (std::holds_alternative<RowProgram>(stage.body) || std::holds_alternative<GatherStage>(stage.body)) return true;
  const auto* bag = std::get_if<BagStage>(&stage.body);
  return bag != nullptr && (access.value == bag->table || access.value == bag->out);
}

bool is_packets(const Plan& plan, const Access& access) {
  const auto buffer = static_cast<size_t>(value_of(plan, access).buffer);
  return buffer < plan.placements.size() && plan.placements[buffer].packets;
}

// Whether the CPU's text stores 16 adjacent columns at a time; of a GPU see by_elements().
bool stores_columns(const Plan& plan, const Stage& stage, const Access& access) {
  const auto* program = std::get_if<RowProgram>(&stage.body);
  if (program == nullptr || !access.write) return false;
  const Value& value = value_of(plan, access);
  return std::any_of(program->code.begin(), program->code.end(), [&](const RowProgram::Instruction& one) {
    return one.kind == RowProgram::Instruction::Kind::store && one.value == access.value && one.args.size() < 2 &&
           !value.strides.empty() && value.strides.back() == 1;
  });
}

class Choice {
 public:
  explicit Choice(Plan& plan) : plan_(plan), costs_(plan.target.caches), uses_(plan) {}

  void make() {
    for (size_t stage = 0; stage < plan_.stages.size(); ++stage) choose(stage, plan_.stages[stage]);
  }

 private:
  void choose(size_t number, Stage& stage) {
    for (Access& access : stage.accesses)
      access.cache = can_hint(plan_, stage, access) ? chosen(number, stage, access) : CachePolicy::normal;
    for (Stage& next : stage.tail) choose(number, next);
  }

  CachePolicy chosen(size_t number, const Stage& stage, const Access& access) {
    switch (plan_.target.caching) {
      case CacheChoice::none: return CachePolicy::normal;
      case CacheChoice::all_first: return CachePolicy::evict_first;
      case CacheChoice::all_last: return CachePolicy::evict_last;
      case CacheChoice::automatic: break;
    }
    return plan_.target.name == "cpu" ? for_cpu(number, stage, access) : for_gpu(number, stage, access);
  }

  // What comes back before as much else has passed as the cache holds.
  bool comes_back(size_t number, const Access& access) const {
    const double until = uses_.bytes_until_read(number, access);
    return until >= 0 && until < static_cast<double>(costs_.bytes);
  }

  // Results are new memory, whose lines the kernel's zeros have brought into the caches; so has a read of the same.
  CachePolicy for_cpu(size_t number, const Stage& stage, const Access& access) const {
    const int buffer = value_of(plan_, access).buffer;
    const bool fresh = plan_.graph.buffer_of(access.value).kind == Buffer::Kind::output;
    const bool read = std::any_of(stage.accesses.begin(), stage.accesses.end(), [&](const Access& other) {
      return !other.write && value_of(plan_, other).buffer == buffer;
    });
    const bool large = bytes_of(plan_, access) >= static_cast<double>(costs_.stream_bytes);
    const bool past = costs_.stream_bytes > 0 && large && !fresh && !read && !comes_back(number, access);
    return past ? CachePolicy::no_allocate : CachePolicy::normal;
  }

  CachePolicy for_gpu(size_t number, const Stage& stage, const Access& access) {
    const bool known = costs_.bytes > 0;
    const bool near = known && uses_.step_bytes() <= kNearShare * static_cast<double>(costs_.bytes);
    const OperandKind kind = kind_of(plan_, access);
    if (is_streamed_matrix(plan_, stage, access)) {
      if (near && costs_.plain_where_near) return CachePolicy::normal;
      if (!near && kind == OperandKind::weight && keeps(access)) return CachePolicy::evict_last;
      return CachePolicy::evict_first;
    }
    if (!known || near) return CachePolicy::normal;
    const bool again = comes_back(number, access);
    switch (kind) {
      case OperandKind::state: return costs_.states_first && !again ? CachePolicy::evict_first : CachePolicy::normal;
      case OperandKind::activation: return costs_.reused_last && again ? CachePolicy::evict_last : CachePolicy::normal;
      case OperandKind::table:
        // Rows that are read often stay by themselves, where the cache has room for some of the table.
        return costs_.states_first && bytes_of(plan_, access) > 8 * static_cast<double>(costs_.bytes)
                   ? CachePolicy::no_allocate
                   : CachePolicy::normal;
      default: return CachePolicy::normal;
    }
  }

  // Whether a parameter is among those that stay from step to step: the first ones, as many as were measured to.
  bool keeps(const Access& access) {
    const int buffer = value_of(plan_, access).buffer;
    if (kept_.count(buffer) != 0) return true;
    const double bytes = bytes_of(plan_, access);
    if (kept_bytes_ + bytes > static_cast<double>(costs_.kept_bytes)) return false;
    kept_bytes_ += bytes;
    kept_.insert(buffer);
    return true;
  }

  Plan& plan_;
  const CacheCosts& costs_;
  const NextUses uses_;
  std::set<int> kept_;  // buffers
  double kept_bytes_ = 0;
};

}  // namespace

NextUses::NextUses(const Plan& plan) : plan_(plan), before_{0}, reads_(plan.graph.buffers().size()) {
  for (size_t stage = 0; stage < plan.stages.size(); ++stage) {
    before_.push_back(before_.back() + plan.stages[stage].bytes);
    for (const Access& access : plan.stages[stage].accesses) {
      const int buffer = value_of(plan, access).buffer;
      if (access.write || buffer < 0) continue;
      std::vector<size_t>& reads = reads_[static_cast<size_t>(buffer)];
      if (reads.empty() || reads.back() != stage) reads.push_back(stage);
    }
  }
}

double NextUses::bytes_until_read(size_t stage, const Access& access) const {
  const int index = value_of(plan_, access).buffer;
  if (index < 0) return -1;
  const Buffer& buffer = plan_.graph.buffers()[static_cast<size_t>(index)];
  const std::vector<size_t>& reads = reads_[static_cast<size_t>(index)];
  const auto next = std::upper_bound(reads.begin(), reads.end(), stage);
  if (next != reads.end()) return before_[*next] - before_[stage + 1];
  if (buffer.kind != Buffer::Kind::input || reads.empty()) return -1;
  return step_bytes() - before_[stage + 1] + before_[reads.front()];
}

OperandKind kind_of(const Plan& plan, const Access& access) {
  if (access.sparse) return OperandKind::table;
  if (is_packets(plan, access)) return OperandKind::packets;
  const Buffer& buffer = plan.graph.buffer_of(access.value);
  if (buffer.kind == Buffer::Kind::temporary) return OperandKind::activation;
  if (buffer.mutated) return OperandKind::state;
  return buffer.parameter ? OperandKind::weight : OperandKind::stream;
}

bool can_hint(const Plan& plan, const Stage& stage, const Access& access) {
  if (value_of(plan, access).is_literal()) return false;
  if (plan.target.name == "cpu") return stores_columns(plan, stage, access);
  if (is_packets(plan, access)) return false;
  return is_streamed_matrix(plan, stage, access) || is_streamed_state(plan, stage, access) ||
         by_elements(stage, access);
}

void choose_cache_policies(Plan& plan) {
  Choice(plan).make();
}

const char* name_of(CachePolicy policy) {
  switch (policy) {
    case CachePolicy::normal: return "normal";
    case CachePolicy::evict_first: return "evict_first";
    case CachePolicy::evict_last: return "evict_last";
    case CachePolicy::no_allocate: return "no_allocate";
  }
  return "normal";
}

const char* name_of(OperandKind kind) {
  switch (kind) {
    case OperandKind::weight: return "weight";
    case OperandKind::state: return "state";
    case OperandKind::table: return "table";
    case OperandKind::stream: return "stream";
    case OperandKind::packets: return "packets";
    case OperandKind::activation: return "activation";
  }
  return "stream";
}

const char* name_of(CacheChoice choice) {
  switch (choice) {
    case CacheChoice::automatic: return "auto";
    case CacheChoice::none: return "none";
    case CacheChoice::all_first: return "all-first";
    case CacheChoice::all_last: return "all-last";
  }
  return "auto";
}

CacheChoice cache_choice(const std::string& name) {
  for (const CacheChoice one :
       {CacheChoice::automatic, CacheChoice::none, CacheChoice::all_first, CacheChoice::all_last})
    if (name == name_of(one)) return one;
  throw Error(ErrorKind::invalid_argument,
              "cache is '" + name + "'; it takes 'auto', 'none', 'all-first' or 'all-last'");
}

}  // namespace ark::plan
