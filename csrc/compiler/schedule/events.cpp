// Derives events from the history of accesses, with vector clocks to drop waits that are already covered. The clocks
// are those of events_order.hpp, computed on the way. See events.hpp.
#include "compiler/schedule/events.hpp"

#include <algorithm>
#include <cstdint>
#include <map>
#include <unordered_map>
#include <utility>

#include "compiler/graph/box.hpp"
#include "compiler/schedule/box_history.hpp"

namespace ark::compiler {

namespace {

using Tasks = std::vector<int>;

struct HashOfTasks {
  size_t operator()(const Tasks& tasks) const {
    uint64_t hash = 0x9E3779B97F4A7C15u;
    for (const int task : tasks) hash = (hash ^ static_cast<uint64_t>(task)) * 0x100000001B3u;
    return hash;
  }
};

class EventMaker {
 public:
  EventMaker(Plan& plan, const std::vector<bool>& own, const std::vector<bool>& packets)
      : plan_(plan),
        own_(own),
        packets_(packets),
        history_(plan.graph, plan.stages),
        workers_(plan.queues.size()),
        clocks_(plan.tasks.size() * workers_, 0),
        now_(workers_, std::vector<int32_t>(workers_, 0)),
        place_(plan.tasks.size(), 0) {
    for (const Queue& queue : plan_.queues) {
      for (size_t place = 0; place < queue.tasks.size(); ++place) place_[queue.tasks[place]] = static_cast<int>(place);
    }
    for (size_t buffer = 0; buffer < own_.size(); ++buffer) {
      if (own_[buffer]) history_.set_own(static_cast<int>(buffer));
    }
  }

  void run() {
    const int tasks = static_cast<int>(plan_.tasks.size());
    for (int first = 0; first < tasks;) {
      int last = first;
      while (last < tasks && plan_.tasks[last].stage == plan_.tasks[first].stage) ++last;
      Tasks indices;
      for (int index = first; index < last; ++index) indices.push_back(index);
      order_stage(plan_.tasks[first].stage, indices);
      history_.add(plan_.tasks[first].stage, indices, plan_.tasks);
      first = last;
    }
    finish();
  }

 private:
  struct Candidate {  // an event before its waiters are known
    bool packets;
    Tasks producers;
    Tasks consumers;
    std::vector<int32_t> known;
  };
  using Groups = std::map<int, Tasks, std::greater<>>;  // producers by stage, newest first

  // The tasks that a tile depends on: through counters, and through packets that it polls.
  struct Predecessors {
    Groups counted, polled;
  };

  void gather(const Stage& stage, const Access& access, int64_t begin, int64_t end, Predecessors& found) const {
    const int buffer = plan_.graph.values()[access.value].buffer;
    if (!history_.may_conflict(buffer)) return;
    Groups& groups = packets_[buffer] ? found.polled : found.counted;
    history_.conflicts(buffer, box_of(plan_.graph, stage, access, begin, end), access.write,
                       [&](const BoxHistory::Record& record, int task) { groups[record.stage].push_back(task); });
  }
  // Keeps the last task of each worker, in order of index.
  void reduce(Tasks& tasks) const {
    std::sort(tasks.begin(), tasks.end(), std::greater<>());
    std::vector<char> seen(workers_, 0);
    std::erase_if(tasks, [&](int task) { return std::exchange(seen[plan_.tasks[task].worker], 1) != 0; });
    std::reverse(tasks.begin(), tasks.end());
  }
  void order_stage(int stage, const Tasks& indices);
  void order_task(int index, const std::map<int, int, std::greater<>>& events);
  void poll(int index, Groups& groups);
  int intern(const Tasks& producers, bool packets = false);
  const std::vector<int32_t>& known(int candidate);
  void finish();

