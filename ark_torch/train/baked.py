"""What a graph takes from the host, and would repeat although the host has changed it since.

Addresses: buffers, tensors stored in modules, the optimizer's state. If the host puts another tensor in such a place
between two calls, graphs are recorded anew. Values: numbers, strings and training modes in modules (dropout's `p`).
They tell graphs apart, as a batch's shape does.

Changes by the step itself are another matter (reasons.py): eager steps and captures end with refresh().
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from operator import itemgetter
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ark_torch import _C
from ark_torch.train.layout import Slots
from ark_torch.train.reasons import OF_MODULES, is_plain


class Baked:
    """What graphs of a step take from the model, from an averaged one, and from the optimizer."""

    def __init__(self, model: nn.Module, averaged: nn.Module | None, optimizer: Optimizer) -> None:
        self._model, self._averaged, self._optimizer = model, averaged, optimizer
        self._tensors: dict[str, tuple[dict[str, Any], str, weakref.ref[Tensor]]] = {}  # it frees what it drops
        self._outputs: set[str] = set()  # tensors that steps put into modules
        self._labels: list[list[str]] = []
        self._epoch = 0  # of the base
        self._base: list[Any] = []  # values to which the differences in keys refer
        self._last: list[Any] = []  # values at the last key()
        self._difference: tuple[Hashable, ...] = ()
        self.why_changed = ""  # a sentence about a value that changed before the last key()
        self.refresh(by_step=False)

    def refresh(self, by_step: bool = True) -> None:
        """Takes everything as it is now; `by_step`: a step that ran on the host has made it so."""
        modules = list(self._model.modules())
        averaged = list(self._averaged.modules()) if self._averaged is not None else []
        self._slots = [
            Slots(one._buffers for one in (*modules, *averaged)),
            Slots(one._parameters for one in averaged),
        ]
        tensors = {
            f"{path}.{name}" if path else name: (one.__dict__, name, weakref.ref(value))
            for path, one in self._model.named_modules()
            for name, value in one.__dict__.items()
            if isinstance(value, Tensor)
        }
        if by_step:
            both = tensors.keys() & self._tensors.keys()
            self._outputs |= {label for label in both if tensors[label][2]() is not self._tensors[label][2]()}
            self._outputs |= tensors.keys() & self._empty()  # and those that were None
        self._tensors = tensors
        self._watched = [(label, *where) for label, where in tensors.items() if label not in self._outputs]
        self._held = [value for state in self._states() for value in state.values()]
        self._take_values()

    # ---- Addresses

    def moved(self) -> str:
        """A sentence about a tensor that has taken another's place; "" if there is none."""
        if not all(slots.same() for slots in self._slots):
            return "a buffer of the model is another tensor than before"
        for label, attributes, name, value in self._watched:
            before = value()  # None: nobody has it any more
            if before is None or attributes.get(name) is not before:
                return f"the model's {label!r} is another tensor than before"
        if not self._same_states():
            return "the optimizer's state was replaced"
        return ""

    def _states(self) -> list[dict[Any, Any]]:
        return [one for one in self._optimizer.state.values() if isinstance(one, dict)]

    def _same_states(self) -> bool:
        try:
            return _C._holds(list(self._optimizer.state.values()), self._held)
        except TypeError:  # some optimizers of others keep objects beside dictionaries
            return _C._holds(self._states(), self._held)

    # ---- Values

    @property
    def epoch(self) -> int:
        """Graphs of earlier epochs are not replayed again."""
        return self._epoch

    def key(self) -> Hashable:
        """What tells graphs apart: the values that differ from the base."""
        self.why_changed = ""
        try:
            now = [read(attributes) for read, attributes in self._reads]
            known = list(map(len, self._attributes)) == self._sizes
        except KeyError:  # one was removed
            known = False
        if not known:
            self._take_values()
        elif not _equal(now, self._last):
            self.why_changed = self._change(self._last, now)
            self._last = now
            self._difference = tuple(
                (label, value if _has_value(value) else id(value)) for label, _, value in self._pairs(self._base, now)
            )
        return (self._epoch, self._difference)

    def _take_values(self) -> None:
        """Those that a step has changed keep their meaning in keys, so that keys are the same after it."""
        labels, reads, self._attributes = [], [], []
        for path, one in self._model.named_modules():
            names = [n for n, value in one.__dict__.items() if n not in OF_MODULES and _has_value(value)]
            labels.append([f"{path}.{name}" if path else name for name in names])
            reads.append((_reader(names), one.__dict__))
            self._attributes.append(one.__dict__)
        self._sizes = list(map(len, self._attributes))
        self._reads: list[tuple[Callable[[Any], tuple[Any, ...]], dict[str, Any]]] = reads
        now = [read(attributes) for read, attributes in reads]
        if labels != self._labels or (self._difference and not _equal(now, self._last)):
            self._epoch += 1
            self._labels, self._base, self._difference = labels, now, ()
        elif not self._difference:
            self._base = now
        self._last = now

    def _empty(self) -> set[str]:
        """What was None at the last key()."""
        return {
            label
            for labels, values in zip(self._labels, self._last, strict=True)
            for label, value in zip(labels, values, strict=True)
            if value is None
        }

    def _pairs(self, before: list[Any], now: list[Any]) -> list[tuple[str, Any, Any]]:
        """The values that differ: label, before, now."""
        return [
            (label, old, new)
            for labels, one, other in zip(self._labels, before, now, strict=True)
            if not _equal(one, other)
            for label, old, new in zip(labels, one, other, strict=True)
            if not _equal(old, new)
        ]

    def _change(self, before: list[Any], now: list[Any]) -> str:
        for label, old, new in self._pairs(before, now):
            return (
                f"the model's {label!r} changed from {old!r} to {_shown(new)}, and each value needs a graph of its "
                "own: keep it, or pass it to loss() as a tensor of the batch"
            )
        return ""


def _has_value(value: Any) -> bool:
    """Whether a value can be compared; None is one, since options that are off are None."""
    return value is None or is_plain(value)


def _shown(value: Any) -> str:
    """For a sentence. A tensor's text would make the host wait."""
    return repr(value) if _has_value(value) else f"a {type(value).__name__}"


def _reader(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Reads these attributes, as a tuple."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda attributes: tuple(attributes[name] for name in names)


def _equal(one: Any, other: Any) -> bool:
    """Of values that may have become tensors or arrays, which refuse to be compared."""
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):
        return False
