"""The dispatch that is measured when a group first uses CUDA tensors on GPUs that the built-in one was not made for.

On the pretended device groups and their agreement are real, and the figures are the test's: one-shot all_reduces win up
to 32 KB, and the copy engine from 32 MB.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.groups import ark_only
from support.launcher import Job, run_ranks
from support.pretended.groups import begin, on_rank
from support.rank import Rank

from ark_torch import _C
from ark_torch.distributed import first_use
from ark_torch.tools import _tune_cuda
from ark_torch.tools._tune_timers import call_of

pytestmark = [ark_only]

MODEL = "Pretended GPU"
FOUND = {"one_shot_to": 32 << 10, "copy_engine_from": 32 << 20}
KEPT = FOUND | {"step_copy_engine_from": 2**64 - 1}  # captured steps have no copy engines that were not measured
made: list[str] = []  # the candidates that this rank has timed


class _Timer:
    """Runs one operation of the candidate; its figures are the test's."""

    def __init__(self, together: Any, backend: Any, operation: str, tensors: Any) -> None:
        self._numbers = backend.options.cuda_dispatch[0][1]
        made.append(operation)
        call_of(operation, backend, *tensors, together.ranks)()

    def prepare(self, size: int) -> None:
        self._size = size

    def microseconds(self, products: Any = None) -> float:
        wins = {"one_shot_to": self._size <= FOUND["one_shot_to"], "engine": self._size >= FOUND["copy_engine_from"]}
        if self._size <= 2 << 20:
            return 1.0 if (self._numbers["one_shot_to"] >= self._size) == wins["one_shot_to"] else 9.0
        return 1.0 if (self._numbers["copy_engine_from"] <= self._size) == wins["engine"] else 9.0

    def whole(self) -> float:
        return self.microseconds()

    def close(self) -> None:
        pass


class _Products:
    def last(self, microseconds: float) -> None:
        assert microseconds > 0


def _prepare(rank: Rank, model: str = MODEL) -> None:
    """The parts of a measurement that need a GPU are the test's own."""

    @contextlib.contextmanager
    def own_stream(device: int) -> Iterator[None]:
        assert device == rank.rank
        yield

    of = {field.name: field for field in _tune_cuda.FIELDS}
    parts: dict[Any, dict[str, Any]] = {
        first_use: {
            "model_of": lambda device: model,
            "why_not": lambda device: "",
            "own_stream": own_stream,
            "fields_of": lambda *_: [of["one_shot_to"], of["copy_engine_from"]],
        },
        _tune_cuda: {
            "random_tensors": lambda size: [on_rank(rank, torch.ones(4096)) for _ in range(2)],
            "Timer": _Timer,
            "Products": _Products,
        },
    }
    for module, by_name in parts.items():
        for name, part in by_name.items():
            setattr(module, name, part)


def _cuda(group: Any) -> Any:
    return group._get_backend(torch.device("cuda"))


def _use(rank: Rank, group: Any) -> dict[str, int]:
    """The group's first operation; returns the dispatch that the ranks agreed on."""
    dist.all_reduce(on_rank(rank, torch.ones(8)), group=group)
    numbers: dict[str, int] = _cuda(group).cuda_dispatch
    return numbers


def _environment(pretended_gpu: dict[str, str | None], cache: Path, **more: str) -> dict[str, str | None]:
    return {**pretended_gpu, "ARK_CACHE": str(cache), **more}


def _first(rank: Rank, others: int) -> int:
    group, _, lines = begin(rank)
    _prepare(rank)
    assert _cuda(group).cuda_dispatch == {}
    built_in = _C._default_cuda_dispatch(rank.world_size)
    assert _use(rank, group) == built_in | KEPT != built_in
    told = lines.about("dispatch for")
    assert len(told) == (rank.rank == 0), lines.lines
    for line in told:
        assert f"dispatch for {rank.world_size} x {MODEL}: measured in " in line and "one_shot_to 32 KB" in line, line
    timed = len(made)
    assert timed == 4, made
    # Another group of as many ranks does not measure again, whoever its rank 0 is.
    ranks = list(range(rank.world_size))[::-1]
    assert _use(rank, dist.new_group(ranks)) == built_in | KEPT
    assert len(made) == timed
    x = torch.ones(4)
    dist.all_reduce(x, group=group)
    assert x[0].item() == rank.world_size
    return timed


def _later(rank: Rank, others: int) -> None:
    group, _, lines = begin(rank)
    _prepare(rank)
    assert _use(rank, group) == _C._default_cuda_dispatch(rank.world_size) | KEPT
    assert not made and not lines.about("dispatch for")


