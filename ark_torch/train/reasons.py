"""Why a step cannot be captured, in one sentence: the operator and the line of the user's code.

A capture enables PyTorch's check for operators that make the host wait: they raise before they break the capture, and
the traceback leads to the line. State that a graph would silently repeat (host random numbers, attributes that count
steps) is found by comparing host state before and after an eager step.
"""

from __future__ import annotations

import dis
import linecache
import os
import random
import re
import sys
import traceback
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ark_torch.train import backward

# Folders of code that is not the user's: the innermost frame outside of them is reported.
NOT_THE_USERS = (str(Path(__file__).parent) + os.sep, str(Path(torch.__file__).parent) + os.sep)

NOTES = ("_opt_called", "_step_count")  # what schedulers write into an optimizer
OF_MODULES = frozenset(nn.Module().__dict__) - {"training"}  # PyTorch's own attributes of every module
CONTAINERS = (list, tuple, set, frozenset, deque, dict)
STAGE = re.compile(r"[Ff]ailed to run (stage backward|forward)")
MOST = 10_000  # elements of a container that are compared


def is_plain(value: Any) -> bool:
    """Whether a value can be compared and kept: a number, a string, or a tuple of such."""
    return isinstance(value, (bool, int, float, str)) or (isinstance(value, tuple) and all(map(is_plain, value)))


def of(error: BaseException) -> str:
    """The reason for a failed capture."""
    node = backward.of(error)
    error = _within_a_stage(error)
    where, text = place(error), str(error).strip().partition("\n")[0]
    waits = "synchronizing CUDA operation" in text
    if waits and not where and node is not None and node.checks_nan:
        return (
            "torch.autograd.detect_anomaly() looks for NaN behind each operator of the backward pass, which makes the "
            "host wait: leave it, or pass check_nan=False"
        )
    at = _at(where, node)
    if _raised_by_the_user(error):
        line = where.rpartition(" at ")[2]
        return f"the step itself raised {type(error).__name__}({text}) at {line} while it was captured"
    if isinstance(error, torch.OutOfMemoryError):
        return f"the GPU's memory did not suffice for the capture ({text})"
    if waits:
        return f"{at}makes the host wait for the GPU's result, which a graph cannot: keep it out of the step"
    if "captur" in text.lower():
        return f"{at}calls what CUDA forbids during a capture ({text})"
    return f"{at}raised {type(error).__name__}: {text}"


def _within_a_stage(error: BaseException) -> BaseException:
    """The error itself, where torch.distributed.pipelining raised one of its own on top of it."""
    while isinstance(error.__cause__, Exception) and STAGE.search(str(error)):
        error = error.__cause__
    return error


def _at(where: str, node: backward.Node | None) -> str:
    """The subject of the sentence: what raised."""
    if where:
        return f"{where} " + (f"in the backward pass ({node.name}) " if node is not None else "")
    if node is None:
        return "the step "
    for file, line in reversed(node.frames):
        if _of_the_user(file):
            of_forward = f"`{linecache.getline(file, line).strip() or '?'}` at {os.path.basename(file)}:{line}"
            return f"{node.name}, the backward pass of {of_forward}, "
    return f"{node.name} in the backward pass "


def place(error: BaseException) -> str:
    """The innermost expression of the user's code, with file and line; "" if the trace shows none."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if _of_the_user(frame.filename):
            return f"`{_expression(frame)}` at {os.path.basename(frame.filename)}:{frame.lineno}"
    return ""


def _raised_by_the_user(error: BaseException) -> bool:
    """Whether a raise or an assert of the user's code raised the error, not an operator that it called."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not _of_the_user(trace.tb_frame.f_code.co_filename):
        return False
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"


def _of_the_user(filename: str) -> bool:
    return not filename.startswith("<") and not os.path.abspath(filename).startswith(NOT_THE_USERS)


def _expression(frame: traceback.FrameSummary) -> str:
    """The evaluated expression (Python 3.11 and later), else the whole line."""
    line = (frame.line or "?").strip()
    begin, end = getattr(frame, "colno", None), getattr(frame, "end_colno", None)
    if begin is None or end is None or getattr(frame, "end_lineno", frame.lineno) != frame.lineno:
        return line
    whole = linecache.getline(frame.filename, frame.lineno or 0)  # columns are byte offsets in the whole line
    part = whole.encode()[begin:end].decode(errors="replace").strip()
    return part or line


