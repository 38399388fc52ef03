"""A recorder without a GPU. It keeps the step and runs it at each replay on fixed tensors, as a graph would.

Capturing executes nothing, as with CUDA, unless it must fail at the operator `refuses`: with `error`, or with PyTorch's
error for operators that make the host wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

import ark_torch.train.graphs
from ark_torch.train import reasons


class _Refusing(TorchDispatchMode):
    def __init__(self, operator: str, error: BaseException | None) -> None:
        super().__init__()
        self._operator, self._error = operator, error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._operator in str(func):
            raise self._error or RuntimeError("called a synchronizing CUDA operation")
        return func(*args, **(kwargs or {}))


class FakeRecording:
    def __init__(self, body: Callable[[], Any], counts: dict[str, int]) -> None:
        self._body, self._counts = body, counts

    def replay(self) -> None:
        self._counts["replays"] += 1
        self._body()

    def reset(self) -> None:
        self._counts["resets"] += 1


class FakeRecorder:
    stream = None

    def __init__(self, refuses: str = "", error: BaseException | None = None) -> None:
        self.counts = {"warm": 0, "records": 0, "replays": 0, "resets": 0}
        self.refuses, self.error = refuses, error

    def warm(self, body: Callable[[], Any]) -> Any:
        self.counts["warm"] += 1
        return body()

    def record(self, body: Callable[[], Any]) -> FakeRecording:
        self.counts["records"] += 1
        if self.refuses:
            with _Refusing(self.refuses, self.error):
                body()
            raise AssertionError(f"the step has no {self.refuses}")
        return FakeRecording(body, self.counts)


def use(recorder: FakeRecorder | None = None) -> FakeRecorder:
    """Replaces CUDA's recorder for steps captured from now on in this process."""
    recorder = recorder or FakeRecorder()
    reasons.NOT_THE_USERS = (*reasons.NOT_THE_USERS, __file__)
    ark_torch.train.graphs.recorder_for = lambda device: recorder  # type: ignore[assignment]
    return recorder
