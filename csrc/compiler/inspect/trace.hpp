// Timelines of steps: every task and every wait of every worker as a slice of a Chrome trace (JSON, which Perfetto
// opens), in one file of the process.
//
// Steps are written in batches, between steps, so that most of them are not disturbed; after a batch the file is whole.
// A worker is a thread of the timeline. Callers at the same time have workers each, so each has a lane of threads.
// Times are of CLOCK_MONOTONIC, which the processes of a machine share; the file's `otherData` holds what is needed to
// put files of several machines on one clock.
//
// Nothing here throws after the file was opened: a trace that cannot be written ends, and the log hears why.
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

// What a file says about a plan, made once for each.
struct TracedPlan {
  TracedPlan(const Plan& plan, std::string name);

  struct Task {
    int stage = -1, worker = 0;
    std::string tail;  // of its slice: tile, estimate
    std::vector<int> waits, carried;
  };
  std::string name;                          // of the region
  std::vector<std::string> heads, labels;    // of the stages' slices; for those that wait for them
  std::vector<Task> tasks;                   // in the plan's order
  std::vector<std::vector<int>> signalling;  // by event: tasks
};

class Trace {
 public:
  struct Settings {
    std::string path;                   // empty: no trace
    int64_t limit = int64_t{64} << 20;  // bytes of the file; then no step is added
    int rank = 0, ranks = 1;
    std::function<void(const std::string&)> log;
  };

  // The process's: opens the file (replacing what it held), or ends the trace where `path` is empty. Where another
  // process writes that file, the process id joins the name; so it does in a process forked off. Throws Error(system).
  static void configure(const Settings& settings);
  // nullptr: no trace. Never destroyed.
  static Trace* current();
  static void flush_current();

  // One step of a plan runs from `enter` on, until `leave` takes its stamps.
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
  std::mutex mutex_;  // guards what follows
  std::vector<Step> pending_;
  size_t pending_tasks_ = 0;
  uint64_t flushed_ns_ = 0, steps_ = 0;
  int64_t bytes_ = 0;  // of the file, without its end
  std::vector<bool> lanes_;
  std::vector<int> named_;  // by lane: workers that have a name in the file
};

}  // namespace ark::compiler
