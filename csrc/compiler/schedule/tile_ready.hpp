// When a tile's inputs are there, for each worker that might run it.
#pragma once

#include <algorithm>

namespace ark::compiler {

// When a worker may start, as far as inputs go: the latest input, and the latest that another worker made.
struct Ready {
  double latest = 0;
  int worker = -1;    // that made the latest; -1: none
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
