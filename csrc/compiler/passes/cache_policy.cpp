// Chooses the policy of each access; cache_policy.hpp states the contract. The thresholds come from CacheCosts, which
// are measured on the machine.
#include "compiler/passes/cache_policy.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <variant>
#include <vector>

#include "compiler/passes/cache_hints.hpp"
#include "util/error.hpp"

namespace ark::compiler {

namespace {

// The share of the cache that a step can fill beside what the launch and other work load there.
constexpr double kNearShare = 0.8;

// From so many bytes of a column on, what a CPU's product reads of it is best asked for ahead in the same column; with
// shorter ones that is too often the next column (docs/measurements.md).
constexpr int64_t kLongColumn = 8192, kLongColumnOfRows = 16384;
constexpr int64_t kFewRows = 4;  // the kernels with more rows do not prefetch

const Value& value_of(const Plan& plan, const Access& access) {
  return plan.graph.values()[static_cast<size_t>(access.value)];
}

double bytes_of(const Plan& plan, const Access& access) {
  const Value& value = value_of(plan, access);
  int64_t elements = 1;  // an expanded dimension counts once
  for (size_t d = 0; d < value.shape.size(); ++d)
    if (value.strides[d] != 0) elements *= value.shape[d];
  return static_cast<double>(elements * size_of(value.type));
}

class Choice {
 public:
  explicit Choice(Plan& plan) : plan_(plan), costs_(plan.target.caches), uses_(plan) { find_near_tables(); }

  void make() {
    for (size_t stage = 0; stage < plan_.stages.size(); ++stage) choose(stage, plan_.stages[stage]);
  }

 private:
  bool is_looked_up(const Access& access) const {
    return kind_of(plan_, access) == OperandKind::table && !access.write;
  }

  // The smallest tables of the step, as many as fit into the cache together.
  void find_near_tables() {
    std::map<int, double> bytes;  // by buffer
    for (const Stage& stage : plan_.stages)
      for (const Access& access : stage.accesses)
        if (is_looked_up(access) && !std::holds_alternative<ExpertsStage>(stage.body))
          bytes[value_of(plan_, access).buffer] = static_cast<double>(plan_.graph.buffer_of(access.value).bytes);
    std::vector<std::pair<double, int>> tables;
    for (const auto& [buffer, size] : bytes) tables.emplace_back(size, buffer);
    std::ranges::sort(tables);
    double room = kNearShare * static_cast<double>(costs_.bytes);
    for (const auto& [size, buffer] : tables) {
      if ((room -= size) < 0) return;
      near_tables_.insert(buffer);
    }
  }

  void choose(size_t number, Stage& stage) {
    for (Access& access : stage.accesses)
      access.cache = can_hint(plan_, stage, access) ? chosen(number, stage, access) : CachePolicy::normal;
    agree(stage, &is_streamed_matrix);
    agree(stage, &is_streamed_state);
    if (plan_.target.name == "cpu" && plan_.target.caching == CacheChoice::automatic && costs_.worker_bytes > 0)
      prefetch(stage);
    for (Stage& next : stage.tail) {
      choose(number, next);
      // The stage's accesses include those of its tail.
      for (Access& access : stage.accesses)
        for (const Access& same : next.accesses)
          if (same.value == access.value && same.write == access.write && !can_hint(plan_, stage, access))
            access.cache = same.cache;
    }
  }

