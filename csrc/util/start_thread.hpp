// Starts a thread. If that fails, throws an error that a person can act on.
#pragma once

#include <sys/resource.h>

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "util/error.hpp"

namespace ark {

template <class Body>
std::thread start_thread(const char* what, Body&& body) {
  try {
    return std::thread(std::forward<Body>(body));
  } catch (const std::system_error& error) {
    rlimit memory{}, processes{};
    ::getrlimit(RLIMIT_AS, &memory);
    ::getrlimit(RLIMIT_NPROC, &processes);
    auto shown = [](rlim_t value) { return value == RLIM_INFINITY ? std::string("unlimited") : std::to_string(value); };
    ErrorContext context;
    context.remedy = "Raise the limit or free memory (ulimit -v is " + shown(memory.rlim_cur) +
                     " bytes, ulimit -u is " + shown(processes.rlim_cur) + ").";
    throw Error(ErrorKind::system,
                std::string("cannot start ") + what + ", which needs 8 MB of address space: " + error.what(), context);
  }
}

}  // namespace ark
