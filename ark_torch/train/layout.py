"""What a step trains: modules, parameters, whether they are trained, where they lie, and the optimizer's groups.

Every call compares it with that of capture(): graphs and buckets hold addresses, and ranks with other parameters would
wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ark_torch import _C
from ark_torch.train.models import Subject


class Slots:
    """Dictionaries, and what they hold: a module's parameters by name, for example."""

    def __init__(self, dicts: Iterable[dict[Any, Any]]) -> None:
        self._dicts = [one for one in dicts if isinstance(one, dict)]  # TorchScript's modules have views of C++ tables
        self._held = [value for one in self._dicts for value in one.values()]

    def same(self) -> bool:
        """Whether they hold the same objects now."""
        return _C._holds(self._dicts, self._held)


class Layout:
    """The layout at the time of its creation. It keeps what it names alive, so that identities mean something."""

    def __init__(self, subject: Subject, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        modules = list(subject.module.modules())
        self._slots = [Slots(one._modules for one in modules), Slots(one._parameters for one in modules)]
        self.parameters = dict(subject.module.named_parameters())
        self._every: list[Tensor] = list(self.parameters.values())
        self._trained = _C._trained(self._every)
        self._groups = self._groups_now()
        self.settle()

    def settle(self) -> None:
        """Takes the addresses as they are now: FSDP2 pads shards in a model's first forward pass."""
        parts = [p._local_tensor if isinstance(p, DTensor) else p for p in self._every]
        self._parts = [part for part in parts if not is_traceable_wrapper_subclass(part)]  # those have no address
        self._addresses = _C._addresses(self._parts)

    def changed(self) -> bool:
        """Whether anything differs now."""
        return not (
            all(slots.same() for slots in self._slots)
            and self._same_groups()
            and _C._trained(self._every) == self._trained
            and _C._addresses(self._parts) == self._addresses
        )

    def _groups_now(self) -> list[list[Any]]:
        return [list(group["params"]) for group in self._optimizer.param_groups]

    def _same_groups(self) -> bool:
        groups = self._optimizer.param_groups
        return len(groups) == len(self._groups) and all(
            len(group["params"]) == len(before) and all(map(is_, group["params"], before))
            for group, before in zip(groups, self._groups, strict=True)
        )

    def _trained_ones(self) -> list[Tensor]:
        return [p for p, trained in zip(self._every, self._trained, strict=True) if trained]

    def trains_others(self, now: Layout) -> bool:
        """Whether the trained parameters are others now."""
        before, after = self._trained_ones(), now._trained_ones()
        return len(before) != len(after) or not all(map(is_, before, after))

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
                    f"parameter {name!r} is not the tensor of capture() (assigned, or loaded with assign=True), and "
                    "the optimizer updates the old one: make the optimizer anew, with the model's parameters, and call "
                    "capture() again"
                )
        return ""
