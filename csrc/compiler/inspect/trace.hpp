// Timelines of steps: every task and every wait of every worker is a slice of a Chrome trace (JSON, readable by
// Perfetto), in one file per process. Steps are written in batches between steps, so most steps are not disturbed;
// after each batch the file is valid. Every worker is a thread of the timeline. Concurrent callers have workers of
// their own, so each has a lane of threads. Times are CLOCK_MONOTONIC, which a machine's processes share; `otherData`
// holds what aligns files of several machines. After the file is open nothing here throws: a trace that cannot be
// written ends, and the log says why.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "compiler/runtime/cpu_loop.hpp"
#include "compiler/schedule/plan.hpp"
#include "util/unique_fd.hpp"

namespace ark::compiler {

// The strings that a file holds for a plan, built once per plan.
struct TracedPlan {
  TracedPlan(const Plan& plan, std::string name);

  struct Task {
    int stage = -1, worker = 0;
    std::string tail;  // end of its slice: tile, estimate
    std::vector<int> waits, carried;
  };
  std::string name;                          // of the region
  std::vector<std::string> heads, labels;    // by stage: start of its slices; label in slices of waits for it
  std::vector<Task> tasks;                   // in the plan's order
  std::vector<std::vector<int>> signalling;  // by event: tasks
};

class Trace {
 public:
  struct Settings {
    std::string path;                   // empty: no trace
    int64_t limit = int64_t{64} << 20;  // bytes in the file, after which no step is added
    int rank = 0, ranks = 1;
    std::function<void(const std::string&)> log;
  };

  // Sets the process's trace: opens the file, replacing its contents, or ends the trace if `path` is empty. If another
  // process writes that file, the process id is appended to the name, as it is in a forked child. Throws Error(system).
  static void configure(const Settings& settings);
  // nullptr: no trace. Never destroyed.
  static Trace* current();
  static void flush_current();

  // enter() starts a step of a plan and returns its lane; leave() ends it and takes its stamps.
  int enter();
  void leave(int lane, std::shared_ptr<const TracedPlan> plan, StepStamps stamps, uint64_t begin_ns, uint64_t end_ns);
  void flush();
  const std::string& path() const { return path_; }

 private:
  struct Step {
    int lane;
    std::shared_ptr<const TracedPlan> plan;
    StepStamps stamps;
    uint64_t begin_ns, end_ns, number;
  };
  explicit Trace(Settings settings, const std::string& mark);
  std::string header() const;
  void write_step(const Step& step, std::string& out);
  std::string slice(const Step& step, int worker, uint64_t begin, uint64_t end) const;
  void write_tasks(const Step& step, size_t turn, std::string& out);
  void thread_names(const Step& step, std::string& out);
  void flush_locked();
  bool put(const std::string& text);
  void end(const std::string& why);

  const Settings settings_;
  const pid_t process_;
  std::string path_;
  UniqueFd fd_;
  std::mutex mutex_;  // guards the members below
  std::vector<Step> pending_;
  size_t pending_tasks_ = 0;
  uint64_t flushed_ns_ = 0, steps_ = 0;
  int64_t bytes_ = 0;  // of the file, without its end
  std::vector<bool> lanes_;
  std::vector<int> named_;  // by lane: workers named in the file so far
};

}  // namespace ark::compiler
