// What tasks do beside their stage's own work (Stage::tail): nobody but the stage's accesses orders it. See
// validator.hpp.
#include <algorithm>
#include <string>
#include <vector>

#include "compiler/graph/box.hpp"
#include "compiler/verify/validator.hpp"
#include "util/error.hpp"

namespace ark::compiler {

namespace {

using std::to_string;

class TailChecker {
 public:
  TailChecker(const Plan& plan, const Stage& stage) : plan_(plan), stage_(stage) {
    for (const Stage& next : stage.tail)
      for (const Access& access : next.accesses)
        if (access.write) later_.push_back(access);
  }

  // Tiles in which the task at `index` is one.
  void check(int index) const {
    const Task& task = plan_.tasks[index];
    const auto name = [&] { return describe(plan_, index); };
    std::vector<Access> made;  // so far, by the task itself
    for (const Access& access : stage_.accesses)
      if (access.write && !is_one_of(later_, access)) made.push_back(access);
    for (const Stage& next : stage_.tail) {
      if (next.extent != stage_.extent || !next.tail.empty())
        fail(name() + " goes on with " + next.name + ", whose tiles are not its own");
      for (const Access& access : next.accesses) {
        const auto place = [&] { return "value " + to_string(access.value) + " in " + next.name; };
        if (access.write) {
          if (!is_one_of(stage_.accesses, access))
            fail(name() + " writes " + place() + ", which its stage does not declare");
          continue;
        }
        const Box box = box_of(plan_.graph, stage_, access, task.begin, task.end);
        bool own = false;
        for (const Access& one : stage_.accesses) {
          if (!one.write || buffer_of(one) != buffer_of(access) || !overlap(whole(one), whole(access))) continue;
          own = true;
          const bool changed = is_one_of(next.accesses, one);  // by the same stage, where it lies
          if ((!changed && !is_one_of(made, one)) ||
              !covers(box_of(plan_.graph, stage_, one, task.begin, task.end), box))
            fail(name() + " reads " + place() + ", of which another tile of its stage writes a part");
        }
        if (!own && !is_one_of(stage_.accesses, access))
          fail(name() + " reads " + place() + ", which its stage does not declare");
      }
      for (const Access& access : next.accesses)
        if (access.write) made.push_back(access);
    }
  }

 private:
  [[noreturn]] static void fail(const std::string& what) { throw Error(ErrorKind::invalid_argument, what); }
  static bool is_one_of(const std::vector<Access>& list, const Access& access) {
    return std::any_of(list.begin(), list.end(), [&](const Access& one) {
      return one.value == access.value && one.axis == access.axis && one.write == access.write;
    });
  }
  int buffer_of(const Access& access) const { return plan_.graph.values()[access.value].buffer; }
  Box whole(const Access& access) const { return box_of(plan_.graph.values()[access.value]); }

  const Plan& plan_;
  const Stage& stage_;
  std::vector<Access> later_;  // what stages of the tail write
};

}  // namespace

void check_tails(const Plan& plan) {
  for (size_t index = 0; index < plan.tasks.size(); ++index) {
    const Stage& stage = plan.stages[plan.tasks[index].stage];
    if (!stage.tail.empty()) TailChecker(plan, stage).check(static_cast<int>(index));
  }
}

}  // namespace ark::compiler