  Plan& plan_;
  const std::vector<bool>& own_;
  const std::vector<bool>& packets_;
  BoxHistory history_;
  size_t workers_;
  std::vector<int32_t> clocks_;            // by task: what had ended when it started
  std::vector<std::vector<int32_t>> now_;  // by worker
  std::vector<int> place_;                 // by task, in its queue
  std::vector<Candidate> candidates_;
  std::unordered_map<Tasks, int, HashOfTasks> index_of_;
};

int EventMaker::intern(const Tasks& producers, bool packets) {
  Tasks key = producers;
  if (packets) key.push_back(-1);
  const auto [found, fresh] = index_of_.try_emplace(std::move(key), static_cast<int>(candidates_.size()));
  if (fresh) candidates_.push_back({packets, producers, {}, {}});
  return found->second;
}

const std::vector<int32_t>& EventMaker::known(int index) {
  Candidate& candidate = candidates_[index];
  if (candidate.known.empty()) {
    candidate.known.resize(workers_, 0);
    for (const int producer : candidate.producers) {
      const int32_t* clock = clocks_.data() + producer * workers_;
      for (size_t worker = 0; worker < workers_; ++worker) {
        candidate.known[worker] = std::max(candidate.known[worker], clock[worker]);
      }
      int32_t& own = candidate.known[plan_.tasks[producer].worker];
      own = std::max(own, static_cast<int32_t>(place_[producer] + 1));
    }
  }
  return candidate.known;
}

void EventMaker::order_stage(int index, const Tasks& indices) {
  const Stage& stage = plan_.stages[index];
  const auto whole = [&](const Access& access) { return access.axis < 0 || plan_.tasks[indices[0]].replica; };
  Predecessors all;  // dependencies of every task of the stage
  for (const Access& access : stage.accesses) {
    if (whole(access)) gather(stage, access, 0, stage.extent, all);
  }
  Groups& common = all.counted;
  std::map<int, int, std::greater<>> shared;
  for (auto& [by, producers] : common) {
    reduce(producers);
    shared[by] = intern(producers);
  }
  for (const int task : indices) {
    Predecessors some;
    some.polled = all.polled;
    for (const Access& access : stage.accesses) {
      if (!whole(access)) gather(stage, access, plan_.tasks[task].begin, plan_.tasks[task].end, some);
    }
    std::map<int, int, std::greater<>> events = shared;
    for (auto& [by, producers] : some.counted) {
      const auto more = common.find(by);
      if (more != common.end()) producers.insert(producers.end(), more->second.begin(), more->second.end());
      reduce(producers);
      events[by] = intern(producers);
    }
    order_task(task, events);
    poll(task, some.polled);
  }
}

void EventMaker::order_task(int index, const std::map<int, int, std::greater<>>& events) {
  Task& task = plan_.tasks[index];
  std::vector<int32_t>& now = now_[task.worker];
  for (const auto& [stage, event] : events) {
    const Tasks& producers = candidates_[event].producers;
    if (std::all_of(producers.begin(), producers.end(),
                    [&](int producer) { return now[plan_.tasks[producer].worker] > place_[producer]; })) {
      continue;
    }
    task.waits.push_back(event);
    candidates_[event].consumers.push_back(index);
    const std::vector<int32_t>& from = known(event);
    for (size_t worker = 0; worker < workers_; ++worker) now[worker] = std::max(now[worker], from[worker]);
  }
  std::copy(now.begin(), now.end(), clocks_.begin() + index * workers_);
  now[task.worker] = place_[index] + 1;
}

// Every reader polls packets itself, except those that its own worker wrote.
void EventMaker::poll(int index, Groups& groups) {
  for (auto& [stage, producers] : groups) {
    std::sort(producers.begin(), producers.end());
    producers.erase(std::unique(producers.begin(), producers.end()), producers.end());
    const int worker = plan_.tasks[index].worker;
    if (std::all_of(producers.begin(), producers.end(),
                    [&](int producer) { return plan_.tasks[producer].worker == worker; })) {
      continue;
    }
    const int event = intern(producers, true);
    plan_.tasks[index].waits.push_back(event);
    candidates_[event].consumers.push_back(index);
  }
}

// Numbers the events that are waited for, in order of their first waiter.
void EventMaker::finish() {
  std::vector<int> number(candidates_.size(), -1);
  for (Task& task : plan_.tasks) {
    for (int& event : task.waits) {
      Candidate& candidate = candidates_[event];
      if (number[event] < 0) {
        number[event] = static_cast<int>(plan_.events.size());
        // If all waiters are on one worker, that worker's own producers need no signal.
        const int worker = plan_.tasks[candidate.consumers[0]].worker;
        if (std::all_of(candidate.consumers.begin(), candidate.consumers.end(),
                        [&](int consumer) { return plan_.tasks[consumer].worker == worker; })) {
          std::erase_if(candidate.producers, [&](int producer) { return plan_.tasks[producer].worker == worker; });
        }
        for (const int producer : candidate.producers) plan_.tasks[producer].signals.push_back(number[event]);
        plan_.events.push_back({static_cast<int>(candidate.producers.size()), candidate.packets});
      }
      event = number[event];
    }
  }
}

}  // namespace

void add_events(Plan& plan, const std::vector<bool>& own, const std::vector<bool>& packets) {
  EventMaker(plan, own, packets).run();
}

}  // namespace ark::compiler