  // One kernel loads these accesses with one policy: plain loads unless all of them have the same policy.
  void agree(Stage& stage, bool (*loaded)(const Plan&, const Stage&, const Access&)) {
    std::vector<Access*> together;
    for (Access& access : stage.accesses)
      if (loaded(plan_, stage, access)) together.push_back(&access);
    if (std::ranges::any_of(together, [&](const Access* one) { return one->cache != together[0]->cache; }))
      for (Access* const one : together) one->cache = CachePolicy::normal;
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

  // Whether the data is read again before the cache's capacity in other data has passed.
  bool comes_back(size_t number, const Access& access) const {
    const double until = uses_.bytes_until_read(number, access);
    return until >= 0 && until < static_cast<double>(costs_.bytes);
  }

  // Results stay plain: they are new memory, whose lines zeroing by the kernel has just brought into the caches. So do
  // values that the stage also reads.
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

  void prefetch(Stage& stage) const {
    const auto* const product = std::get_if<MatmulStage>(&stage.body);
    const auto* const bag = std::get_if<BagStage>(&stage.body);
    for (Access& access : stage.accesses) {
      if (access.write) continue;
      if (product != nullptr && product->codes.bits == 0 && product->m <= kFewRows && access.value == product->b)
        access.prefetch = of_matrix(*product);
      if (bag != nullptr && access.value == bag->table &&
          bytes_of(plan_, access) > static_cast<double>(costs_.worker_bytes))
        access.prefetch = Prefetch::ahead;
    }
  }

  // In a step that the workers' own caches hold, a product's loads hit, and prefetches take the place of loads. Only
  // float32 is loaded so fast that this shows. If others use the caches between steps, one row loses least.
  Prefetch of_matrix(const MatmulStage& product) const {
    const Value& b = plan_.graph.values()[static_cast<size_t>(product.b)];
    const double held = static_cast<double>(costs_.worker_bytes) * plan_.target.workers;
    if (b.type == ScalarType::f32 && product.m == 1 && uses_.step_bytes() <= kNearShare * held) return Prefetch::none;
    const bool along = b.strides[b.shape.size() - 2] == 1 || product.k == 1;
    const int64_t column = product.k * size_of(b.type);
    return along && column >= (product.m == 1 ? kLongColumn : kLongColumnOfRows) ? Prefetch::ahead : Prefetch::usual;
  }

  CachePolicy for_gpu(size_t number, const Stage& stage, const Access& access) {
    const bool known = costs_.bytes > 0;
    const bool near = known && uses_.step_bytes() <= kNearShare * static_cast<double>(costs_.bytes);
    const OperandKind kind = kind_of(plan_, access);
    if (is_streamed_matrix(plan_, stage, access)) {
      if (near && costs_.plain_where_near) return CachePolicy::normal;
      return !near && keeps(stage) ? CachePolicy::evict_last : CachePolicy::evict_first;
    }
    if (!known || near) return CachePolicy::normal;
    const bool again = comes_back(number, access);
    switch (kind) {
      case OperandKind::state: return costs_.states_first && !again ? CachePolicy::evict_first : CachePolicy::normal;
      case OperandKind::activation: return costs_.reused_last && again ? CachePolicy::evict_last : CachePolicy::normal;
      case OperandKind::table:
        // Few rows of other tables are reused while cached (performance page, "Cache policies").
        return is_looked_up(access) && near_tables_.count(value_of(plan_, access).buffer) == 0
                   ? CachePolicy::evict_first
                   : CachePolicy::normal;
      default: return CachePolicy::normal;
    }
  }

  // Whether the stage's matrices are among the parameters kept in the cache across steps: the first ones, up to the
  // measured capacity. One kernel reads all matrices of a stage, so it keeps all of them or none.
  bool keeps(const Stage& stage) {
    std::set<int> added;
    double bytes = 0;
    for (const Access& access : stage.accesses) {
      if (!is_streamed_matrix(plan_, stage, access)) continue;
      if (kind_of(plan_, access) != OperandKind::weight) return false;
      const int buffer = value_of(plan_, access).buffer;
      if (kept_.count(buffer) == 0 && added.insert(buffer).second) bytes += bytes_of(plan_, access);
    }
    if (kept_bytes_ + bytes > static_cast<double>(costs_.kept_bytes)) return false;
    kept_bytes_ += bytes;
    kept_.merge(added);
    return true;
  }

  Plan& plan_;
  const CacheCosts& costs_;
  const NextUses uses_;
  std::set<int> near_tables_, kept_;  // buffers
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
  if (is_packets(plan, access.value)) return OperandKind::packets;
  const Buffer& buffer = plan.graph.buffer_of(access.value);
  if (buffer.kind == Buffer::Kind::temporary) return OperandKind::activation;
  if (buffer.mutated) return OperandKind::state;
  return buffer.parameter ? OperandKind::weight : OperandKind::stream;
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

const char* name_of(Prefetch prefetch) {
  switch (prefetch) {
    case Prefetch::usual: return "usual";
    case Prefetch::none: return "none";
    case Prefetch::ahead: return "ahead";
  }
  return "usual";
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

}  // namespace ark::compiler
