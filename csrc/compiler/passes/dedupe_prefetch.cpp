// Collects the pages that all workers' loads name, and deals each page to one of the tasks that read it. See
// dedupe_prefetch.hpp.
#include "compiler/passes/dedupe_prefetch.hpp"

#include <algorithm>
#include <cstdint>
#include <span>
#include <tuple>

#include "compiler/schedule/prefetch.hpp"

namespace ark::compiler {

namespace {

bool share(const Plan& plan, const Stage& a, const Stage& b) {
  return std::any_of(a.accesses.begin(), a.accesses.end(), [&](const Access& one) {
    return loaded_ahead(plan.graph, a, one) &&
           std::any_of(b.accesses.begin(), b.accesses.end(),
                       [&](const Access& other) { return !other.write && other.value == one.value; });
  });
}

// Numbers runs of consecutive stages that read the same parameters, by stage. Pages are shared only within a run: a
// later reader may find them evicted.
std::vector<int> runs_of(const Plan& plan) {
  std::vector<int> runs;
  for (size_t stage = 0; stage < plan.stages.size(); ++stage) {
    const bool again = stage > 0 && share(plan, plan.stages[stage], plan.stages[stage - 1]);
    runs.push_back(stage == 0 ? 0 : runs.back() + (again ? 0 : 1));
  }
  return runs;
}

struct Asked {
  int run, value;
  int64_t offset, bytes, rows, stride;
  int task;
  size_t queue, load;

  auto what() const { return std::tie(run, value, offset, bytes, rows, stride); }
};

// A page and all its readers, ordered by task.
struct Page {
  std::span<const Asked> by;

  // Identifies pages of one value that the same tasks read.
  auto group() const { return std::tie(by.front().run, by.front().value, by.front().task, by.back().task); }
  auto place() const { return std::tuple_cat(group(), std::tuple(by.size(), by.front().offset)); }
  bool beside(const Page& other) const {
    const auto same = [](const Asked& a, const Asked& b) { return a.task == b.task; };
    return group() == other.group() && std::equal(by.begin(), by.end(), other.by.begin(), other.by.end(), same);
  }
};

// All requested pages, sorted by page.
std::vector<Asked> asked_of(const Plan& plan) {
  const std::vector<int> runs = runs_of(plan);
  std::vector<Asked> all;
  for (size_t queue = 0; queue < plan.queues.size(); ++queue) {
    const std::vector<Load>& loads = plan.queues[queue].loads;
    for (size_t i = 0; i < loads.size(); ++i) {
      const Load& load = loads[i];
      const auto stage = static_cast<size_t>(plan.tasks[static_cast<size_t>(load.task)].stage);
      all.push_back({runs[stage], load.value, load.offset, load.bytes, load.rows, load.stride, load.task, queue, i});
    }
  }
  std::sort(all.begin(), all.end(), [](const Asked& a, const Asked& b) {
    return std::tuple_cat(a.what(), std::tie(a.task)) < std::tuple_cat(b.what(), std::tie(b.task));
  });
  return all;
}

std::vector<Page> pages_of(const std::vector<Asked>& all) {
  std::vector<Page> pages;
  for (size_t first = 0, last = 0; first < all.size(); first = last) {
    while (last < all.size() && all[last].what() == all[first].what()) ++last;
    pages.push_back({std::span(all).subspan(first, last - first)});
  }
  std::sort(pages.begin(), pages.end(), [](const Page& a, const Page& b) { return a.place() < b.place(); });
  return pages;
}

}  // namespace

void dedupe_prefetch(Plan& plan) {
  std::vector<std::vector<char>> asks(plan.queues.size());
  for (size_t queue = 0; queue < asks.size(); ++queue) asks[queue].resize(plan.queues[queue].loads.size(), 0);
  const std::vector<Asked> all = asked_of(plan);
  const std::vector<Page> pages = pages_of(all);
  // Deals pages in order, so that one task's requests are adjacent.
  for (size_t first = 0, last = 0; first < pages.size(); first = last) {
    while (last < pages.size() && pages[last].beside(pages[first])) ++last;
    for (size_t page = first; page < last; ++page) {
      const std::span<const Asked> by = pages[page].by;
      const Asked& one = by[(page - first) * by.size() / (last - first)];
      asks[one.queue][one.load] = 1;
    }
  }
  plan.prefetches.assign(plan.queues.size(), {});
  for (size_t queue = 0; queue < asks.size(); ++queue)
    for (size_t i = 0; i < asks[queue].size(); ++i)
      if (asks[queue][i] != 0) plan.prefetches[queue].push_back(plan.queues[queue].loads[i]);
}

}  // namespace ark::compiler
