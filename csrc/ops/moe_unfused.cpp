// Mixtures of experts on CUDA tensors that ark's kernels cannot move: uses PyTorch's operators and the group's
// all_to_all. The host counts and waits for the device.
#include "ops/meeting.hpp"
#include "ops/moe.hpp"
#include "process_group/cuda/cuda_group.hpp"

namespace ark::ops {

namespace {

// What the host must know about a call.
struct Known {
  MoeRouting routing;
  at::Tensor choices, theirs;  // of each slot; this rank's rows by source rank
  std::vector<int64_t> sent, received;

  Known(const at::Tensor& places, const at::Tensor& rank_counts, ProcessGroupArk& group, c10::Device device)
      : routing(routing_of(rank_counts)) {
    const int rank = group.getRank();
    std::vector<int64_t> rows;
    for (int r = 0; r < routing.ranks(); ++r) {
      const auto of = routing.rows_of(r, rank);
      rows.insert(rows.end(), of.begin(), of.end());
      sent.push_back(routing.sent(rank, r)), received.push_back(routing.sent(r, rank));
    }
    choices = at::tensor(choices_of(places, routing, {rank, "moe_dispatch"}), at::kLong).to(device);
    theirs = at::tensor(rows, at::kLong).to(device);
  }
};

at::Tensor exchanged(const at::Tensor& rows, const std::vector<int64_t>& sent, const std::vector<int64_t>& received,
                     ProcessGroupArk& group) {
  const int64_t dim = rows.size(1);
  std::vector<int64_t> out, in;
  int64_t all = 0;
  for (size_t r = 0; r < sent.size(); ++r)
    out.push_back(sent[r] * dim), in.push_back(received[r] * dim), all += received[r];
  at::Tensor from = rows.flatten(), to = at::empty({all * dim}, rows.options());
  all_to_all_single(group, to, from, in, out);
  return to.view({all, dim});
}

at::Tensor send(const at::Tensor& x, int64_t k, const std::optional<at::Tensor>& weights, int64_t max_rows,
                const Known& known, ProcessGroupArk& group) {
  const bool each = x.dim() == 3;
  at::Tensor rows = each ? x.flatten(0, 1).index_select(0, known.choices)
                         : x.index_select(0, known.choices.div(std::max<int64_t>(k, 1), "floor"));
  if (weights)
    rows = rows.to(at::kFloat).mul_(weights->flatten().index_select(0, known.choices).unsqueeze(1)).to(x.scalar_type());
  at::Tensor out = at::zeros({max_rows, x.size(-1)}, x.options());
  return out.index_copy_(0, known.theirs, exchanged(rows, known.sent, known.received, group));
}

}  // namespace

MoeDispatched moe_dispatch_unfused(const MoeDispatch& call, ProcessGroupArk& group) {
  MoeDispatch here = call;
  here.topk_ids = call.topk_ids.cpu();
  const auto [routing, counts, places, rank_counts] = moe_route(here, group);
  const c10::Device device = call.x.device();
  const Known known(places, rank_counts, group, device);
  at::Tensor rows = send(call.x, call.topk_ids.size(1), std::nullopt, call.max_rows, known, group);
  return {rows, counts.to(device), places.to(device), rank_counts.to(device)};
}

at::Tensor moe_scatter_unfused(const MoeRows& call, ProcessGroupArk& group) {
  const Known known(call.places.cpu(), call.rank_counts.cpu(), group, call.rows.device());
  check_rows(known.routing, call.max_rows, group.getRank());
  return send(call.rows, call.k(), call.weights, call.max_rows, known, group);
}

at::Tensor moe_gather_unfused(const MoeRows& call, ProcessGroupArk& group) {
  const Known known(call.places.cpu(), call.rank_counts.cpu(), group, call.rows.device());
  check_rows(known.routing, call.rows.size(0), group.getRank());
  const at::Tensor slots = exchanged(call.rows.index_select(0, known.theirs), known.received, known.sent, group);
  const auto wide = call.rows.options().dtype(at::kFloat);
  at::Tensor brought = at::zeros({call.tokens() * call.k(), call.dim()}, wide);
  brought.index_copy_(0, known.choices, slots.to(at::kFloat));
  if (call.weights) brought.mul_(call.weights->flatten().unsqueeze(1));
  brought = brought.view({call.tokens(), call.k(), call.dim()});
  if (!call.summed) return brought.to(call.rows.scalar_type());
  at::Tensor total = at::zeros({call.tokens(), call.dim()}, wide);
  for (int64_t j = 0; j < call.k(); ++j) total.add_(brought.select(1, j));
  return total.to(call.rows.scalar_type());
}

}  // namespace ark::ops
