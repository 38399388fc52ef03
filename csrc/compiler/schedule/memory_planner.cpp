// Packs temporaries into the arena: tries several orders of best-fit placement and keeps the smallest result. See
// memory_planner.hpp.
#include "compiler/schedule/memory_planner.hpp"
#include "compiler/graph/stage_queries.hpp"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>

#include "compiler/schedule/events_order.hpp"

namespace ark::compiler {

namespace {

// A temporary as the packer sees it.
struct Tenant {
  int buffer = -1;
  int64_t bytes = 0;              // rounded up to the alignment
  int first = -1, last = -1;      // task indices; only used to sort
  std::vector<int64_t> last_of;   // by worker: one past the place of the last task that touches it; 0: none
  std::vector<int64_t> ended_by;  // by worker: how many of its tasks have ended when any task that touches it starts
};

bool all_before(const Tenant& a, const Tenant& b) {
  for (size_t worker = 0; worker < a.last_of.size(); ++worker) {
    if (a.last_of[worker] > b.ended_by[worker]) return false;
  }
  return true;
}

// For own copies only the order on the same worker counts.
bool own_before(const Tenant& a, const std::vector<int64_t>& first_of_b) {
  for (size_t worker = 0; worker < a.last_of.size(); ++worker) {
    if (a.last_of[worker] > 0 && first_of_b[worker] >= 0 && a.last_of[worker] > first_of_b[worker]) return false;
  }
  return true;
}

// Places tenants in the given order, each in the smallest gap that fits. Returns the arena's size.
int64_t pack(const std::vector<Tenant>& tenants, const std::vector<std::vector<char>>& apart,
             const std::vector<int>& order, std::vector<int64_t>& offsets) {
  offsets.assign(tenants.size(), -1);
  int64_t size = 0;
  std::vector<int> placed;  // by offset
  for (const int tenant : order) {
    const int64_t bytes = tenants[tenant].bytes;
    int64_t best = -1;
    int64_t best_gap = std::numeric_limits<int64_t>::max();
    int64_t at = 0;
    for (const int other : placed) {
      if (!apart[tenant][other]) continue;
      const int64_t gap = offsets[other] - at;
      if (gap >= bytes && gap < best_gap) best = at, best_gap = gap;
      at = std::max(at, offsets[other] + tenants[other].bytes);
    }
    if (best < 0) best = at;
    offsets[tenant] = best;
    size = std::max(size, best + bytes);
    const auto where =
        std::upper_bound(placed.begin(), placed.end(), tenant, [&](int a, int b) { return offsets[a] < offsets[b]; });
    placed.insert(where, tenant);
  }
  return size;
}

int64_t pack_best(const std::vector<Tenant>& tenants, const std::vector<std::vector<char>>& apart,
                  std::vector<int64_t>& offsets) {
  std::vector<int> order(tenants.size());
  std::iota(order.begin(), order.end(), 0);
  const auto duration = [&](int index) { return tenants[index].last - tenants[index].first; };
  const std::vector<std::function<bool(int, int)>> orders = {
      [&](int a, int b) { return tenants[a].bytes > tenants[b].bytes; },
      [&](int a, int b) { return tenants[a].first < tenants[b].first; },
      [&](int a, int b) { return tenants[a].last > tenants[b].last; },
      [&](int a, int b) { return duration(a) > duration(b); },
      [&](int a, int b) {
        return static_cast<double>(tenants[a].bytes) * duration(a) >
               static_cast<double>(tenants[b].bytes) * duration(b);
      },
  };
  int64_t best = -1;
  std::vector<int64_t> tried;
  for (const auto& earlier : orders) {
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), earlier);
    const int64_t size = pack(tenants, apart, order, tried);
    if (best < 0 || size < best) best = size, offsets = tried;
  }
  return std::max<int64_t>(best, 0);
}

}  // namespace

int64_t eager_peak(const Graph& graph) {
  const std::vector<Node>& nodes = graph.nodes();
  std::vector<int> first(graph.buffers().size(), -1);
  std::vector<int> last(graph.buffers().size(), -1);
  for (int node = 0; node < static_cast<int>(nodes.size()); ++node) {
    const auto touch = [&](int value) {
      const int buffer = value < 0 ? -1 : graph.values()[value].buffer;
      if (buffer < 0) return;
      if (first[buffer] < 0) first[buffer] = node;
      last[buffer] = node;
    };
    for (const int value : nodes[node].inputs) touch(value);
    for (const int value : nodes[node].outputs) touch(value);
  }
  int64_t peak = 0;
  for (int node = 0; node < static_cast<int>(nodes.size()); ++node) {
    int64_t alive = 0;
    for (size_t buffer = 0; buffer < first.size(); ++buffer) {
      if (graph.buffers()[buffer].kind != Buffer::Kind::temporary) continue;
      if (first[buffer] >= 0 && first[buffer] <= node && node <= last[buffer]) alive += graph.buffers()[buffer].bytes;
    }
    peak = std::max(peak, alive);
  }
  return peak;
}

