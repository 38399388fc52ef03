// Stages that every worker may run for itself (or must: StopStage), and which of those copies are never read.
#pragma once

#include <vector>

#include "compiler/schedule/tile.hpp"

namespace ark::compiler {

// Stages that write the same buffer are replicated together or not at all, since a buffer is either own or shared.
class ReplicaGroups {
 public:
  ReplicaGroups(const Graph& graph, const std::vector<Stage>& stages, const Target& target);

  enum class Choice : char { open, cut, replicated };
  bool may_replicate(int stage) const { return may_replicate_[group_[stage]] && choice_[group_[stage]] != Choice::cut; }
  bool is_replicated(int stage) const { return choice_[group_[stage]] == Choice::replicated; }
  void choose(int stage, bool replicated) { choice_[group_[stage]] = replicated ? Choice::replicated : Choice::cut; }

 private:
  std::vector<int> group_;           // by stage
  std::vector<char> may_replicate_;  // by group
  std::vector<Choice> choice_;       // by group
};

// Removes replicas whose copy no task on their worker reads; one of each stage stays.
void drop_unread_replicas(const Graph& graph, const std::vector<Stage>& stages, Cut& cut);

}  // namespace ark::compiler
