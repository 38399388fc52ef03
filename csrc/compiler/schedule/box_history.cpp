// Keeps one record per access of a stage, and drops records that a later write covers. See box_history.hpp.
#include "compiler/schedule/box_history.hpp"

#include <algorithm>
#include <utility>

namespace ark::compiler {

BoxHistory::BoxHistory(const Graph& graph, const std::vector<Stage>& stages, const std::vector<Placement>* placements)
    : graph_(graph),
      stages_(stages),
      space_(graph.buffers().size()),
      shift_(graph.buffers().size(), 0),
      written_(graph.buffers().size(), false),
      skipped_(graph.buffers().size(), false),
      records_(graph.buffers().size() + 1) {
  for (const Stage& stage : stages) {
    for (const Access& access : stage.accesses) {
      const int buffer = graph.values()[access.value].buffer;
      if (access.write && buffer >= 0) written_[buffer] = true;
    }
  }
  for (size_t buffer = 0; buffer < written_.size(); ++buffer) {
    skipped_[buffer] = !written_[buffer];
    space_[buffer] = static_cast<int>(buffer);
    if (placements == nullptr || (*placements)[buffer].offset < 0) continue;
    if ((*placements)[buffer].own) skipped_[buffer] = true;
    space_[buffer] = static_cast<int>(written_.size());
    shift_[buffer] = (*placements)[buffer].offset;
  }
}

void BoxHistory::add(int stage, const std::vector<int>& indices, const std::vector<Task>& tasks, int step) {
  const Stage& what = stages_[stage];
  for (const Access& access : what.accesses) {
    const int buffer = graph_.values()[access.value].buffer;
    if (!may_conflict(buffer)) continue;
    Record record;
    record.stage = stage;
    record.step = step;
    record.write = access.write;
    const auto placed = [&](int64_t begin, int64_t end) {
      Box box = box_of(graph_, what, access, begin, end);
      box.offset += shift_[buffer];
      return box;
    };
    record.whole = placed(0, what.extent);
    record.tasks = indices;
    record.same = access.axis < 0 || indices.size() == 1 || tasks[indices[0]].replica;
    if (!record.same) {
      for (const int index : indices) record.boxes.push_back(placed(tasks[index].begin, tasks[index].end));
    }
    std::vector<Record>& records = records_[space_[buffer]];
    if (record.write) {  // keep this stage's own records: nothing orders its tiles among each other
      std::erase_if(records, [&](const Record& old) {
        return (old.stage != stage || old.step != step) && covers(record.whole, old.whole);
      });
    }
    records.push_back(std::move(record));
  }
}

void BoxHistory::conflicts(int buffer, const Box& asked, bool write,
                           const std::function<void(const Record&, int task)>& visit) const {
  if (!may_conflict(buffer)) return;
  Box box = asked;
  box.offset += shift_[buffer];
  const std::vector<Record>& records = records_[space_[buffer]];
  const Record* hides = nullptr;  // a record of the stage whose write hides everything older
  for (auto record = records.rbegin(); record != records.rend(); ++record) {
    if (hides != nullptr && (record->stage != hides->stage || record->step != hides->step)) break;
    if (!record->write && !write) continue;
    if (!overlap(record->whole, box)) continue;
    for (size_t index = 0; index < record->tasks.size(); ++index) {
      if (record->same || overlap(record->boxes[index], box)) visit(*record, record->tasks[index]);
    }
    if (record->write && covers(record->whole, box)) hides = &*record;
  }
}

}  // namespace ark::compiler
