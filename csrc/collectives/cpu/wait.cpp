// The slow path of waiting. The fast path is one acquire load in the header.
#include "collectives/cpu/wait.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace ark {

namespace {

constexpr auto kSleepSlice = std::chrono::milliseconds(20);  // the longest sleep without checking GroupHealth
constexpr int kSpinsPerClockRead = 32;

// The futex word is the counter's low half, which changes with every step.
uint32_t* futex_word(protocol::Counter& counter) {
  return reinterpret_cast<uint32_t*>(&counter.value);
}
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the futex word is the counter's low half");

void wake_all(protocol::Counter& counter) {
  syscall(SYS_futex, futex_word(counter), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  asm volatile("yield");
#endif
}

}  // namespace

SpinPolicy SpinPolicy::choose(int ranks, int cores, std::chrono::nanoseconds asked) {
  if (asked.count() >= 0) return {asked, 0};
  if (ranks <= cores) return {std::chrono::microseconds(50), 0};
  return {std::chrono::nanoseconds(0), 8};
}

void advance_and_wake(protocol::Counter& counter, uint64_t value) {
  if (protocol::advance(counter, value)) wake_all(counter);
}

void ring_and_wake(protocol::Counter& counter) {
  if (protocol::ring(counter)) wake_all(counter);
}

void sleep_on(protocol::Counter& counter, uint64_t seen, std::chrono::nanoseconds limit) {
  protocol::add_ordered(counter.sleepers, uint32_t{1});
  if (protocol::load_ordered(counter.value) == seen) {
    const timespec time{static_cast<time_t>(limit.count() / 1'000'000'000),
                        static_cast<long>(limit.count() % 1'000'000'000)};
    // Returns at once if the word no longer holds `seen`; signals and spurious wake-ups also return.
    syscall(SYS_futex, futex_word(counter), FUTEX_WAIT, static_cast<uint32_t>(seen), &time, nullptr, 0);
  }
  protocol::add_ordered(counter.sleepers, ~uint32_t{0});
}

void Waiter::wait_slowly(protocol::Counter& counter, uint64_t target, int peer) {
  if (policy_.spin.count() > 0) {
    const auto end = Clock::now() + policy_.spin;
    do {
      for (int i = 0; i < kSpinsPerClockRead; ++i) {
        if (protocol::reached(counter, target)) return;
        pause_cpu();
      }
    } while (Clock::now() < end);
  }
  for (int i = 0; i < policy_.yields; ++i) {
    if (protocol::reached(counter, target)) return;
    sched_yield();
  }
  int64_t& waiting_on = health_.own().waiting_on;
  protocol::store_relaxed(waiting_on, int64_t{peer} + 1);
  struct Clear {
    int64_t& word;
    ~Clear() { protocol::store_relaxed(word, int64_t{0}); }
  } clear{waiting_on};
  for (;;) {
    const uint64_t seen = protocol::current(counter);
    if (seen >= target) return;
    if (const auto alarm = health_.alarm(operation_, peer)) {
      if (protocol::reached(counter, target)) return;
      health_.raise(*alarm, operation_, peer);
    }
    sleep_on(counter, seen, kSleepSlice);
    protocol::store_relaxed(health_.own().beat, protocol::load_relaxed(health_.own().beat) + 1);
  }
}

}  // namespace ark
