// Proposes cuts of a stage's axis: even ones, one tile, and those of the stages that made its inputs. See
// tile_cuts.hpp.
#include "compiler/schedule/tile_cuts.hpp"
#include "compiler/graph/stage_queries.hpp"

#include <algorithm>

#include "compiler/graph/box.hpp"
#include "compiler/schedule/tile.hpp"

namespace ark::compiler {

namespace {

// For a spread collective, in units that one thread moves: the least per tile if nothing else bounds it, and the most
// that a block of threads moves in one pass.
constexpr int64_t kSpreadStep = 64, kSpreadBlock = 512;

}  // namespace

std::vector<Bounds> candidate_cuts(const Graph& graph, const Stage& what, const Target& target, BoxHistory& history,
                                   const std::vector<Bounds>& cuts) {
  const int64_t grain = std::max<int64_t>(1, what.grain);
  const bool spread = is_spread(what);
  const bool over_nodes = spread && std::get<CollectiveStage>(what.body).nodes > 1;  // a grain is a message
  const int64_t step = spread && !over_nodes ? kSpreadStep * grain : grain;
  const int64_t units = (what.extent + step - 1) / step;
  const auto even = [&](int64_t tiles) {
    // Use the fewest tiles that have the same longest tile.
    const int64_t longest = (units + tiles - 1) / tiles;
    tiles = (units + longest - 1) / longest;
    Bounds bounds;
    for (int64_t tile = 0; tile <= tiles; ++tile) bounds.push_back(std::min(what.extent, units * tile / tiles * step));
    return bounds;
  };
  std::vector<Bounds> found;
  if (std::holds_alternative<CollectiveStage>(what.body) && !spread) return {{0, what.extent}};
  const double whole = tile_cost_us(graph, what, target, 0, what.extent);
  const auto worth = static_cast<int64_t>(whole / std::max(target.wait_us, 1e-3));
  const int64_t most = std::min<int64_t>(target.workers, units);
  found.push_back(even(spread ? most : std::clamp<int64_t>(worth, 1, most)));
  // On a GPU a tile's time is mostly latency, which more tiles overlap.
  if (target.name != "cpu" && most > worth && !spread) found.push_back(even(most));
  if (most > 1 || spread) {
    int copied = -1;
    int copies = 0;
    for (const Access& access : what.accesses) {
      const Value& value = graph.values()[access.value];
      if (access.write || access.axis < 0 || !history.may_conflict(value.buffer)) continue;
      history.conflicts(value.buffer, box_of(graph, what, access, 0, what.extent), false,
                        [&](const BoxHistory::Record& record, int) {
                          if (record.stage == copied || copies == 3) return;
                          copied = record.stage;
                          ++copies;
                          const Bounds& made = cuts[copied];
                          if (made.size() < 3 || (spread && made.size() > static_cast<size_t>(target.workers) + 1))
                            return;
                          Bounds bounds;
                          for (const int64_t bound : made) {
                            const int64_t scaled = bound * what.extent;
                            if (scaled % made.back() != 0) return;
                            bounds.push_back(scaled / made.back());
                            if (bounds.back() % grain != 0 && bounds.back() != what.extent) return;
                          }
                          found.push_back(bounds);
                        });
    }
    if (found.front().size() > 2 && (!spread || what.extent <= kSpreadBlock * grain)) found.push_back({0, what.extent});
  }
  return found;
}

bool tiles_conflict(const Graph& graph, const Stage& what, const Bounds& bounds) {
  for (const Access& write : what.accesses) {
    if (!write.write) continue;
    const int buffer = graph.values()[write.value].buffer;
    if (write.axis < 0) return true;
    for (const Access& other : what.accesses) {
      if (graph.values()[other.value].buffer != buffer) continue;
      const bool same = graph.values()[other.value].offset == graph.values()[write.value].offset &&
                        graph.values()[other.value].strides == graph.values()[write.value].strides &&
                        graph.values()[other.value].shape == graph.values()[write.value].shape &&
                        other.axis == write.axis;
      for (size_t tile = 0; tile + 1 < bounds.size(); ++tile) {
        const Box box = box_of(graph, what, write, bounds[tile], bounds[tile + 1]);
        // Comparing neighbors suffices if both accesses are the same view.
        for (size_t beside = same ? tile + 1 : 0; beside + 1 < bounds.size(); ++beside) {
          if (beside == tile) continue;
          if (same && beside > tile + 1) break;
          if (overlap(box, box_of(graph, what, other, bounds[beside], bounds[beside + 1]))) return true;
        }
      }
    }
  }
  return false;
}

}  // namespace ark::compiler
