// See region_history.hpp.
#include "plan/region_history.hpp"

#include <algorithm>
#include <utility>

namespace ark::plan {

RegionHistory::RegionHistory(const Graph& graph, const std::vector<Stage>& stages)
    : graph_(graph),
      stages_(stages),
      written_(graph.buffers().size(), false),
      skipped_(graph.buffers().size(), false),
      records_(graph.buffers().size()) {
  for (const Stage& stage : stages) {
    for (const Access& access : stage.accesses) {
      const int buffer = graph.values()[access.value].buffer;
      if (access.write && buffer >= 0) written_[buffer] = true;
    }
  }
  for (size_t buffer = 0; buffer < written_.size(); ++buffer) skipped_[buffer] = !written_[buffer];
}

void RegionHistory::add(int stage, const std::vector<int>& indices, const std::vector<Task>& tasks) {
  const Stage& what = stages_[stage];
  for (const Access& access : what.accesses) {
    const int buffer = graph_.values()[access.value].buffer;
    if (!may_conflict(buffer)) continue;
    Record record;
    record.stage = stage;
    record.write = access.write;
    record.whole = region_of(graph_, what, access, 0, what.extent);
    record.tasks = indices;
    record.same = access.axis < 0 || indices.size() == 1 || tasks[indices[0]].replica;
    if (!record.same) {
      for (const int index : indices) {
        record.regions.push_back(region_of(graph_, what, access, tasks[index].begin, tasks[index].end));
      }
    }
    std::vector<Record>& records = records_[buffer];
    if (record.write) {  // not what this very stage reads: nothing orders its tiles among each other
      std::erase_if(records, [&](const Record& old) { return old.stage != stage && covers(record.whole, old.whole); });
    }
    records.push_back(std::move(record));
  }
}

void RegionHistory::conflicts(int buffer, const Region& region, bool write,
                              const std::function<void(const Record&, int task)>& visit) const {
  if (!may_conflict(buffer)) return;
  const std::vector<Record>& records = records_[buffer];
  int covered_by = -1;  // the stage whose write hides everything older
  for (auto record = records.rbegin(); record != records.rend(); ++record) {
    if (covered_by >= 0 && record->stage != covered_by) break;
    if (!record->write && !write) continue;
    if (!overlap(record->whole, region)) continue;
    for (size_t index = 0; index < record->tasks.size(); ++index) {
      if (record->same || overlap(record->regions[index], region)) visit(*record, record->tasks[index]);
    }
    if (record->write && covers(record->whole, region)) covered_by = record->stage;
  }
}

}  // namespace ark::plan
