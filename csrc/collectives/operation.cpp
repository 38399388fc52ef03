// The collectives' names in PyTorch's Python API.
#include "collectives/operation.hpp"

namespace ark {

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::all_reduce: return "all_reduce";
    case Kind::reduce: return "reduce";
    case Kind::reduce_scatter: return "reduce_scatter";
    case Kind::all_gather: return "all_gather";
    case Kind::broadcast: return "broadcast";
    case Kind::gather: return "gather";
    case Kind::scatter: return "scatter";
    case Kind::all_to_all: return "all_to_all";
    case Kind::barrier: return "barrier";
  }
  return "unknown";
}

}  // namespace ark