int64_t placed_bytes(const Buffer& buffer, const Placement& placement) {
  return buffer.bytes * (placement.packets ? 2 : 1);
}

void plan_memory(Plan& plan, const std::vector<bool>& own, const std::vector<bool>& packets) {
  const Order order(plan);
  const size_t workers = plan.queues.size();
  const std::vector<Buffer>& buffers = plan.graph.buffers();
  plan.placements.assign(buffers.size(), {});
  for (size_t buffer = 0; buffer < buffers.size(); ++buffer) {
    plan.placements[buffer].own = own[buffer];
    plan.placements[buffer].packets = packets[buffer];
  }
  const std::vector<Push> pushed = pushed_buffers(plan.graph, plan.stages);
  for (size_t buffer = 0; buffer < buffers.size(); ++buffer) plan.placements[buffer].pushed = pushed[buffer];
  std::vector<Tenant> all(buffers.size());
  std::vector<std::vector<int64_t>> first_of(buffers.size());  // of own buffers, by worker: place of the first task
  for (int index = 0; index < static_cast<int>(plan.tasks.size()); ++index) {
    const Task& task = plan.tasks[index];
    for (const Access& access : plan.stages[task.stage].accesses) {
      const int buffer = plan.graph.values()[access.value].buffer;
      if (buffer < 0 || buffers[buffer].kind != Buffer::Kind::temporary || pushed[buffer].ranks > 0) continue;
      Tenant& tenant = all[buffer];
      if (tenant.buffer < 0) {
        tenant.buffer = buffer;
        tenant.bytes =
            (std::max<int64_t>(placed_bytes(buffers[buffer], plan.placements[buffer]), 1) + placement_alignment - 1) /
            placement_alignment * placement_alignment;
        tenant.first = index;
        tenant.last_of.assign(workers, 0);
        tenant.ended_by.assign(workers, std::numeric_limits<int64_t>::max());
        first_of[buffer].assign(workers, -1);
      }
      tenant.last = index;
      const int64_t place = order.place(index);
      tenant.last_of[task.worker] = std::max(tenant.last_of[task.worker], place + 1);
      // Later tasks of a worker know at least as much as its first one, which is enough.
      if (first_of[buffer][task.worker] >= 0) continue;
      first_of[buffer][task.worker] = place;
      for (size_t worker = 0; worker < workers; ++worker) {
        tenant.ended_by[worker] = std::min(tenant.ended_by[worker], order.ended(index, static_cast<int>(worker)));
      }
    }
  }
  for (const bool owned : {false, true}) {
    std::vector<Tenant> tenants;
    for (size_t buffer = 0; buffer < buffers.size(); ++buffer) {
      if (all[buffer].buffer >= 0 && own[buffer] == owned) tenants.push_back(all[buffer]);
    }
    std::vector<std::vector<char>> apart(tenants.size(), std::vector<char>(tenants.size(), 0));
    for (size_t a = 0; a < tenants.size(); ++a) {
      for (size_t b = 0; b < a; ++b) {
        const bool ordered = owned ? own_before(tenants[a], first_of[tenants[b].buffer]) ||
                                         own_before(tenants[b], first_of[tenants[a].buffer])
                                   : all_before(tenants[a], tenants[b]) || all_before(tenants[b], tenants[a]);
        const bool packet = packets[tenants[a].buffer] || packets[tenants[b].buffer];
        apart[a][b] = apart[b][a] = packet || !ordered;
      }
    }
    std::vector<int64_t> offsets;
    (owned ? plan.own_bytes : plan.arena_bytes) = pack_best(tenants, apart, offsets);
    for (size_t index = 0; index < tenants.size(); ++index) {
      plan.placements[tenants[index].buffer].offset = offsets[index];
    }
  }
  plan.eager_peak_bytes = eager_peak(plan.graph);
}

}  // namespace ark::compiler
