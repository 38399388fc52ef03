// Compares operations of two ranks and words the error if they differ.
#include "collectives/agreement.hpp"

#include <cstring>

namespace ark {

namespace {

constexpr const char* kSettings =
    "Give every rank the same Options.order (ARK_ORDER) and Options.partials (ARK_PARTIALS).";
constexpr const char* kThen = " Then destroy the process group and create it again.";

std::string describe(const Descriptor& d) {
  const bool known =
      static_cast<int>(d.kind) < kKinds && static_cast<int>(d.dtype) < kDTypes && static_cast<int>(d.op) < kReduceOps;
  if (!known) return "something unreadable";
  std::string text = std::string(name_of(d.kind)) + "(";
  if (d.kind != Kind::barrier && d.kind != Kind::all_to_all) text += std::to_string(d.count) + " x ";
  text += name_of(d.dtype);
  if (d.kind == Kind::all_reduce || d.kind == Kind::reduce || d.kind == Kind::reduce_scatter) {
    text += std::string(", ") + name_of(d.op);
    if (d.algorithm == kFlatOrder) text += ", order flat";
    if (d.algorithm == kInputPartials) text += ", partials input";
  }
  if (d.root >= 0) text += ", root " + std::to_string(d.root);
  return text + ") #" + std::to_string(d.sequence);
}

}  // namespace

std::optional<Error> disagreement(const Operation& operation, const Descriptor& theirs, int rank, int peer) {
  const Descriptor& mine = operation.descriptor;
  if (std::memcmp(&theirs, &mine, sizeof theirs) == 0) return std::nullopt;
  Descriptor reshaped = theirs;
  reshaped.shape = mine.shape;
  const bool only_shape = std::memcmp(&reshaped, &mine, sizeof mine) == 0;
  return Error(
      ErrorKind::mismatch,
      "ranks disagree: rank " + std::to_string(rank) + " called " + describe(mine) + ", rank " + std::to_string(peer) +
          " called " + describe(theirs) + (only_shape ? " with a tensor of another shape" : ""),
      ErrorContext{rank, peer, operation.context.name, operation.context.sequence,
                   (theirs.kind == mine.kind && theirs.algorithm != mine.algorithm
                        ? std::string(kSettings)
                        : std::string("Call the same collective with the same size, dtype, reduce op and root on every "
                                      "rank, in the same order.")) +
                       kThen});
}

std::optional<Error> broken_promise(const Operation& operation, int rank, int from, int to, uint64_t sent,
                                    uint64_t expected) {
  if (sent == expected) return std::nullopt;
  return Error(ErrorKind::mismatch,
               "rank " + std::to_string(from) + " sends " + std::to_string(sent) + " bytes to rank " +
                   std::to_string(to) + ", whose output split for it holds " + std::to_string(expected),
               ErrorContext{rank, from == rank ? to : from, operation.context.name, operation.context.sequence,
                            std::string("Make output split sizes equal the peers' input split sizes, and the dtypes "
                                        "equal.") +
                                kThen});
}

}  // namespace ark
