// Explains failed work completions to people: a text and a remedy for every status.
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

// The time that packets are resent before a connection fails, such as "4.3 s". The standard allows up to four times as
// much.
std::string retry_budget(int timeout, int retry_count);

}  // namespace ark::rdma
