"""CUDA graphs: every collective captured and replayed, several per graph, alternating graphs, graphs and eager calls.

Inputs change between replays, so that a replay that did nothing is detected.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from on_gpu import WORLD, run, same, start, sum_of_ranks
from support.rank import Rank
from support.reference import make_input

WORLDS = sorted({1, WORLD})
COUNTS = (5, 4096, 70_001, 3 << 20)


class Case:
    """One collective on fixed tensors: on the device for the capture, on the host for the expected result."""

    def __init__(self, name: str, count: int, rank: Rank, device: torch.device, dtype: torch.dtype) -> None:
        world = rank.world_size
        wide = name in ("reduce_scatter_tensor", "all_to_all_single")
        self.name, self.rank, self.count, self.dtype = name, rank, count * world if wide else count, dtype
        out = count * world if name == "all_gather_into_tensor" else count if name == "reduce_scatter_tensor" else 0
        out = count * world if name == "all_to_all_single" else out
        self.input = torch.zeros(self.count, dtype=dtype, device=device)
        self.output = torch.zeros(out, dtype=dtype, device=device) if out else self.input

    def issue(self, given: torch.Tensor, output: torch.Tensor, asynchronous: bool = False) -> None:
        root = self.rank.world_size - 1
        call: Callable[[], dist.Work | None] = {
            "all_reduce": lambda: dist.all_reduce(given, async_op=asynchronous),
            "broadcast": lambda: dist.broadcast(given, root, async_op=asynchronous),
            "reduce": lambda: dist.reduce(given, root, async_op=asynchronous),
            "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(output, given, async_op=asynchronous),
            "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(output, given, async_op=asynchronous),
            "all_to_all_single": lambda: dist.all_to_all_single(output, given, async_op=asynchronous),
        }[self.name]
        work = call()
        if asynchronous and work is not None:
            work.wait()

    def set(self, seed: int) -> None:
        self.values = make_input(self.dtype, self.count, seed, self.rank.rank)
        self.input.copy_(self.values)
        if self.output is not self.input:
            self.output.fill_(float("nan") if self.dtype.is_floating_point else -1)

    def check(self, what: str) -> None:
        expected = self.values.clone()
        output = expected if self.output is self.input else torch.empty(self.output.shape, dtype=self.dtype)
        self.issue(expected, output)
        same(self.output, output, f"{self.name} {self.count} {self.dtype}, {what}")


NAMES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
)


def _capture(cases: list[Case], asynchronous: bool = False) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for case in cases:
            case.issue(case.input, case.output, asynchronous)
    return graph


def _each(rank: Rank, name: str) -> None:
    device = start(rank)
    dist.all_reduce(torch.ones(1, device=device))
    for count in COUNTS:
        for dtype in (torch.float32, torch.bfloat16):
            for asynchronous in (False, True):
                case = Case(name, count, rank, device, dtype)
                graph = _capture([case], asynchronous)
                for replay in range(5):
                    case.set(replay)
                    graph.replay()
                    case.check(f"async {asynchronous}, replay {replay}")


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", NAMES)
def test_each_collective(name: str, world: int) -> None:
    run(_each, name, world=world)


def _several(rank: Rank) -> None:
    """All collectives in one graph, two such graphs alternately, and eager calls between them on the same stream."""
    device = start(rank)
    dist.all_reduce(torch.ones(1, device=device))
    sets = [[Case(name, count, rank, device, torch.float32) for name in NAMES] for count in (1000, 40_000)]
    graphs = [_capture(cases, asynchronous=index == 1) for index, cases in enumerate(sets)]
    eager = torch.zeros(2000, device=device)
    for step in range(20):
        cases = sets[step % 2]
        for case in cases:
            case.set(step)
        eager.fill_(float(rank.rank + 1))
        graphs[step % 2].replay()
        dist.all_reduce(eager)
        graphs[step % 2].replay() if step % 5 == 4 else None
        same(eager, torch.full((2000,), sum_of_ranks(rank.world_size)), f"eager beside graphs, step {step}")
        if step % 5 != 4:
            for case in cases:
                case.check(f"step {step}")


@pytest.mark.parametrize("world", WORLDS)
def test_several_in_a_graph_two_graphs_and_eager(world: int) -> None:
    run(_several, world=world)


def _long_chain(rank: Rank) -> float:
    """A thousand all-reduces per graph, replayed without a pause: this needs counters, not constants."""
    device = start(rank)
    tensor = torch.ones(4096, device=device)
    dist.all_reduce(tensor)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(1000):
            dist.all_reduce(tensor, dist.ReduceOp.AVG)
            tensor += 1
    tensor.fill_(float(rank.rank))
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    assert tensor.unique().numel() == 1
    return tensor[0].item()


def test_long_chain() -> None:
    values = run(_long_chain)
    assert values == [5000 + (WORLD - 1) / 2] * WORLD


def _first_use(rank: Rank) -> str:
    device = start(rank)
    tensor = torch.ones(8, device=device)
    graph = torch.cuda.CUDAGraph()
    message = ""
    try:
        with torch.cuda.graph(graph):
            tensor += 1
            try:
                dist.all_reduce(tensor)
            except ValueError as error:
                message = str(error)
    except RuntimeError as error:
        raise AssertionError("the capture itself survives the refusal") from error
    dist.all_reduce(tensor)
    assert tensor.tolist() == [rank.world_size] * 8
    return message


def test_the_first_operation_cannot_be_captured() -> None:
    for message in run(_first_use):
        assert "under graph capture" in message and "before the capture begins" in message, message


def _kernels_first_met_under_capture(rank: Rank) -> None:
    """A dtype, operation and size that no eager call has used before."""
    device = start(rank)
    dist.all_reduce(torch.ones(1, device=device))
    case = Case("reduce_scatter_tensor", 3000, rank, device, torch.float16)
    graph = _capture([case])
    case.set(1)
    graph.replay()
    case.check("first met under capture")


def test_kernels_first_met_under_capture() -> None:
    run(_kernels_first_met_under_capture, own=True)


def _waits_refused(rank: Rank) -> str:
    device = start(rank)
    tensor = torch.ones(8, device=device)
    dist.all_reduce(tensor)
    work = dist.all_reduce(tensor, async_op=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor += 1
        try:
            work.wait()
            message = ""
        except ValueError as error:
            message = str(error)
    work.wait()
    return message


def test_an_eager_work_cannot_be_waited_for_in_a_capture() -> None:
    assert all("before capture begins" in message for message in run(_waits_refused))
