"""The collectives that a graph holds, compared between ranks before any of them replays.

Ranks whose graphs hold different collectives would wait for each other in a replay, where nothing can tell why. The
flight record lists all collectives that ark issues, captured ones included; other backends only count theirs. Groups of
other ranks than the step's (stages, shards within a replica) may differ between ranks and are not compared.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import torch
import torch.distributed as dist

from ark_torch.distributed import flight

# Operations that move as many elements on every rank. Others may be uneven.
EVEN = ("all_reduce", "broadcast", "reduce")

Held = dict[str, list[str]]  # group -> its collectives, in order


class Watch:
    """Notes the collectives from its creation to held().

    With `counts`, also those of a backend that only counts. NCCL's number may include batches of sends and receives,
    which the stages of a pipeline have in different numbers.
    """

    def __init__(self, group: Any, device: torch.device, counts: bool = True) -> None:
        self._members = dist.get_process_group_ranks(group)
        self._group, self._device, self._counts = group, device, counts
        before = flight.record()
        self._newest = int(before["recorded"])
        self._numbers = {group["id"]: _last(group) for group in before["groups"]}
        self._counted = self._count()

    def held(self) -> Held:
        """The collectives since then."""
        record = flight.record()
        names: dict[int, str] = {}
        found: Held = {}
        for group in record["groups"]:
            count = _last(group) - self._numbers.get(group["id"], 0)
            if count and group["global_ranks"] == self._members:
                names[group["id"]] = name = str(group["name"])
                found[name] = [*found.get(name, []), *["collective"] * count]
        if not found and (count := self._count() - self._counted):
            found[self._group.group_name] = ["collective"] * count
        if 2 * sum(map(len, found.values())) > record["capacity"]:  # some ranks may have overwritten a part
            return found
        entries = [one for one in record["entries"] if one["id"] > self._newest and not one["is_p2p"]]
        for name, texts in found.items():
            kept = [_text(one) for one in entries if names.get(one["group"]) == name]
            texts[: len(kept)] = kept
        return found

    def _count(self) -> int:
        """Of the step's own group, if its backend counts."""
        if not self._counts:
            return 0
        try:
            return int(self._group._get_backend(self._device)._get_sequence_number_for_group())
        except (RuntimeError, AttributeError):  # the backend has no such number, or none before its first collective
            return 0


def _last(group: dict[str, Any]) -> int:
    """The number of a group's newest collective."""
    return int(group["collective"]["last_scheduled"])


def _text(entry: dict[str, Any]) -> str:
    facts = [str(entry["dtype"])]
    if entry["operation"] in EVEN:
        facts = [f"{entry['input_elements'] or entry['output_elements']} x {entry['dtype']}"]
    if entry["reduce_op"] is not None:
        facts.append(str(entry["reduce_op"]))
    if entry["root"] is not None and entry["root"] >= 0:
        facts.append(f"root {entry['root']}")
    return f"{entry['operation']}({', '.join(facts)})"


def digest(held: Held) -> int:
    """32 bits, equal on ranks that hold the same."""
    return zlib.crc32(json.dumps(held, sort_keys=True).encode())


def difference(told: list[Held]) -> str:
    """A sentence about the first rank that holds something else than rank 0; "" if none does."""
    for rank, theirs in enumerate(told):
        for name in sorted(theirs.keys() | told[0].keys()):
            ours, own = theirs.get(name, []), told[0].get(name, [])
            for number in range(max(len(ours), len(own))):
                one, other = (texts[number] if number < len(texts) else "missing" for texts in (ours, own))
                if one != other:
                    return (
                        f"the ranks' graphs differ: collective {number + 1} of group {name!r} is {one} on rank {rank} "
                        f"({len(ours)} in all) and {other} on rank 0 ({len(own)} in all)"
                    )
    return ""
