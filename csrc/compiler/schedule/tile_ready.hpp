// When a tile's inputs are ready, for each worker that might run it. Inputs from the same worker need no wait, all
// others cost one.
#pragma once

#include <algorithm>

namespace ark::compiler {

// The latest input, and the latest one made by another worker than that.
struct Ready {
  double latest = 0;
  int worker = -1;    // the worker that made the latest; -1: none
  double second = 0;  // the latest made by a different worker
  bool second_set = false;

  void add(double finish, int by) {
    if (worker < 0 || by == worker) {
      latest = worker < 0 ? finish : std::max(latest, finish);
      worker = by;
    } else if (finish > latest) {
      second = latest;
      second_set = true;
      latest = finish;
      worker = by;
    } else {
      second = second_set ? std::max(second, finish) : finish;
      second_set = true;
    }
  }
  double at(int asking, double wait_us) const {
    if (worker < 0) return 0;
    if (asking != worker) return latest + wait_us;
    return second_set ? std::max(latest, second + wait_us) : latest;
  }
};

}  // namespace ark::compiler
