// Formats an Error: "[rank 1] all_reduce #17: what happened (peer rank 2). Remedy."
#include "util/error.hpp"

#include <cstring>
#include <sstream>

namespace ark {

namespace {

std::string render(const std::string& what, const ErrorContext& context) {
  std::ostringstream text;
  text << "ark: ";
  if (context.rank >= 0) text << "[rank " << context.rank << "] ";
  if (!context.operation.empty()) {
    text << context.operation;
    if (context.sequence > 0) text << " #" << context.sequence;
    text << ": ";
  }
  text << what;
  if (!what.empty() && what.back() != '.') text << '.';
  if (!context.remedy.empty()) text << ' ' << context.remedy;
  return text.str();
}

}  // namespace

const char* name_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::invalid_argument: return "invalid_argument";
    case ErrorKind::out_of_range: return "out_of_range";
    case ErrorKind::type_error: return "type_error";
    case ErrorKind::mismatch: return "mismatch";
    case ErrorKind::peer_lost: return "peer_lost";
    case ErrorKind::timeout: return "timeout";
    case ErrorKind::aborted: return "aborted";
    case ErrorKind::closed: return "closed";
    case ErrorKind::compile_failed: return "compile_failed";
    case ErrorKind::system: return "system";
  }
  return "unknown";
}

Error::Error(ErrorKind kind, const std::string& what, ErrorContext context)
    : std::runtime_error(render(what, context)), kind_(kind), message_(what), context_(std::move(context)) {}

Error Error::at(int rank, const std::string& operation, uint64_t sequence) const {
  ErrorContext context = context_;
  if (context.rank < 0) context.rank = rank;
  if (context.operation.empty()) {
    context.operation = operation;
    context.sequence = sequence;
  }
  return Error(kind_, message_, context);
}

Error system_error(const std::string& what, int errno_value, const std::string& remedy) {
  ErrorContext context;
  context.remedy = remedy;
  return Error(ErrorKind::system, what + ": " + std::strerror(errno_value), context);
}

}  // namespace ark
