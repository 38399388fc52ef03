"""Ranks that decide together who runs a graph with collectives.

All ranks of a group must take the same contestant: a loop kernel's collectives and those of torch.distributed do not
meet. The ranks come together at their first call of a graph, through the group's store. They time the contestants in
lockstep, and each time that counts is the maximum over the ranks. A rank may compile a graph alone (its guards failed,
or its program differs); its peers never come. So the wait has a bound, after which all take the contestant that every
rank knows without asking.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import Node

from ark_torch.compile.choice import Choice
from ark_torch.compile.report import log

_WAIT_S = 60.0  # ranks compile at different speeds
_SLICE_S = 0.5  # between looks at the group's health

# Group -> graph's name -> meetings so far.
_held: dict[Any, Counter[str]] = {}


def group_of(collectives: Sequence[Node]) -> Any:
    """The process group of these nodes, or None: if they have several, or it has one rank."""
    from torch.distributed.distributed_c10d import _world

    arguments = [one for node in collectives for one in (*node.args, *node.kwargs.values())]
    groups = [group for group in _world.pg_map if group.group_name in arguments]
    return groups[0] if len(groups) == 1 and groups[0].size() > 1 else None


class Meeting:
    """The ranks of `group` at a graph's first call. `text` is the graph's (choice.text_of): nothing of the machine is
    in it, which may differ between nodes."""

    def __init__(self, group: Any, text: str, device: torch.device) -> None:
        self._group, self._device = group, device
        self._name = hashlib.sha256(text.encode()).hexdigest()[:32]

    def hold(self, known: Choice | None, ready: Sequence[str], otherwise: str) -> tuple[Choice | None, list[str]]:
        """What all ranks do next: the choice, if it is clear, else the contestants to be timed.

        `known`: this rank's earlier choice. `ready`: the contestants that it has compiled, `otherwise` among them.
        """
        entry = {"known": list(known.parts) if known is not None else None, "ready": list(ready)}
        try:
            told: dict[str, Any] = json.loads(self._verdict(json.dumps(entry), json.dumps({"names": [otherwise]})))
        except RuntimeError as error:  # the store's host is gone, and the next collective says so
            log.debug("the ranks of a graph cannot meet: %s", error)
            told = {"names": [otherwise]}
        if told.get("known") and known is not None:
            return known, []
        names = [name for name in ready if name in told["names"]]
        return (Choice(names[0]), []) if len(names) == 1 else (None, names)

    def agree(self, values: Sequence[float]) -> list[float]:
        """The maximum of each value over the ranks. A collective: all ranks pass equally many."""
        own = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(own, dist.ReduceOp.MAX, group=self._group)
        return [float(one) for one in own.tolist()]

    def _verdict(self, entry: str, alone: str) -> str:
        store: Any = dist.distributed_c10d._get_process_group_store(self._group)
        rank, world = self._group.rank(), self._group.size()
        at = self._key()
        store.set(f"{at}/{rank}", entry)
        if store.add(f"{at}/ranks", 1) == world:
            entries = [json.loads(store.get(f"{at}/{one}")) for one in range(world)]
            store.compare_set(f"{at}/verdict", "", json.dumps(_joint(entries)))
        elif not self._wait(store, f"{at}/verdict"):
            store.compare_set(f"{at}/verdict", "", alone)  # the first verdict stays
        return bytes(store.get(f"{at}/verdict")).decode()

    def _key(self) -> str:
        known = dist.distributed_c10d._world.pg_map
        for group in [group for group in _held if group not in known]:
            del _held[group]
        counts = _held.setdefault(self._group, Counter())
        counts[self._name] += 1
        return f"ark/graph/{self._name}/{counts[self._name]}"

    def _wait(self, store: Any, key: str) -> bool:
        """Whether the key is there in time, and the group well."""
        from ark_torch.train.agreement import ark_backend

        backend = ark_backend(self._group, self._device.type)
        deadline = time.monotonic() + _WAIT_S
        while time.monotonic() < deadline and (backend is None or not backend.get_error().value):
            try:
                store.wait([key], datetime.timedelta(seconds=_SLICE_S))
                return True
            except dist.DistStoreError:  # not yet
                continue
        log.info("not all ranks came to decide together who runs a graph: each takes what needs no measurement")
        return False


def _joint(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the ranks' entries make: a choice that all know, else the contestants that all have."""
    first = entries[0]["known"]
    if first is not None and all(one["known"] == first for one in entries):
        return {"known": True, "names": []}
    return {"names": [name for name in entries[0]["ready"] if all(name in one["ready"] for one in entries)]}
