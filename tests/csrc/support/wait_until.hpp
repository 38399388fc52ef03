// Bounded waits of tests between threads: a broken protocol ends the program with a message instead of a hang.
#pragma once

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <thread>

namespace ark::test {

inline std::chrono::seconds g_patience{60};

template <class Done>
void wait_until(const char* what, const Done& done) {
  const auto until = std::chrono::steady_clock::now() + g_patience;
  while (!done()) {
    if (std::chrono::steady_clock::now() > until) {
      std::cerr << "waits for ever: " << what << std::endl;
      std::abort();
    }
    std::this_thread::yield();
  }
}

}  // namespace ark::test
