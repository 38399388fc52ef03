"""Few bits between nodes alone: where="between".

Inside a node links are quick, so its ranks add exactly, in float32 and rank order, each a part of the tensor. Each
exchanges its part with its rail, the ranks of its place in the other nodes, in few bits. Then the node's ranks gather
the parts. If nodes differ in size, there are as many rails as the smallest has ranks: the others only add and gather.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ark_torch import _C
from ark_torch.distributed.compression import agree

ALIGNED = 32  # elements: parts begin at cache lines
_known: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Nodes]] = weakref.WeakKeyDictionary()
_compared: weakref.WeakKeyDictionary[dist.ProcessGroup, set[Any]] = weakref.WeakKeyDictionary()  # by the function


class Nodes:
    """The nodes of a group's ranks, with subgroups: this rank's node, and its rail."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Collective in the group."""
        backend: Any = group._get_backend(device)
        rank, node_of = group.rank(), _C._nodes_of(backend)
        plan = _C._node_plan(node_of, rank)
        members = plan["members"]
        own = members[node_of[rank]]
        self.nodes, self.rails = len(members), int(plan["rails"])
        self.even = all(len(ranks) == len(own) for ranks in members)
        # Ranks of the group rail by rail, if nodes are even.
        self._order = torch.tensor([r for rail in zip(*members, strict=False) for r in rail], device=device)
        self.place, self.ranks = own.index(rank), len(own)
        self.has_rail = self.place < self.rails
        self.inside: Any = None  # None: this rank is alone on its node
        self.rail: Any = None
        if self.nodes == 1:
            return
        name: Any = f"{group.group_name}/{device.type}/"
        split = functools.partial(group.split_group, timeout=backend.options._timeout)
        if self.ranks > 1:
            self.inside = split(own, group_name=name + f"node{node_of[rank]}")
        if self.has_rail:
            rail = [ranks[self.place] for ranks in members]
            self.rail = split(rail, group_name=name + f"rail{self.place}")
            torch._C._distributed_c10d._register_process_group(self.rail.group_name, self.rail)

    @property
    def rail_name(self) -> str:
        return str(self.rail.group_name)

    def part(self, numel: int) -> int:
        """Elements of each rail's part of a tensor, with padding."""
        return -(-numel // (self.rails * ALIGNED)) * ALIGNED

    def held(self, numel: int) -> tuple[int, int]:
        """Begin and end of this rank's part; empty if it has no rail, or if there are fewer elements."""
        begin, end = (min(numel, place * self.part(numel)) for place in (self.place, self.place + 1))
        return (begin, end) if self.has_rail else (0, 0)

    def padded(self, like: Tensor) -> Tensor:
        """A float32 tensor with a part for each of the node's ranks; only what is behind `like`'s elements is set."""
        whole = torch.empty(self.part(like.numel()) * self.ranks, device=like.device)
        whole[like.numel() :].zero_()
        return whole

    def sum(self, whole: Tensor, numel: int, over_rail: Callable[[Tensor], Tensor]) -> Tensor:
        """Collective: the sum over all ranks, [numel], in the memory of `whole`, a padded() tensor of which all `numel`
        elements are set. `over_rail` adds this rank's part over its rail."""
        mine = whole
        if self.inside is not None:
            mine = torch.empty(self.part(numel), device=whole.device)
            self.inside._reduce_scatter_base(mine, whole).wait()
        begin, end = self.held(numel)
        if end > begin:
            part = mine[: end - begin]
            part.copy_(over_rail(part))
        if self.inside is not None:
            self.inside._allgather_base(whole, mine).wait()
        return whole[:numel]

    # Of even nodes: what a rail exchanges is a row for each of its ranks, in the order of nodes.

    def rows(self) -> Tensor:
        """The ranks of this rank's rail."""
        return self._order.view(-1, self.nodes)[self.place]

    def scatter(self, whole: Tensor, over_rail: Callable[[Tensor], Tensor]) -> Tensor:
        """Collective: this rank's row of the sum over all ranks of `whole`, [ranks, n]. `over_rail` gives this rank's
        row of the sum over the rail of [rails' ranks * n]."""
        sent = whole.index_select(0, self._order).view(-1)
        if self.inside is None:
            return over_rail(sent)
        mine = sent.new_empty(self.nodes * whole.shape[1])
        self.inside._reduce_scatter_base(mine, sent).wait()
        return over_rail(mine)

    def gather(self, of_rail: Tensor) -> Tensor:
        """Collective: all ranks' rows, [ranks * n], of those of each rail."""
        every = of_rail
        if self.inside is not None:
            every = of_rail.new_empty(self.ranks * of_rail.numel())
            self.inside._allgather_base(every, of_rail).wait()
        rows = every.view(len(self._order), -1)
        return torch.empty_like(rows).index_copy_(0, self._order, rows).view(-1)


def nodes_of(group: dist.ProcessGroup, device: torch.device) -> Nodes:
    """The nodes of a group of ark's. Collective in the group's first call."""
    known = _known.setdefault(group, {})
    if device.type not in known:
        known[device.type] = Nodes(group, device)
    return known[device.type]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def compressed_all_reduce(
    tensor: Tensor, bits: int, bucket: int, format: str, op: str, group: dist.ProcessGroup
) -> Tensor:
    """`ark_torch.distributed.compressed_all_reduce(where="between")` of checked arguments."""
    device = tensor.device
    if why := agree.why_exact(group, device):
        raise ValueError(f"ark: [rank {group.rank()}] compressed_all_reduce: {why}. Use all_reduce.")
    if group.size() == 1:
        return tensor.clone()
    settings = {"bits": bits, "bucket": bucket, "format": format, "op": op, "dtype": str(tensor.dtype)}
    compared, key = _compared.setdefault(group, set()), (device.type, *settings.values())
    first = key not in compared
    if first:
        agree.compare_settings(group, settings, device)
    nodes = nodes_of(group, device)
    if nodes.nodes == 1:
        if first and not compared and group.rank() == 0:
            agree.log.info("compressed_all_reduce: where='between', and all ranks are on one node: sums are exact")
        compared.add(key)
        exact = tensor.to(torch.float32, copy=True)
        dist.all_reduce(exact, group=group)
        return (exact.div_(group.size()) if op == "avg" else exact).to(tensor.dtype)
    compared.add(key)
    numel = tensor.numel()

    def over_rail(part: Tensor) -> Tensor:
        summed: Tensor = torch.ops.ark.compressed_all_reduce.without_residual(
            part, [part.numel()], [bits], [bucket], format, "nearest", 0, "sum", nodes.rail_name
        )
        return summed

    whole = nodes.padded(tensor)
    whole[:numel].copy_(tensor.flatten())
    total = nodes.sum(whole, numel, over_rail)
    # Not a view: it would keep the padding.
    total = total.div_(group.size()) if op == "avg" else total
    return total.to(tensor.dtype, copy=True).view(tensor.shape)
