// Formats the slices of traced steps and writes them to the process's file. See trace.hpp for the file's structure.
#include "compiler/inspect/trace.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <utility>

#include "compiler/passes/prologue_fusion.hpp"
#include "util/error.hpp"
#include "util/format.hpp"
#include "util/json_writer.hpp"

namespace ark::compiler {

namespace {

constexpr char kEnd[] = "\n]}\n";
constexpr uint64_t kShortWait = 200;  // ns; shorter waits are left out
constexpr uint64_t kBatch = 1'000'000'000;
constexpr size_t kBatchTasks = 200'000;
constexpr int kLane = 1000;  // thread numbers per lane

std::atomic<Trace*> the_trace{nullptr};

uint64_t realtime_ns() {
  timespec time;
  ::clock_gettime(CLOCK_REALTIME, &time);
  return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(time.tv_nsec);
}

std::string microseconds(uint64_t ns) {
  char text[40];
  std::snprintf(text, sizeof(text), "%llu.%03u", static_cast<unsigned long long>(ns / 1000),
                static_cast<unsigned>(ns % 1000));
  return text;
}

// An object's members without the opening brace.
std::string inside(JsonWriter& json) {
  const std::string whole = json.take();
  return whole.substr(1);
}

std::string quoted(const std::string& text) {
  JsonWriter json;
  json.text(text);
  return json.take();
}

// Returns "layers.0.attn.wq" for "layers.0.attn.wq (model.py:31)".
std::string module_of(const std::string& origin) {
  return origin.substr(0, origin.find(" ("));
}

std::string line_of(const char* file) {
  std::ifstream in(file);
  std::string line;
  std::getline(in, line);
  return line;
}

}  // namespace

TracedPlan::TracedPlan(const Plan& plan, std::string called) : name(std::move(called)), signalling(plan.events.size()) {
  for (int index = 0; index < static_cast<int>(plan.stages.size()); ++index) {
    const Stage& stage = plan.stages[static_cast<size_t>(index)];
    const int head = head_stage(plan, index);
    const std::string before = head < 0 ? "" : plan.stages[static_cast<size_t>(head)].name + ", ";
    const std::string label = before + stage.name + " " + module_of(stage.origin);
    JsonWriter json;
    json.open('{').field("name", label).field("cat", stage.kind).key("args").open('{');
    json.field("kind", stage.kind).field("origin", stage.origin);
    heads.push_back(inside(json));
    labels.push_back(label);
  }
  for (size_t index = 0; index < plan.tasks.size(); ++index) {
    const compiler::Task& task = plan.tasks[index];
    char tail[160];
    std::snprintf(tail, sizeof(tail), ",\"task\":%zu,\"tile\":\"%lld to %lld of %lld\",\"estimated_us\":%.3f}}", index,
                  static_cast<long long>(task.begin), static_cast<long long>(task.end),
                  static_cast<long long>(plan.stages[static_cast<size_t>(task.stage)].extent), task.cost_us);
    tasks.push_back({task.stage, task.worker, tail, waits_of(plan, static_cast<int>(index)), task.carried});
    for (const int event : task.signals) signalling[static_cast<size_t>(event)].push_back(static_cast<int>(index));
  }
}

void Trace::configure(const Settings& settings) {
  Trace* old = the_trace.load(std::memory_order_acquire);
  if (old != nullptr) old->flush();
  // The old trace is leaked on purpose: a step may still use it.
  the_trace.store(settings.path.empty() ? nullptr : new Trace(settings, ""), std::memory_order_release);
}

Trace* Trace::current() {
  Trace* mine = the_trace.load(std::memory_order_acquire);
  if (mine == nullptr || mine->process_ == ::getpid()) return mine;
  // In a forked child, the parent's lock may be held forever, so the child opens its own trace. If that fails, it
  // has none.
  Trace* made = nullptr;
  try {
    made = new Trace(mine->settings_, "." + std::to_string(::getpid()));
  } catch (const Error&) {
  }
  if (the_trace.compare_exchange_strong(mine, made, std::memory_order_acq_rel)) return made;
  delete made;
  return mine;
}

void Trace::flush_current() {
  if (Trace* mine = the_trace.load(std::memory_order_acquire); mine != nullptr && mine->process_ == ::getpid())
    mine->flush();
}

Trace::Trace(Settings settings, const std::string& mark)
    : settings_(std::move(settings)), process_(::getpid()), path_(settings_.path + mark), flushed_ns_(cpu::now_ns()) {
  const auto open_it = [this] {
    fd_.reset(::open(path_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644));
    if (!fd_) throw system_error("cannot write the trace " + path_, errno, "Name another file in ARK_TRACE.");
  };
  open_it();
  if (::flock(fd_.get(), LOCK_EX | LOCK_NB) != 0) {
    path_ = settings_.path + "." + std::to_string(process_);
    open_it();
  }
  const std::string head = header();
  if (::ftruncate(fd_.get(), 0) != 0 || !put(head + kEnd))
    throw system_error("cannot write the trace " + path_, errno, "Name another file in ARK_TRACE.");
  bytes_ = static_cast<int64_t>(head.size());
}

std::string Trace::header() const {
  char host[256] = "";
  ::gethostname(host, sizeof(host) - 1);
  JsonWriter json;
  json.open('{').field("displayTimeUnit", "ns").key("otherData").open('{');
  json.field("made_by", "ark_torch").field("rank", int64_t{settings_.rank}).field("ranks", int64_t{settings_.ranks});
  json.field("pid", static_cast<int64_t>(process_)).field("host", host);
  json.field("boot", line_of("/proc/sys/kernel/random/boot_id"));
  json.field("monotonic_ns", static_cast<int64_t>(cpu::now_ns()));
  json.field("realtime_ns", static_cast<int64_t>(realtime_ns())).close('}').key("traceEvents").open('[');
  json.open('{').field("ph", "M").field("pid", static_cast<int64_t>(process_)).field("name", "process_name");
  const std::string process =
      settings_.ranks > 1 ? "rank " + std::to_string(settings_.rank) + ", process " : std::string("process ");
  json.key("args").open('{').field("name", process + std::to_string(process_)).close('}').close('}');
  return json.take();
}

int Trace::enter() {
  const std::lock_guard lock(mutex_);
  const size_t lane = static_cast<size_t>(std::find(lanes_.begin(), lanes_.end(), false) - lanes_.begin());
  if (lane == lanes_.size()) lanes_.push_back(false);
  lanes_[lane] = true;
  return static_cast<int>(lane);
}

void Trace::leave(int lane, std::shared_ptr<const TracedPlan> plan, StepStamps stamps, uint64_t begin_ns,
                  uint64_t end_ns) {
  const std::lock_guard lock(mutex_);
  lanes_[static_cast<size_t>(lane)] = false;
  if (!fd_) return;
  pending_tasks_ += stamps.tasks.size();
  pending_.push_back({lane, std::move(plan), std::move(stamps), begin_ns, end_ns, steps_++});
  if (pending_tasks_ > kBatchTasks || end_ns - flushed_ns_ > kBatch) flush_locked();
}

void Trace::flush() {
  const std::lock_guard lock(mutex_);
  flush_locked();
}

void Trace::flush_locked() {
  for (const Step& step : pending_) {
    if (!fd_) break;
    std::string text;
    thread_names(step, text);
    write_step(step, text);
    if (bytes_ + static_cast<int64_t>(text.size() + sizeof(kEnd)) > settings_.limit) {
      end("it has reached " + std::to_string(settings_.limit >> 20) + " MiB (ARK_TRACE_MB); later steps are not in it");
      break;
    }
    if (!put(text + kEnd)) {
      end(std::strerror(errno));
      break;
    }
    bytes_ += static_cast<int64_t>(text.size());
  }
  pending_.clear();
  pending_tasks_ = 0;
  flushed_ns_ = cpu::now_ns();
}

// Overwrites the end of the file with the text and a new end, so that the file is valid JSON again.
bool Trace::put(const std::string& text) {
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t wrote = ::pwrite(fd_.get(), text.data() + done, text.size() - done,
                                   static_cast<off_t>(bytes_) + static_cast<off_t>(done));
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) return false;
    done += static_cast<size_t>(wrote);
  }
  return true;
}

