"""An optimizer in the form that a graph can repeat: capturable, fused where there is such a form, rates as tensors.

A graph keeps every number that the host put into it. So learning rates become tensors of the device, which schedulers
fill in place; the other numbers (momentum, weight decay) are part of what tells graphs apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer


class Rates:
    """The optimizer of a step on a CUDA device, and its learning rates there."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.optimizer, self._device = optimizer, device
        self._rates: list[Tensor] = []
        self._state: Any = None
        self.settle()

    def settle(self) -> bool:
        """Puts numbers that somebody wrote into the groups where graphs read them; whether the state was replaced.

        load_state_dict() replaces groups and state: tensors that graphs know are then no longer the optimizer's.
        """
        replaced = self._state is not self.optimizer.state
        if replaced:
            self._state = self.optimizer.state
            self._make_capturable()
        for number, group in enumerate(self.optimizer.param_groups):
            rate = group["lr"]
            if number < len(self._rates) and rate is self._rates[number]:
                continue
            if number == len(self._rates):
                self._rates.append(torch.empty((), dtype=torch.float32, device=self._device))
            own = self._rates[number]
            with torch.no_grad():
                own.copy_(rate.detach().reshape(())) if isinstance(rate, Tensor) else own.fill_(float(rate))
            group["lr"] = own
        return replaced

    def _make_capturable(self) -> None:
        optimizer: Any = self.optimizer
        fused = _can_fuse(optimizer)
        for group in (*optimizer.param_groups, optimizer.defaults):
            if "capturable" in group:
                group["capturable"] = True
            if fused:
                group["fused"], group["foreach"] = True, False
        if fused:
            optimizer._step_supports_amp_scaling = True  # as its constructor does
        for parameter, state in optimizer.state.items():
            step = state.get("step") if isinstance(state, dict) else None
            if isinstance(step, Tensor) and step.device != parameter.device:
                state["step"] = step.to(parameter.device, torch.float32)


def _can_fuse(optimizer: Optimizer) -> bool:
    """SGD has no other form that takes a rate from the device; Adam has, for who asks for it."""
    asked = any(group.get("foreach") for group in optimizer.param_groups)
    return isinstance(optimizer, SGD) or (isinstance(optimizer, Adam) and not asked)


def why_not(optimizer: Optimizer, scaled: bool) -> str:
    """Why steps of this optimizer cannot be captured, with a GradScaler or without; empty: they can."""
    name = type(optimizer).__name__
    if scaled and not _can_fuse(optimizer) and not getattr(optimizer, "_step_supports_amp_scaling", False):
        return f"a GradScaler asks the host whether {name} may step: use AdamW, Adam or SGD, without foreach=True"
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return f"{name}(differentiable=True) builds a graph of the update"
        if "capturable" not in group and not isinstance(optimizer, SGD):
            return f"{name} keeps state on the host and has no capturable form: AdamW, Adam, SGD and others have"
    return ""


def check(optimizer: Any, trained: list[Tensor]) -> None:
    """TypeError and ValueError where the optimizer is none for a step, or updates what the model does not have."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"ark: train.capture: optimizer is a {type(optimizer).__name__}: pass an optimizer of torch.optim."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "ark: train.capture: optimizer is an LBFGS, which evaluates the loss as often as it likes: a captured step "
            "has one forward and backward pass; use AdamW, Adam or SGD."
        )
    known = {id(parameter) for parameter in trained}
    strangers = sum(p.requires_grad and id(p) not in known for g in optimizer.param_groups for p in g["params"])
    if strangers:
        raise ValueError(
            f"ark: train.capture: optimizer updates {strangers} parameters that model does not have: make it with the "
            "parameters of the model that is passed, after any fully_shard or parallelize_module."
        )


def numbers(optimizer: Optimizer) -> tuple[Any, ...]:
    """What a graph holds of the groups' options: all but parameters and rates that are tensors."""
    names = [name for name in optimizer.defaults if name != "params"]
    return tuple(tuple(group[name] for name in names if _plain(group.get(name))) for group in optimizer.param_groups)


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, tuple))
