"""Few bits between nodes alone: State(where="between").

Inside a node links are quick and sums exact. So the ranks of a node add their gradients, each takes some layers to the
ranks of its place in the other nodes, in few bits, and the node's ranks give each other the results. Layers are shared
out whole: a residual then lies on the one rank of each node that quantizes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ark_torch.distributed.compression import agree


class Nodes:
    """The nodes of a group's ranks, with a group for this rank's node and one for its place in all nodes."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Collective. Raises ValueError on all ranks if nodes have different numbers of ranks."""
        backend: Any = group._get_backend(device)
        own = _identity(backend.options.node)
        told = agree.gather_text(group, own, device)
        members: dict[str, list[int]] = {}
        for rank, name in enumerate(told):
            members.setdefault(name, []).append(rank)
        nodes = list(members.values())
        self.nodes, self.places = len(nodes), len(nodes[0])
        if any(len(ranks) != self.places for ranks in nodes):
            sizes = " + ".join(str(len(ranks)) for ranks in nodes)
            raise ValueError(
                f"ark: [rank {group.rank()}] compression: where='between' needs as many ranks on every node, and there "
                f"are {sizes}: pass where='everywhere'."
            )
        self.place = members[own].index(group.rank())
        self.node_group = _subgroup(group, members[own], backend, device)
        self.rail_group = _subgroup(group, [ranks[self.place] for ranks in nodes], backend, device)

    def owners(self, numels: Sequence[int]) -> list[int]:
        """The place that takes each layer: the largest first, to the place with the fewest elements yet."""
        loads = [0] * self.places
        owners = [0] * len(numels)
        for index in sorted(range(len(numels)), key=lambda index: (-numels[index], index)):
            owners[index] = loads.index(min(loads))
            loads[owners[index]] += numels[index]
        return owners

    def mean_of_node(self, data: Tensor) -> Tensor:
        """The mean of `data` over this node's ranks, in a new tensor."""
        total = data.clone()
        dist.all_reduce(total, group=self.node_group)
        return total.div_(self.places)

    def share(self, results: Sequence[Tensor | None], like: Tensor, numels: Sequence[int]) -> Tensor:
        """All layers' results, of which each place has its own."""
        whole = torch.zeros_like(like)
        for piece, result in zip(whole.split_with_sizes(list(numels)), results, strict=True):
            if result is not None:
                piece.copy_(result)
        dist.all_reduce(whole, group=self.node_group)
        return whole


def _identity(node: int) -> str:
    """What the ranks of a node have in common, as for shared memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino} {node}"


def _subgroup(group: dist.ProcessGroup, ranks: Sequence[int], backend: Any, device: torch.device) -> Any:
    members = [dist.get_global_rank(group, rank) for rank in ranks]
    return dist.new_group(
        members, backend=f"{device.type}:ark", timeout=backend.options._timeout, pg_options=backend.options,
        use_local_synchronization=True,
    )  # fmt: skip