class HostState:
    """Host state that a step may have changed; a graph would repeat the old state."""

    def __init__(self, module: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
        self._module, self._optimizer = module, optimizer
        self._random = _random_states(device)
        self._attributes = _attributes(module)
        self._buffers = dict(module.named_buffers())
        self._of_optimizer = _numbers(optimizer)
        self._states = _tensors(optimizer)

    def changed(self, device: torch.device) -> str:
        """A sentence about a difference from now; "" if there is none."""
        for name, (before, after) in _pairs(self._random, _random_states(device)):
            if before != after:
                return f"the step draws random numbers on the host ({name}), which a graph would repeat"
        for name, (before, after) in _pairs(self._attributes, _attributes(self._module)):
            if before is not after and before != after:
                changes = f"from {before!r} to {after!r}" if repr(before) != repr(after) else f"({before!r})"
                return f"the step changes the model's {name!r} {changes}, which a graph would not"
        for name, (buffer, other) in _pairs(self._buffers, dict(self._module.named_buffers())):
            if buffer is not other:
                return (
                    f"the step puts another tensor in the place of the model's buffer {name!r}, which a graph would "
                    "not: fill it in place, as by copy_()"
                )
        for name, (before, after) in _pairs(self._of_optimizer, _numbers(self._optimizer)):
            if before != after:
                kind = type(self._optimizer).__name__
                return f"{kind} changes its {name} from {before!r} to {after!r} on the host, which a graph would not"
        for name, (tensor, other) in _pairs(self._states, _tensors(self._optimizer)):
            if tensor is not other:
                kind = type(self._optimizer).__name__
                return f"{kind} puts another tensor in the place of its {name}, which a graph would not"
        return ""


def _pairs(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, tuple[Any, Any]]]:
    return [(name, (value, after[name])) for name, value in before.items() if name in after]


def _random_states(device: torch.device) -> dict[str, Any]:
    states: dict[str, Any] = {"random": random.getstate()}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy.random"] = (kind, keys.tobytes(), *rest)
    if device.type == "cuda":
        states["torch's CPU generator"] = bytes(torch.get_rng_state().numpy())
    return states


@dataclass
class _Contents:
    """What a container of a module holds. Of what is not plain only the types count, since many modules keep their last
    outputs."""

    kind: str
    size: int
    inside: Any  # None: too many to compare

    @classmethod
    def of(cls, container: Any, depth: int = 0) -> _Contents:
        def kept(one: Any) -> Any:
            if isinstance(one, CONTAINERS) and not is_plain(one) and depth < 4:
                return cls.of(one, depth + 1)
            return one if is_plain(one) or one is None else type(one).__name__

        inside: Any = None
        if len(container) <= MOST:
            if isinstance(container, dict):
                inside = {kept(key) if is_plain(key) else id(key): kept(one) for key, one in container.items()}
            elif isinstance(container, (set, frozenset)):
                inside = {one for one in container if is_plain(one)}
            else:
                inside = list(map(kept, container))
        return cls(type(container).__name__, len(container), inside)

    def __repr__(self) -> str:
        return f"a {self.kind} of {self.size}"


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Numbers, strings and containers stored in modules, except their training mode."""
    return {
        f"{path}.{name}" if path else name: value if is_plain(value) else _Contents.of(value)
        for path, one in module.named_modules()
        for name, value in one.__dict__.items()
        if name not in OF_MODULES and name != "training" and (is_plain(value) or isinstance(value, CONTAINERS))
    }


def _numbers(optimizer: Optimizer) -> dict[str, Any]:
    """Numbers and strings stored in an optimizer, its groups and its states, except PyTorch's own notes."""
    found = {repr(name): value for name, value in optimizer.__dict__.items() if name not in NOTES}
    for number, group in enumerate(optimizer.param_groups):
        found |= {f"param_groups[{number}][{name!r}]": value for name, value in group.items() if name != "params"}
    for number, state in enumerate(optimizer.state.values()):
        if isinstance(state, dict):
            found |= {f"state[{number}][{name!r}]": value for name, value in state.items()}
    return {name: value for name, value in found.items() if isinstance(value, (bool, int, float, str, tuple))}


def _tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """The tensors of an optimizer's states."""
    return {
        f"state[{number}][{name!r}]": value
        for number, state in enumerate(optimizer.state.values())
        if isinstance(state, dict)
        for name, value in state.items()
        if isinstance(value, Tensor)
    }