@pytest.mark.by_day("2")
@pytest.mark.parametrize("ranks", [2, 3])
def test_it_is_measured_once_and_kept(pretended_gpu: Any, tmp_path: Path, ranks: int) -> None:
    env = _environment(pretended_gpu, tmp_path)
    run_ranks(_first, ranks, 0, env=env)
    (path,) = (tmp_path / "dispatch").glob("*.json")
    table = json.loads(path.read_text())
    assert table["model"] == MODEL and table["cuda"] == [{"max_ranks": ranks, **FOUND}]
    assert path.stat().st_mode & 0o077 == 0
    run_ranks(_later, ranks, 0, env=env)


def _untouched(rank: Rank, model: str, rule: bool) -> None:
    options = {"cuda_dispatch": [(2, {"one_shot_to": 4096})]} if rule else {}
    group, _, lines = begin(rank, **options)
    _prepare(rank, model)
    expected = _C._default_cuda_dispatch(2) | ({"one_shot_to": 4096} if rule else {})
    assert _use(rank, group) == expected
    assert not made and not lines.about("dispatch for")


@pytest.mark.by_day("known", "rule")
@pytest.mark.parametrize("why", ["known", "off", "rule"])
def test_it_is_not_measured(pretended_gpu: Any, tmp_path: Path, why: str) -> None:
    env = _environment(pretended_gpu, tmp_path, **({"ARK_TUNE": "0"} if why == "off" else {}))
    run_ranks(_untouched, 2, "NVIDIA H200" if why == "known" else MODEL, why == "rule", env=env)
    assert not (tmp_path / "dispatch").exists()


def _failing(rank: Rank, who: int, kind: str) -> None:
    group, _, lines = begin(rank)
    _prepare(rank)
    if rank.rank == who and kind == "cannot":
        first_use.why_not = lambda device: "7 MB of GPU memory are free"
    elif rank.rank == who:
        setattr(_Timer, "prepare", lambda *_: 1 / 0)  # noqa: B010
    built_in = _C._default_cuda_dispatch(rank.world_size)
    assert _use(rank, group) == built_in
    told = lines.about("dispatch for")
    assert len(told) == (rank.rank == 0), lines.lines
    assert all("not measured (" in line and "the built-in one is used" in line for line in told), told
    assert _use(rank, dist.new_group()) == built_in
    assert len(lines.about("dispatch for")) == len(told), "told once"


@pytest.mark.by_day("0-cannot", "1-raises")
@pytest.mark.parametrize("kind", ["cannot", "raises"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_fails_leaves_the_built_in_one(pretended_gpu: Any, tmp_path: Path, who: int, kind: str) -> None:
    run_ranks(_failing, 2, who, kind, env=_environment(pretended_gpu, tmp_path))
    assert not list(tmp_path.glob("dispatch/*")), "the next process tries again"


def _dying(rank: Rank) -> str:
    group, _, _ = begin(rank)
    _prepare(rank)
    if rank.rank == 1:
        setattr(_Timer, "prepare", lambda *_: os.kill(os.getpid(), signal.SIGKILL))  # noqa: B010
    with pytest.raises(RuntimeError) as error:
        _use(rank, group)
    return str(error.value)


def test_a_rank_that_dies_meanwhile_is_named(pretended_gpu: Any, tmp_path: Path) -> None:
    with Job(_dying, 2, env=_environment(pretended_gpu, tmp_path)) as job:
        first, _ = job.finish(60)
        assert first.kind == "result" and "rank 1" in first.value, first


class _Alone:
    """One rank, without groups (Together)."""

    ranks = 2

    def group(self, numbers: dict[str, int], fast: bool) -> Any:
        return numbers

    def close(self, backend: Any) -> None:
        pass

    def slowest(self, values: Any) -> list[float]:
        return list(values)


@pytest.mark.quick
def test_it_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field whose sizes are not all measured keeps its built-in number."""
    sizes = [0]
    clock = [0.0]

    class Slow:
        def __init__(self, *_: Any) -> None:
            pass

        def prepare(self, size: int) -> None:
            sizes[0] += 1
            clock[0] += 0.4

        def microseconds(self, products: Any = None) -> float:
            return 1.0

        def close(self) -> None:
            pass

    monkeypatch.setattr(_tune_cuda, "Timer", Slow)
    monkeypatch.setattr(first_use, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    one = _tune_cuda.Field("one_shot_to", True, False, (1, 2, 3))
    two = _tune_cuda.Field("chunks_from", False, False, (1, 2, 3))
    numbers = first_use.search(_Alone(), [one, two, two], [], 0.0)
    assert set(numbers) == {"one_shot_to"}
    assert sizes[0] * 0.4 <= first_use.BUDGET_S + 0.8, "two candidates of one size"


@pytest.mark.quick
def test_lines_for_people() -> None:
    assert first_use._shown(_tune_cuda.NEVER) == "never"
    assert first_use._shown(24 << 20) == "24 MB" and first_use._shown(8 << 10) == "8 KB"