void Trace::end(const std::string& why) {
  const int error = ::ftruncate(fd_.get(), static_cast<off_t>(bytes_));
  if (error == 0) put(kEnd);
  fd_.reset();
  if (settings_.log) settings_.log("ark: the trace " + path_ + " ends: " + why + ".");
}

void Trace::thread_names(const Step& step, std::string& out) {
  const size_t lane = static_cast<size_t>(step.lane);
  if (named_.size() <= lane) named_.resize(lane + 1, 0);
  int workers = 1;
  for (const TracedPlan::Task& task : step.plan->tasks) workers = std::max(workers, task.worker + 1);
  for (int worker = named_[lane]; worker < workers; ++worker) {
    const std::string name = formatted("{}worker {}", lane == 0 ? "" : formatted("caller {}, ", lane), worker);
    const int64_t place = step.lane * kLane + worker;
    append(out,
           ",\n{{\"ph\":\"M\",\"pid\":{0},\"tid\":{1},\"name\":\"thread_name\",\"args\":{{\"name\":{2}}}}}"
           ",\n{{\"ph\":\"M\",\"pid\":{0},\"tid\":{1},\"name\":\"thread_sort_index\",\"args\":{{\"sort_index\":{3}}}}}",
           process_, place + 1, quoted(name), place);
  }
  named_[lane] = std::max(named_[lane], workers);
}

