// What a completion with an error means, for people: every status of a work completion, with its remedy.
#pragma once

#include <string>

#include "dma/rdma/verbs_types.hpp"
#include "util/error.hpp"

namespace ark::rdma {

struct StatusText {
  ErrorKind kind;
  const char* what;
  const char* remedy;
};
StatusText text_of(ibv_wc_status status);

// operation: "write", "signal" or "receive".
Error error_of(const ibv_wc& completion, int rank, int peer, const char* operation, const std::string& device);

// "4.3 s" that packets are sent again before a connection fails (by the standard up to four times as long).
std::string retry_budget(int timeout, int retry_count);

}  // namespace ark::rdma
