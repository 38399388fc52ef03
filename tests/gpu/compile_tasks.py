"""`python compile_tasks.py [--planted] [--on-cpu]`: a small loop kernel for every kind of task, compared with the CPU.

It is for compute-sanitizer (test_sanitizer.py), so it is small and uses the GPU for nothing else. Every tensor has its
own memory (PYTORCH_NO_CUDA_MEMORY_CACHING=1). --planted: a loop kernel gets a tensor that claims more than its memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "compile"))

import models
import torch
import torch.nn.functional as F
from torch import Tensor

from ark_torch.compile import backend, options
from ark_torch.compile.report import Report

BF16, F32 = torch.bfloat16, torch.float32
Case = tuple[Callable[..., Any], list[Any]]


def product(rows: int, dtype: torch.dtype) -> Case:
    def call(x: Tensor, w: Tensor) -> Tensor:
        return F.silu(x @ w.t())

    return call, [torch.randn(rows, 136, dtype=dtype), torch.randn(200, 136, dtype=dtype) / 12]


def attention(queries: int, dtype: torch.dtype, masked: bool) -> Case:
    def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        chosen: dict[str, Any] = {"attn_mask": mask} if masked else {"is_causal": True}
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **chosen) * 2

    q = torch.randn(1, 4, queries, 64, dtype=dtype)
    keys = 90 if masked else queries
    k, v = (torch.randn(1, 2, keys, 64, dtype=dtype) for _ in "kv")
    return call, [q, k, v, torch.rand(queries, keys) < 0.8]


def module(made: Any, *given: Tensor) -> Case:
    made = made.eval().requires_grad_(False)
    parameters = list(made.parameters())

    def call(*arguments: Tensor) -> Any:
        names = [name for name, _ in made.named_parameters()]
        return torch.func.functional_call(made, dict(zip(names, arguments, strict=False)), arguments[len(names) :])

    return call, [*parameters, *given]


def cases() -> dict[str, Case]:
    index = torch.tensor([3, 0, 9, 9, 1])
    table, rows = torch.randn(10, 70), torch.randn(5, 70)
    return {
        "few rows": product(1, BF16),
        "few rows, float32": product(2, F32),
        "eight rows": product(8, BF16),
        "tiles": product(100, BF16),
        "tiles, float32": product(70, F32),
        "decoding": attention(1, BF16, True),
        "decoding, float32": attention(1, F32, True),
        "prompt": attention(40, BF16, False),
        "prompt, float32": attention(33, F32, False),
        "norms": (lambda x: F.layer_norm(x, (70,)).softmax(-1) + F.rms_norm(x, (70,)), [rows]),
        "columns": (lambda x: x.sum(0) + x.mean(), [table]),
        "gather": (lambda i, t: F.embedding(i, t) + t[i], [index, table]),
        "scatter": (lambda t, i, r: t.index_copy(0, i[:3], r[:3]) + t.index_add(0, i, r), [table, index, rows]),
        "order": (lambda t: (t.topk(3).values, t.sort(0).values, t.argmax(-1) + 1), [table]),
        "scan": (lambda t: t.cumsum(1) + t.cumsum(0), [table]),
        "bags": (lambda i, t, o: F.embedding_bag(i, t, o, mode="sum") * 2, [index, table, torch.tensor([0, 0, 3])]),
        "experts": module(models.Experts(64, 96), torch.randn(3, 64)),
        "fewer experts than rows": module(models.Experts(64, 96), torch.randn(6, 64)),
        "sorted experts": module(models.SortedExperts(64, 96).to(BF16), torch.randn(6, 64, dtype=BF16)),
        "a chain": (lambda x, w: (F.silu(x @ w) @ w + x).softmax(-1), [torch.randn(6, 96), torch.randn(96, 96) / 10]),
    }


def compiled(call: Callable[..., Any]) -> tuple[Any, Report]:
    report, parsed = Report(), options.parse(None, {"choose": "ark", "fallback": False, "minimum": 1})

    def run(graph_module: Any, example_inputs: Any) -> Any:
        return backend.compile_graph(graph_module, example_inputs, parsed, report)

    def called(*given: Any) -> Any:
        return call(*given)

    torch._dynamo.reset()
    return torch.compile(called, backend=run, dynamic=False), report


class Larger:
    """A tensor that claims so much more memory that no other tensor can occupy all of it."""

    def __init__(self, tensor: Tensor) -> None:
        shape = (1 << 26,)
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "<f4",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


def main() -> int:
    torch.manual_seed(0)
    device = torch.device("cpu" if "--on-cpu" in sys.argv else "cuda")
    with torch.no_grad():
        if "--planted" in sys.argv:
            small = torch.zeros(1024, device=device)
            call, _ = compiled(lambda x: x.relu() + 1)
            call(torch.as_tensor(Larger(small), device=device))
            torch.cuda.synchronize()
            return 0
        for name, (plain, given) in cases().items():
            wanted = plain(*given)
            call, report = compiled(plain)
            got = call(*[tensor.to(device) for tensor in given])
            for a, b in zip(*[(x,) if isinstance(x, Tensor) else x for x in (got, wanted)], strict=True):
                close = 2e-4 if b.dtype == F32 else 5e-2
                torch.testing.assert_close(
                    a.cpu(), b, rtol=close, atol=close, msg=lambda text, name=name: f"{name}: {text}"
                )
            assert [piece.runs_on for graph in report.graphs for piece in graph.pieces] == ["ark"], (name, str(report))
            print(f"right: {name}", flush=True)
    print("right: all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