// Writes all stamped steps of a launch.
void Trace::write_step(const Step& step, std::string& out) {
  const TracedPlan& plan = *step.plan;
  append(out, "{}\"name\":{},\"cat\":\"region\",\"args\":{{\"step\":{}}}}}", slice(step, 0, step.begin_ns, step.end_ns),
         quoted(plan.name), step.number);
  const size_t turns = plan.tasks.empty() ? 0 : step.stamps.tasks.size() / plan.tasks.size();
  for (size_t turn = 0; turn < turns; ++turn) write_tasks(step, turn, out);
}

std::string Trace::slice(const Step& step, int worker, uint64_t begin, uint64_t end) const {
  return formatted(",\n{{\"ph\":\"X\",\"pid\":{},\"tid\":{},\"ts\":{},\"dur\":{},", process_,
                   step.lane * kLane + worker + 1, microseconds(begin), microseconds(end - begin));
}

void Trace::write_tasks(const Step& step, size_t turn, std::string& out) {
  const TracedPlan& plan = *step.plan;
  const cpu::Stamp* stamps = step.stamps.tasks.data() + turn * plan.tasks.size();
  const size_t turns = step.stamps.tasks.size() / plan.tasks.size();
  const uint64_t* wait_ends = step.stamps.wait_ends.data() + turn * (step.stamps.wait_ends.size() / turns);
  size_t waits = 0, carried = 0;  // indices of waits
  for (const TracedPlan::Task& task : plan.tasks) carried += task.waits.size();
  for (size_t index = 0; index < plan.tasks.size(); ++index) {
    const TracedPlan::Task& task = plan.tasks[index];
    const cpu::Stamp& stamp = stamps[index];
    uint64_t from = stamp.came_ns;
    const auto wait = [&](int event, uint64_t until, const cpu::Stamp* signallers) {
      if (until <= from) return;  // the step failed
      if (until - from >= kShortWait) {
        int last = -1;  // the last signaller: the task that was waited for
        for (const int other : plan.signalling[static_cast<size_t>(event)])
          if (last < 0 || signallers[other].end_ns > signallers[last].end_ns) last = other;
        out += slice(step, task.worker, from, until);
        JsonWriter json;
        json.open('{');
        json.field("name", "wait for " + (last < 0 ? "event " + std::to_string(event)
                                                   : plan.labels[static_cast<size_t>(plan.tasks[last].stage)]));
        json.field("cat", "wait").key("args").open('{').field("event", int64_t{event});
        if (last >= 0) json.field("of_task", int64_t{last}).field("of_worker", int64_t{plan.tasks[last].worker});
        json.field("before_task", static_cast<int64_t>(index)).close('}').close('}');
        out += inside(json);
      }
      from = until;
    };
    for (const int event : task.carried) {
      const uint64_t until = wait_ends[carried++];
      if (turn > 0) wait(event, until, stamps - plan.tasks.size());
    }
    for (const int event : task.waits) wait(event, wait_ends[waits++], stamps);
    if (stamp.end_ns == 0) continue;
    out += slice(step, task.worker, stamp.begin_ns, stamp.end_ns) + plan.heads[static_cast<size_t>(task.stage)] +
           task.tail;
  }
}

}  // namespace ark::compiler
