// Groups nodes into stages. In program order, each row node joins the groups that made its operands if draft_rows()
// accepts them together and no cycle of groups arises; any other node is a separate group. The groups are then
// ordered so that each comes after its dependencies, as close to program order as possible.
#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <queue>
#include <set>
#include <utility>
#include <vector>

#include "compiler/fuse/fuse_dependencies.hpp"
#include "compiler/fuse/fuse_rows.hpp"
#include "compiler/fuse/fuse_single.hpp"
#include "compiler/graph/graph_check.hpp"
#include "compiler/graph/stage.hpp"

namespace ark::compiler {

namespace {

constexpr size_t kMostNodes = 128;  // of a stage: no real layer has more, and each added node drafts the stage again

// Counts loads and stores, repeated ones of a value separately.
int operands_of(const RowDraft& draft) {
  return static_cast<int>(std::count_if(draft.items.begin(), draft.items.end(), [](const RowDraft::Item& item) {
    using Kind = RowProgram::Instruction::Kind;
    return item.kind == Kind::load || item.kind == Kind::store;
  }));
}

// The nodes of one stage.
struct Group {
  std::vector<int> nodes;         // in increasing order
  std::vector<int> before;        // the groups that it depends on
  std::optional<RowDraft> draft;  // of a group that was merged: the draft that showed that its nodes go together
};

class Grouper {
 public:
  Grouper(const Graph& graph, const Dependencies& dependencies)
      : graph_(graph), dependencies_(dependencies), group_of_(graph.nodes().size(), -1) {}

  // In a valid execution order. Dead nodes are left out.
  std::vector<Group> group() {
    for (size_t n = 0; n < graph_.nodes().size(); ++n) {
      if (dependencies_.live[n]) add(static_cast<int>(n));
    }
    return ordered();
  }

 private:
  void add(int node) {
    const int own = static_cast<int>(groups_.size());
    groups_.push_back({{node}, {}, {}});
    group_of_[node] = own;
    for (const auto& edge : dependencies_.before[node]) {
      if (dependencies_.live[edge.node]) groups_[own].before.push_back(group_of_[edge.node]);
    }
    if (!is_row_node(graph_.nodes()[node])) return;
    std::vector<int> makers;
    for (const auto& edge : dependencies_.before[node]) {
      if (edge.value && is_row_node(graph_.nodes()[edge.node])) makers.push_back(edge.node);
    }
    std::sort(makers.rbegin(), makers.rend());
    // Groups that made parts of one operand join together or not at all; others join one by one.
    std::map<int, std::set<int>> by_buffer;
    for (int maker : makers) {
      const int buffer = graph_.values()[graph_.nodes()[maker].outputs[0]].buffer;
      by_buffer[buffer].insert(group_of_[maker]);
    }
    for (auto& [buffer, groups] : by_buffer) {
      groups.insert(own);
      if (groups.size() > 2) try_merge(groups);
    }
    for (int maker : makers) try_merge({group_of_[maker], group_of_[node]});
  }

  // Whether one of the groups depends on another through a group outside the set.
  bool reaches_around(const std::set<int>& merged) const {
    std::vector<bool> seen(groups_.size(), false);
    std::vector<int> stack;
    const auto visit = [&](int group) {
      if (!seen[group]) stack.push_back(group);
      seen[group] = true;
    };
    for (int group : merged) {
      for (int earlier : groups_[group].before) {
        if (merged.count(earlier) == 0) visit(earlier);
      }
    }
    while (!stack.empty()) {
      const int group = stack.back();
      stack.pop_back();
      if (merged.count(group) > 0) return true;
      for (int earlier : groups_[group].before) visit(earlier);
    }
    return false;
  }

  void try_merge(const std::set<int>& merged) {
    std::vector<int> nodes;
    for (int group : merged) nodes.insert(nodes.end(), groups_[group].nodes.begin(), groups_[group].nodes.end());
    if (merged.size() < 2 || nodes.size() > kMostNodes || reaches_around(merged)) return;
    std::sort(nodes.begin(), nodes.end());
    auto draft = draft_rows(graph_, dependencies_, nodes);
    if (!draft || operands_of(*draft) > kMostOperands) return;
    const int into = *merged.begin();
    for (int node : nodes) group_of_[node] = into;
    std::set<int> before;
    for (int group : merged) {
      for (int earlier : groups_[group].before) {
        if (merged.count(earlier) == 0) before.insert(earlier);
      }
      groups_[group] = {};
    }
    groups_[into] = {std::move(nodes), {before.begin(), before.end()}, std::move(draft)};
    for (Group& one : groups_) {
      for (int& group : one.before) {
        if (merged.count(group) > 0) group = into;
      }
    }
  }

  std::vector<Group> ordered() {
    std::vector<std::vector<int>> after(groups_.size());
    std::vector<int> waits(groups_.size(), 0);
    for (size_t g = 0; g < groups_.size(); ++g) {
      auto& before = groups_[g].before;
      std::sort(before.begin(), before.end());
      before.erase(std::unique(before.begin(), before.end()), before.end());
      for (int earlier : before) {
        after[earlier].push_back(static_cast<int>(g));
        ++waits[g];
      }
    }
    using Entry = std::pair<int, int>;  // first node, group
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> ready;
    for (size_t g = 0; g < groups_.size(); ++g) {
      if (waits[g] == 0 && !groups_[g].nodes.empty()) ready.emplace(groups_[g].nodes.front(), static_cast<int>(g));
    }
    std::vector<Group> result;
    while (!ready.empty()) {
      const int group = ready.top().second;
      ready.pop();
      result.push_back(std::move(groups_[group]));
      for (int next : after[group]) {
        if (--waits[next] == 0) ready.emplace(groups_[next].nodes.front(), next);
      }
    }
    return result;
  }

  const Graph& graph_;
  const Dependencies& dependencies_;
  std::vector<Group> groups_;
  std::vector<int> group_of_;  // by node
};

}  // namespace

std::vector<Stage> make_stages(Graph& graph) {
  graph.check();
  const Dependencies dependencies = find_dependencies(graph);
  std::vector<Stage> stages;
  for (Group& group : Grouper(graph, dependencies).group()) {
    if (!is_row_node(graph.nodes()[group.nodes.front()])) {
      stages.push_back(single_stage(graph, group.nodes.front()));
      continue;
    }
    if (!group.draft) group.draft = draft_rows(graph, dependencies, group.nodes);
    if (!group.draft) fail_node(graph.nodes()[group.nodes.front()], "cannot be computed row by row");
    stages.push_back(finish_rows(graph, std::move(*group.draft)));
  }
  return stages;
}

}  // namespace ark::compiler
