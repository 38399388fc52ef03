"""The layers known to a state, and their quantization error so far (error feedback).

A layer is a parameter: its name, its rule and its float32 residual. Residuals belong to layers, not to DDP's buckets:
they move when buckets are rebuilt or layers are left out. The operators need the residuals of a call in one piece, so
one tensor holds them while the same layers travel together. A layer's residual is a view of it, [rows, n]: one row for
an all-reduce, one per rank's share for a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ark_torch.distributed.compression.agree import log
from ark_torch.distributed.compression.rules import Rule, rule_for

if TYPE_CHECKING:
    from ark_torch.distributed.compression.plan import Plan


class Layer:
    """One parameter."""

    def __init__(self, name: str, shape: Sequence[int], rule: Rule | None) -> None:
        self.name = name
        self.shape = list(shape)
        self.numel = torch.Size(shape).numel()
        self.rule = rule  # None: the state's bits and bucket
        self.chosen: int | None = None  # bits chosen by Auto
        self.residual: Tensor | None = None
        self.movable = True  # whether the order of elements is independent of the number of ranks
        self.sums: Tensor | None = None  # Auto's measurements

    def __repr__(self) -> str:
        return f"Layer({self.name}, {self.shape})"


class Layers:
    """Parameters by identity, in the order first seen; named by the module if there is one.

    Without a module, the n-th parameter seen is "#n": DDP passes buckets in the same order in every run of the same
    model, so these names are stable between runs.
    """

    def __init__(self, module: nn.Module | None, rules: Mapping[str, Rule], exact_below: int) -> None:
        self._rules, self._exact_below = rules, exact_below
        self._names = {id(p): name for name, p in module.named_parameters()} if module is not None else None
        self._module = module  # kept alive, so that its parameters' ids stay valid
        self._seen: dict[Any, tuple[Any, Layer]] = {}
        # From a checkpoint, for layers not seen yet.
        self._waiting: dict[str, Tensor] = {}
        self._bits: dict[str, int] = {}
        self._moved = False  # whether they come from another number of ranks
        self._flat: dict[tuple[int, ...], Tensor] = {}  # by the ids of the layers whose residuals it holds

    def __iter__(self) -> Any:
        return iter([layer for _, layer in self._seen.values()])

    def of(self, parameter: Tensor) -> Layer:
        """The layer of a parameter. Raises ValueError if the state's module does not contain it."""
        if id(parameter) in self._seen:
            return self._seen[id(parameter)][1]
        name = f"#{len(self._seen)}"
        if self._names is not None:
            if id(parameter) not in self._names:
                raise ValueError(
                    f"ark: compression: a parameter of shape {list(parameter.shape)} is not of the module that State "
                    "got: pass State(module=...) the model that DDP wraps, or what DDP returned."
                )
            name = self._names[id(parameter)]
        return self.named(id(parameter), name, parameter.shape, parameter)

    def named(self, key: Any, name: str, shape: Sequence[int], keep: Any = None) -> Layer:
        """The layer of `key`, created if missing; `keep` is kept alive as long as the layer."""
        if key not in self._seen:
            numel = torch.Size(shape).numel()
            layer = Layer(name, shape, rule_for(name, len(shape), numel, self._rules, self._exact_below))
            layer.chosen = self._bits.get(name)
            self._seen[key] = (keep, layer)
        return self._seen[key][1]

    def residual(self, plan: Plan, rows: int) -> Tensor:
        """The residuals of a plan's layers as one tensor, [rows * sum(numels)], float32: row by row, layer by layer."""
        flat = self._flat.get(plan.key)
        if flat is not None and flat.numel() == rows * plan.segments.elements and flat.device == plan.device:
            return flat
        flat = torch.zeros(rows * plan.segments.elements, device=plan.device)
        views = flat.view(rows, -1).split_with_sizes(plan.numels, dim=1)
        for layer, view in zip(plan.layers, views, strict=True):
            before = layer.residual if layer.residual is not None else self._restored(layer)
            if before is not None:
                lost = torch.zeros(view.numel(), device=plan.device)
                kept = min(view.numel(), before.numel())  # FSDP's padding depends on the number of ranks
                lost[:kept] = before.reshape(-1)[:kept].to(plan.device)
                view.copy_(lost.view_as(view))
            layer.residual = view
        moved = set(plan.key)
        self._flat = {other: old for other, old in self._flat.items() if not moved & set(other)}
        self._flat[plan.key] = flat
        return flat

    def forget(self, layers: Sequence[Layer]) -> None:
        """Frees the memory of these layers' residuals."""
        gone = set(map(id, layers))
        self._flat = {key: flat for key, flat in self._flat.items() if not gone & set(key)}
        for layer in layers:
            layer.residual = None

    def state_dict(self) -> dict[str, Tensor]:
        """Residuals by name, without padding, on the CPU."""
        saved = {name: residual.clone() for name, residual in self._waiting.items()}
        for layer in self:
            if layer.residual is not None and bool(layer.residual.any()):
                saved[layer.name] = layer.residual.detach().reshape(-1)[: layer.numel].to("cpu", copy=True)
        return saved

    def load(self, residuals: Mapping[str, Tensor], bits: Mapping[str, int], moved: bool) -> None:
        """Loads residuals and chosen bits by name; drops the layers' old ones."""
        self.forget(list(self))
        self._waiting = {name: one.detach().to("cpu", torch.float32, copy=True) for name, one in residuals.items()}
        self._bits, self._moved = dict(bits), moved
        for layer in self:
            layer.chosen = self._bits.get(layer.name)

    def _restored(self, layer: Layer) -> Tensor | None:
        found = self._waiting.pop(layer.name, None)
        if found is not None and self._moved and not layer.movable:
            log.info("compression: %s is sharded in another way now: its residual starts from zero", layer.name)
            return None
        return found


def redistribute(states: Sequence[Mapping[str, Tensor]], rank: int, world: int) -> dict[str, Tensor]:
    """Converts residuals of len(states) ranks to another number of ranks: sums them, and gives each element to one
    rank.

    An average over `world` ranks weights each rank's residual by 1 / world. The sums are scaled accordingly, so that
    the next steps add to the mean what the old ranks would have added.
    """
    result = {}
    for name in sorted({name for state in states for name in state}):
        found = [state[name].double() for state in states if name in state]  # all-zero residuals were not saved
        total = torch.stack(found).sum(0) * (world / len(states))
        first, last = (total.numel() * part // world for part in (rank, rank + 1))
        mine = torch.zeros_like(total, dtype=torch.float32)
        mine[first:last] = total[first:last].float()
        result[name] = mine
    return result
