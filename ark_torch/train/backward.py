"""Tells which node of the backward pass raised during a capture, and where the forward pass made that node.

A node in C++ has no Python frames, so the traceback of its error does not lead to the user's code. PyTorch's anomaly
mode names the node of an error in a warning, which is taken here, and adds the traceback of the forward call if the
mode was on there, too. A traceback costs 0.2 ms per node, so only the first forward pass of a capture keeps them.
Anomaly mode without its check for NaN enqueues nothing, so graphs are the same.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

TOLD = "Error detected in "  # how PyTorch's warning begins
NAME = re.compile(TOLD + r"([\w:]+)\.")
FRAME = re.compile(r'^  File "(.+)", line (\d+), in ', re.MULTILINE)
INDUCED = "Previous calculation was induced by"  # then come the tracebacks of the nodes before it


@dataclass
class Node:
    """A node of the backward pass that raised."""

    name: str
    frames: list[tuple[str, int]]  # file and line of the forward call, the innermost last; empty: not known
    checks_nan: bool  # the user's anomaly mode looks at each gradient


def of(error: BaseException) -> Node | None:
    """The node that raised the error within Watch.backward()."""
    return getattr(error, "ark_node", None)


class Watch:
    """Watches the forward and backward passes of one capture."""

    def __init__(self) -> None:
        self._traced = False

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward pass."""
        if self._traced:
            yield
            return
        self._traced = True
        with self.backward():  # a loss may take gradients itself
            yield

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward pass."""
        checks_nan = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
        told: list[str] = []
        with _taken(told), torch.autograd.set_detect_anomaly(True, check_nan=checks_nan):
            try:
                yield
            except BaseException as error:
                if told and of(error) is None:
                    error.ark_node = _node(told[0], checks_nan)  # type: ignore[attr-defined]
                raise


@contextlib.contextmanager
def _taken(told: list[str]) -> Iterator[None]:
    """Takes the warnings of anomaly mode; others are shown as ever."""
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=TOLD, category=UserWarning)
        shown: Any = warnings.showwarning

        def show(message: Any, *rest: Any, **more: Any) -> None:
            if str(message).startswith(TOLD):
                told.append(str(message))
            else:
                shown(message, *rest, **more)

        warnings.showwarning = show
        yield


def _node(text: str, checks_nan: bool) -> Node:
    name = NAME.match(text)
    frames = [(file, int(line)) for file, line in FRAME.findall(text.partition(INDUCED)[0])]
    return Node(name[1].rpartition(":")[2] if name else "a node", frames, checks_nan)
