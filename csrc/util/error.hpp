// The only error type of the C++ library.
//
// An error tells its kind, the rank that raises it, the peer to blame, the operation (name and sequence number) and the
// remedy. The process group maps kinds to the exceptions that PyTorch users expect (ValueError, TypeError,
// DistBackendError). Code below the process group does not use torch.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace ark {

enum class ErrorKind : uint8_t {
  invalid_argument,  // bad value from the caller, found before any byte moved (ValueError)
  out_of_range,      // an index outside of a tensor (IndexError)
  type_error,        // bad type, dtype or layout from the caller (TypeError)
  mismatch,          // ranks called different operations, sizes, dtypes, reduce ops or roots
  peer_lost,         // a peer's process ended
  timeout,           // a peer did not arrive in time
  aborted,           // abort() was called, here or on a peer
  closed,            // the group was shut down or belongs to another process (fork)
  compile_failed,    // no compiler, or it failed (ark_torch.errors.CompileError)
  system,            // the operating system refused something (memory, descriptors, sockets)
};

const char* name_of(ErrorKind kind);

struct ErrorContext {
  int rank = -1;          // the rank that raises
  int peer = -1;          // the rank to blame; -1: unknown or none
  std::string operation;  // "all_reduce"; empty: none
  uint64_t sequence = 0;  // sequence number of the operation in its group
  std::string remedy;     // one sentence in the imperative
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& what, ErrorContext context = {});
  ErrorKind kind() const { return kind_; }
  const ErrorContext& context() const { return context_; }
  const std::string& message() const { return message_; }  // without rank, operation and remedy
  // Returns a copy that fills in rank and operation where they are unknown.
  Error at(int rank, const std::string& operation, uint64_t sequence = 0) const;

 private:
  ErrorKind kind_;
  std::string message_;
  ErrorContext context_;
};

// A failed system call: appends strerror(errno_value).
Error system_error(const std::string& what, int errno_value, const std::string& remedy = {});

}  // namespace ark
