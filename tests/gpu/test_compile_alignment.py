"""Regions whose operands are aligned to 16 bytes in one call and not in the next, or begin elsewhere in an input."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ark_torch.compile import backend, options
from ark_torch.compile.report import Report

pytestmark = pytest.mark.timeout(120)


def few_rows(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    return F.linear(x, a), F.linear(x, b), F.linear(x, c)


def shared_by_many(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return tuple(F.linear(x, weight, weight[:, 0]) for weight in weights)


def norm_before(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    x = F.rms_norm(x, x.shape[-1:], eps=1e-6)
    return F.silu(F.linear(x, a)) * F.linear(x, b)


def experts(x: Tensor, table: Tensor, scores: Tensor) -> Tensor:
    chosen = table[scores.argmax(-1)]
    return (x.unsqueeze(1) @ chosen).squeeze(1)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


# A computation, and the shapes of its operands.
CASES: list[tuple[Callable[..., object], list[tuple[int, ...]]]] = [
    (few_rows, [(1, 512), (640, 512), (128, 512), (128, 512)]),
    (few_rows, [(8, 512), (640, 512), (128, 512), (128, 512)]),
    (few_rows, [(13, 256), (96, 256), (160, 256), (40, 256)]),
    (shared_by_many, [(2, 264), *[(48 + 8 * i, 264) for i in range(20)]]),
    (norm_before, [(2, 512), (320, 512), (320, 512)]),
    (norm_before, [(200, 512), (320, 512), (320, 512)]),
    (torch.matmul, [(4, 512), (512, 328)]),
    (torch.matmul, [(200, 128), (128, 264)]),
    (torch.matmul, [(3, 70, 72), (3, 72, 96)]),
    (torch.matmul, [(3, 2, 72), (3, 72, 96)]),
    (F.linear, [(384, 1024), (1024, 1024)]),
    (experts, [(6, 256), (8, 256, 136), (6, 8)]),
    (attention, [(1, 8, 1, 64), (1, 2, 200, 64), (1, 2, 200, 64)]),
    (attention, [(1, 2, 100, 64), (1, 2, 256, 64), (1, 2, 256, 64)]),
    (attention, [(1, 2, 40, 96), (1, 2, 77, 96), (1, 2, 77, 96)]),
]


@pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-5), (torch.bfloat16, 1.2e-2)])
def test_operands_anywhere(dtype: torch.dtype, close: float) -> None:
    """All aligned, then each in turn offset by one element: the same region, equal bits each time, close to float64."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    report = Report()

    def compiled(graph_module: object, example_inputs: object) -> object:
        return backend.compile_graph(graph_module, example_inputs, options.parse(None, {"choose": "ark"}), report)

    def drawn(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, dtype=dtype, device="cuda") / (shape[-1] ** 0.5 if len(shape) < 4 else 1)

    def behind(one: Tensor) -> Tensor:
        moved = one.new_empty(one.numel() + 1)[1:].view(one.shape)
        return moved.copy_(one)

    given = [[drawn(shape) for shape in shapes] for _, shapes in CASES]

    def all_of(given: list[list[Tensor]]) -> list[object]:
        return [case(*operands) for (case, _), operands in zip(CASES, given, strict=True)]

    call = torch.compile(all_of, backend=compiled, dynamic=False)
    wanted = all_of([[one.double() for one in operands] for operands in given])
    for odd in range(-1, max(len(shapes) for _, shapes in CASES)):
        now = [[behind(x) if i == odd else x for i, x in enumerate(operands)] for operands in given]
        with torch.no_grad():
            got, again = call(now), call(now)
        for (case, shapes), one, other, want in zip(CASES, got, again, wanted, strict=True):
            for x, y, z in zip(
                *((each if isinstance(each, tuple) else (each,)) for each in (one, other, want)), strict=True
            ):
                assert torch.equal(x, y), (case, shapes, odd)
                assert float((x - z).norm() / z.norm()) < close, (case, shapes, odd)
    (graph,) = report.graphs
    assert [piece.runs_on for piece in graph.pieces] == ["ark"], report


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_views_and_written_inputs(dtype: torch.dtype) -> None:
    """Views that begin elsewhere within an aligned input, for which functions have variants; an input that is written,
    and so copied and copied back."""
    torch.manual_seed(0)
    torch._dynamo.reset()

    def step(cache: Tensor, other: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        cache.add_(x[:, 1:8193])
        other.mul_(x[:, 8:8200])
        return F.linear(x[:, 2:514], weight[:, 1:513])

    report = Report()
    call = torch.compile(
        step,
        backend=lambda module, inputs: backend.compile_graph(
            module, inputs, options.parse(None, {"choose": "ark"}), report
        ),
        dynamic=False,
    )
    x, weight = (torch.randn(*shape, dtype=dtype, device="cuda") for shape in ((64, 8200), (96, 520)))
    for first in (0, 1):
        memory = torch.randn(2, 64 * 8192 + 2, dtype=dtype, device="cuda")
        wanted = memory.clone()
        with torch.no_grad():
            got = call(*(one[first : first + 64 * 8192].view(64, 8192) for one in memory), x, weight)
            want = step(*(one[first : first + 64 * 8192].view(64, 8192) for one in wanted), x, weight)
        assert torch.equal(memory, wanted), first
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-3)
    (graph,) = report.graphs
    assert [piece.runs_on for piece in graph.pieces] == ["ark"], report
