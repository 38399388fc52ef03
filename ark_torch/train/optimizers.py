"""Prepares an optimizer for graphs: capturable, fused if possible, with learning rates as tensors.

A graph keeps every number that the host put into it. So learning rates become device tensors, which schedulers fill in
place; the other numbers (momentum, weight decay) are part of a graph's key.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

KEEP_STATE = ("Adagrad", "Adafactor", "SparseAdam")  # of torch.optim, on the host


class Rates:
    """A step's optimizer on a CUDA device, and its learning rates there."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.optimizer, self._device = optimizer, device
        self._rates: list[Tensor] = []
        self._state: Any = None
        self.settle()

    def settle(self) -> bool:
        """Copies numbers written into the groups to where graphs read them. Returns whether the state was replaced.

        load_state_dict() replaces groups and state: the graphs' tensors are then no longer the optimizer's.
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
            optimizer._step_supports_amp_scaling = True  # as in its constructor
        for parameter, state in optimizer.state.items():
            step = state.get("step") if isinstance(state, dict) else None
            if isinstance(step, Tensor) and step.device != parameter.device:
                state["step"] = step.to(parameter.device, torch.float32)


def settle_on_cpu(optimizer: Optimizer) -> None:
    """A state saved on a GPU says capturable, which no optimizer takes for parameters on a CPU."""
    for group in (*optimizer.param_groups, optimizer.defaults):
        if group.get("capturable"):
            group["capturable"] = False


def _can_fuse(optimizer: Optimizer) -> bool:
    """SGD takes a rate from the device only in fused form (of DTensors: shards.py); Adam is fused unless foreach was
    requested."""
    asked = any(group.get("foreach") for group in optimizer.param_groups)
    return isinstance(optimizer, SGD) or (isinstance(optimizer, Adam) and not asked)


def why_not(optimizer: Optimizer, scaled: bool) -> str:
    """Why steps of this optimizer cannot be captured, with or without a GradScaler; "" if they can."""
    name = type(optimizer).__name__
    if scaled and not _can_fuse(optimizer) and not getattr(optimizer, "_step_supports_amp_scaling", False):
        return f"a GradScaler asks the host whether {name} may step: use AdamW, Adam or SGD, without foreach=True"
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return f"{name}(differentiable=True) builds a graph of the update"
        if "capturable" not in group and not isinstance(optimizer, SGD):
            keeps = "keeps state" if name in KEEP_STATE else "reads its rates"
            return f"{name} {keeps} on the host and has no capturable form: AdamW, Adam, SGD and others have"
    return ""


def is_by_parameter(optimizer: Optimizer) -> bool:
    """Whether a step of some parameters, then one of the others, equals one of all: of PyTorch's own optimizers, and if
    nobody is told of steps."""
    known = type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS)
    told = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    return known and not any(told)


def check(optimizer: Any, trained: list[Tensor]) -> None:
    """Raises TypeError or ValueError if it is not a usable optimizer, or updates parameters that the model lacks."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"ark: train.capture: optimizer is a {type(optimizer).__name__}: pass an optimizer of torch.optim."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "ark: train.capture: optimizer is an LBFGS, which evaluates the loss as often as it likes: a captured step "
            "has one forward and backward pass; use AdamW, Adam or SGD."
        )
    if _needs_closure(optimizer):
        raise ValueError(
            f"ark: train.capture: optimizer is a {type(optimizer).__name__}, whose step() needs a closure: a captured "
            "step has one forward and backward pass; use AdamW, Adam or SGD."
        )
    known = {id(parameter) for parameter in trained}
    strangers = sum(p.requires_grad and id(p) not in known for g in optimizer.param_groups for p in g["params"])
    if strangers:
        raise ValueError(
            f"ark: train.capture: optimizer updates {strangers} parameters that model does not have: make it with the "
            "parameters of the model that is passed, after any fully_shard or parallelize_module."
        )


def _needs_closure(optimizer: Optimizer) -> bool:
    """Whether step() has an argument without a default. The class's: a scheduler wraps the optimizer's own."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())
    return any(one.default is inspect.Parameter.empty and one.kind in positional for one in parameters[1:])


Numbers = tuple[tuple[tuple[str, Any], ...], ...]


def numbers(optimizer: Optimizer, scaler: Any = None) -> Numbers:
    """The options that a graph bakes in, by group, and the scaler's: all except parameters and rates that are
    tensors."""
    names = [name for name in optimizer.defaults if name != "params"]
    by_group = tuple(
        tuple((f"optimizer's {name}", group[name]) for name in names if _plain(group.get(name)))
        for group in optimizer.param_groups
    )
    if scaler is None or not scaler.is_enabled():
        return by_group
    return (*by_group, of_scaler(scaler))


def of_scaler(scaler: Any) -> tuple[tuple[str, Any], ...]:
    """The options of an enabled GradScaler."""
    names = ("growth_factor", "backoff_factor", "growth_interval")
    return tuple((f"scaler's {name}", getattr(scaler, f"get_{name}")()) for name in names)


def changed(before: Numbers, now: Numbers) -> str:
    """A sentence about the first option that differs; "" if none does."""
    for one, other in zip(before, now, strict=False):
        earlier = dict(one)
        for name, value in other:
            if earlier.get(name) != value:
                hint = ", as with cycle_momentum=False" if name.endswith(("betas", "momentum")) else ""
                return (
                    f"the {name} changed from {earlier.get(name)!r} to {value!r}, and each value needs a graph of its "
                    f"own: keep it{hint}"
                )
    return ""


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, tuple))
