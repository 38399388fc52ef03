"""Host-side messages between ranks, which keep every step the same on all of them.

Before the first step the ranks compare what they train (facts.py); before each call, what they are about to do. An
eager step and a replayed one must not meet, since graphs use other collective paths, and no rank may begin anew alone.
A call costs one all_gather of 8 bytes of CPU memory, about 10 us over ark, while the GPU still runs earlier steps.
Texts travel as UTF-8 bytes; nothing is unpickled.

Over ark the messages use a group of their own: a collective of the user's group that only one rank captures (a failed
capture, a new shape on one rank) must not disturb their order.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist

# What a rank is about to do, or the result. MOVED: graphs must be made anew; RELAID: buckets too. REFUSED: nothing, as
# the call is invalid.
REPLAY, CAPTURE, EAGER, FAILED, MOVED, RELAID, REFUSED = range(7)
KINDS = 8  # the values fit below


class Agreement:
    """A group's host-side messages."""

    def __init__(self, group: Any) -> None:
        self._group = _beside(group)
        self._own = self._group is not group and self._group not in _gloo_groups.values()
        self.rank, self.ranks = dist.get_rank(self._group), dist.get_world_size(self._group)

    def close(self) -> None:
        """Destroys the separate group, if there is one; no messages may follow."""
        if self._own:
            self._own = False
            with contextlib.suppress(ValueError):  # it was destroyed with the default group
                dist.destroy_process_group(self._group)

    def everyone(self, value: int) -> list[int]:
        """Every rank's value, in rank order."""
        return [int(one) for one in self._gathered(torch.tensor([value]))]

    def plans(self, count: int, mine: int, digest: int = 0) -> tuple[list[int], bool]:
        """What each rank is about to do in a call of `count` steps, and whether their graphs' digests differ.

        Raises ValueError on every rank if they have other numbers of steps. Where a rank refuses the call, all others
        raise RuntimeError here.
        """
        values = self.everyone(digest << 31 | KINDS * count + mine)
        kinds = [value % KINDS for value in values]
        if REFUSED in kinds:
            return (kinds, False) if mine == REFUSED else self.refuse(None)
        counts = [value % (1 << 31) // KINDS for value in values]
        for rank, steps in enumerate(counts):
            if steps != counts[0]:
                raise ValueError(
                    f"ark: [rank {self.rank}] train.capture: {steps} steps in this call on rank {rank} and {counts[0]} "
                    "on rank 0: pass as many batches on all ranks."
                )
        return kinds, len({value >> 31 for value in values}) > 1

    def refuse(self, own: Exception | None) -> NoReturn:
        """Ends a call that some rank refuses: raises its own error there, and RuntimeError naming it on the others."""
        told = self.share("" if own is None else str(own) or type(own).__name__)
        if own is not None:
            raise own
        rank, text = next((rank, text) for rank, text in enumerate(told) if text)
        raise RuntimeError(
            f"ark: [rank {self.rank}] train.capture: no rank has run this step, since rank {rank} refused the call: "
            f"{text.removeprefix('ark: ').removeprefix('train.capture: ')}"
        )

    def share(self, text: str) -> list[str]:
        """Every rank's text, in rank order."""
        data = text.encode()
        sizes = self.everyone(len(data))
        padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
        padded[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
        rows = zip(self._gathered(padded), sizes, strict=True)
        return [bytes(row[:size].tolist()).decode() for row, size in rows]

    def _gathered(self, own: torch.Tensor) -> list[torch.Tensor]:
        every = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(every, own, group=self._group)
        return every

    def whose(self, reasons: list[str]) -> str:
        """This rank's own reason, else that of the first rank that has one; "" if none has."""
        if reasons[self.rank]:
            return reasons[self.rank]
        return next((f"on rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason), "")

    def compare(self, facts: dict[str, str]) -> None:
        """Raises ValueError on every rank if facts differ; it names two ranks and their values."""
        told: list[dict[str, str]] = [json.loads(text) for text in self.share(json.dumps(facts))]
        for rank, other in enumerate(told):
            for name in [*told[0], *(name for name in other if name not in told[0])]:
                ours, theirs = told[0].get(name, "nothing"), other.get(name, "nothing")
                if ours != theirs:
                    raise ValueError(
                        f"ark: [rank {self.rank}] train.capture: {name} is {theirs} on rank {rank} and {ours} on rank "
                        "0: all ranks must train the same model with the same options."
                    )


def ark_backend(group: Any, device_type: str) -> Any:
    """The group's ProcessGroupArk for tensors of this device type, or None."""
    from ark_torch import _C

    try:
        backend = group._get_backend(torch.device(device_type))
    except RuntimeError:  # the group does not support them
        return None
    backend = getattr(backend, "wrapped_pg", backend)
    return backend if isinstance(backend, _C.ProcessGroupArk) else None


def _beside(group: Any) -> Any:
    """The group for messages: a new one of the same ranks, or the given one if it never carries captured work."""
    members = dist.get_process_group_ranks(group)
    ark = ark_backend(group, "cpu")
    if ark is not None:
        options = ark.options
        with _equal_numbers_of_groups(group):
            return dist.new_group(
                members, backend="cpu:ark", timeout=options._timeout, pg_options=options, use_local_synchronization=True
            )
    return group if _supports(group, "cpu") else _gloo_beside(group, members)


@contextlib.contextmanager
def _equal_numbers_of_groups(group: Any) -> Iterator[None]:
    """Lets all ranks of the group seem to know as many groups as the one that knows most.

    PyTorch names a group that only its ranks make by these and by how many groups a rank knows (_hash_ranks_to_str).
    With different names the ranks would wait for each other: one may be in more groups, or have closed its last step
    later.
    """
    names = dist.distributed_c10d._world.pg_names
    if not _supports(group, "cpu") and not torch.cuda.is_available():
        yield  # such a group can exchange nothing here
        return
    device = torch.device("cpu") if _supports(group, "cpu") else torch.device("cuda", torch.cuda.current_device())
    most = torch.tensor([len(names)], device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    placeholders = [object() for _ in range(int(most) - len(names))]
    names.update((one, f"placeholder {number}") for number, one in enumerate(placeholders))  # type: ignore[misc]
    try:
        yield
    finally:
        for one in placeholders:
            del names[one]  # type: ignore[arg-type]


def _supports(group: Any, device_type: str) -> bool:
    try:
        group._get_backend(torch.device(device_type))
    except RuntimeError:
        return False
    return True


# Group of CUDA tensors alone -> its Gloo group. PyTorch names a group by its ranks, and Gloo's addresses of a destroyed
# group stay in the store under that name: ranks of a second one could connect to the first one's.
_gloo_groups: dict[Any, Any] = {}


def _gloo_beside(group: Any, members: list[int]) -> Any:
    known = dist.distributed_c10d._world.pg_map
    for other in [other for other in _gloo_groups if other not in known]:
        del _gloo_groups[other]
    if _gloo_groups.get(group) not in known:
        with _equal_numbers_of_groups(group):
            _gloo_groups[group] = dist.new_group(members, backend="gloo", use_local_synchronization=True)
    return _gloo_groups[group]
