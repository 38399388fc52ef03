"""What a step trains: modules, parameters, whether they are trained, where they lie, and the optimizer's groups.

Every call compares it with that of capture(): graphs and buckets hold addresses, and ranks with other parameters would
wait for each other. The comparison runs in C where it can (identity of whole lists), since it precedes every replay.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ark_torch.train.models import Subject


def values_of(dicts: Iterable[dict[Any, Any]]) -> list[Any]:
    """The values of all the dictionaries, in order."""
    return list(chain.from_iterable(map(dict.values, dicts)))


def same_objects(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


class Slots:
    """Places of modules that hold one kind of thing ("_modules", "_parameters" or "_buffers"), and what was there."""

    def __init__(self, modules: list[nn.Module], kind: str) -> None:
        places: list[dict[str, Any]] = [getattr(module, kind) for module in modules]
        self._filled = [one for one in places if one]
        self._empty = [one for one in places if not one]
        self._held = values_of(self._filled)

    def same(self) -> bool:
        return not any(self._empty) and same_objects(values_of(self._filled), self._held)


class Layout:
    """The layout at the time of its creation. It keeps what it names alive, so that identities mean something."""

    def __init__(self, subject: Subject, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        modules = list(subject.module.modules())
        self._slots = [Slots(modules, kind) for kind in ("_modules", "_parameters")]
        self.parameters = dict(subject.module.named_parameters())
        self._every = list(self.parameters.values())
        self._trained = [p.requires_grad for p in self._every]
        self._groups = self._groups_now()
        self.settle()

    def settle(self) -> None:
        """Takes the addresses as they are now: FSDP2 pads shards in a model's first forward pass."""
        parts = [p._local_tensor if isinstance(p, DTensor) else p for p in self._every]
        self._parts = [part for part in parts if not is_traceable_wrapper_subclass(part)]  # those have no address
        self._places = list(map(Tensor.data_ptr, self._parts))

    def changed(self) -> bool:
        """Whether anything differs now."""
        return not (
            all(slots.same() for slots in self._slots)
            and self._same_groups()
            and [p.requires_grad for p in self._every] == self._trained
            and list(map(Tensor.data_ptr, self._parts)) == self._places
        )

    def _groups_now(self) -> list[list[Any]]:
        return [list(group["params"]) for group in self._optimizer.param_groups]

    def _same_groups(self) -> bool:
        groups = self._optimizer.param_groups
        return len(groups) == len(self._groups) and all(
            same_objects(group["params"], before) for group, before in zip(groups, self._groups, strict=True)
        )

    def replaced(self, now: Layout) -> list[str]:
        """Names of parameters that are another tensor now, or are new."""
        return [name for name, p in now.parameters.items() if self.parameters.get(name) is not p]

    def why_not(self, now: Layout) -> str:
        """Why a step cannot go on with the layout of now: the optimizer updates a parameter that was replaced; else
        ""."""
        updated = {id(p) for group in now._groups for p in group}
        current = {id(p) for p in now._every}
        for name, old in self.parameters.items():
            if old.requires_grad and id(old) in updated and id(old) not in current:
                return (
                    f"parameter {name!r} is not the tensor of capture() (assigned, or loaded with assign=True), and the "
                    "optimizer updates the old one: make the optimizer anew, with the model's parameters, and call "
                    "capture() again"
                )
        return ""

