// The one error type of the C++ library.
//
// Every failure says what kind it is, which rank saw it, which peer is to blame, in which operation
// (name and sequence number), and what the reader can do about it. The process group maps kinds to the
// exceptions PyTorch users expect (ValueError, TypeError, DistBackendError); nothing below it knows torch.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace ark {

enum class ErrorKind : uint8_t {
  invalid_argument,  // bad value from the caller; found before any byte moved (ValueError)
  out_of_range,      // an index that a tensor does not have (IndexError)
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
  const std::string& message() const { return message_; }  // what happened, without rank, operation and remedy
  // The same error told by this rank, in this operation, where it did not know them yet.
  Error at(int rank, const std::string& operation, uint64_t sequence = 0) const;

 private:
  ErrorKind kind_;
  std::string message_;
  ErrorContext context_;
};

// A system call failed: appends strerror(errno_value).
Error system_error(const std::string& what, int errno_value, const std::string& remedy = {});

}  // namespace ark
