"""Compares plans of a decoder's layer on this GPU (`ark tune --costs`): with measured costs, and with cache policies.

Measured costs are kept only if plans made with them are no slower than those made with the built-in ones, since a plan
depends on more than its costs: figures of few rows by a decoding step, figures of tiles by a prompt. For CacheCosts of
csrc/compiler/schedule/plan.hpp each candidate has one constant changed, and runs decoding steps of more weights than
the second-level cache holds, and of half as many. What gains is kept; several together are measured once more, as they
may get into each other's way. All take turns, each as a CUDA graph, in one process with the same weights.
"""

from __future__ import annotations

import itertools
import statistics
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ark_torch import _cost_files
from ark_torch.compile import backend, costs, options

WORTH = 1.01  # how many times as fast a candidate must be
TURNS, CALLS = 12, 10
Step = Callable[[], Any]


@dataclass(frozen=True)
class Shape:
    dim: int
    inner: int
    context: int
    heads: int = 0  # 0: of 128
    rows: int = 1  # positions at once

    @classmethod
    def large(cls) -> Shape:
        """400 MB of weights, 32 MB of keys and values."""
        return cls(4096, 14336, 8192)

    @classmethod
    def prompt(cls) -> Shape:
        return cls(2048, 8192, 512, rows=512)

    @classmethod
    def near(cls, cache_bytes: int) -> Shape:
        """Weights of half the cache: 21.5 bytes times the dimension's square."""
        dim = max(256, int((cache_bytes / 2 / 21.5) ** 0.5) // 256 * 256)
        return cls(dim, dim * 11 // 4 // 64 * 64, 256)


class Layer(nn.Module):
    """A decoder's layer, with its cache of keys and values."""

    keys: Tensor
    values: Tensor
    positions: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads or shape.dim // 128
        self.size = shape.dim // self.heads
        few = max(1, self.heads // 4) * self.size
        self.query, self.out = (nn.Linear(shape.dim, shape.dim, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(shape.dim, few, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(shape.dim, shape.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.inner, shape.dim, bias=False)
        self.first, self.second = nn.RMSNorm(shape.dim), nn.RMSNorm(shape.dim)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, few // self.size, shape.context, self.size))
        self.register_buffer("positions", torch.arange(shape.context))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        h = self.first(x)
        q, k, v = (w(h).view(*x.shape[:2], -1, self.size).transpose(1, 2) for w in (self.query, self.key, self.value))
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        mask = (self.positions[None, :] <= position[:, None])[None, None]
        a = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask, enable_gqa=True)
        x = x + self.out(a.transpose(1, 2).reshape(x.shape))
        h = self.second(x)
        result: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return result


def candidates(cache_bytes: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """By name: which step shows it, and what is changed."""
    return {
        "keep a fifth": ("large", {"kept_bytes": cache_bytes // 5}),
        "keep half": ("large", {"kept_bytes": cache_bytes // 2}),
        "states first": ("large", {"states_first": True}),
        "reused last": ("large", {"reused_last": True}),
        "plain where near": ("near", {"plain_where_near": True}),
    }


def decide(plain: Mapping[str, float], times: Mapping[str, float], cache_bytes: int) -> dict[str, Any]:
    """What gains: of two candidates with the same constant the better. `plain`: the times of the two steps without any
    change; `times`: of the candidates."""
    best: dict[str, tuple[float, Any]] = {}
    for name, (step, change) in candidates(cache_bytes).items():
        ((constant, value),) = change.items()
        gain = plain[step] / times[name]
        if gain >= WORTH and gain > best.get(constant, (0.0, None))[0]:
            best[constant] = gain, value
    return {constant: value for constant, (_, value) in best.items()}


class Steps:
    """Layers by name, compiled with any figures and any CacheCosts."""

    def __init__(self, device: torch.device, shapes: Mapping[str, Shape], dtype: torch.dtype) -> None:
        self.device = device
        torch.manual_seed(0)
        self._models = {name: self._model(shape, dtype) for name, shape in shapes.items()}

    @torch.no_grad()
    def _model(self, shape: Shape, dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
        with self.device:
            model = Layer(shape).to(dtype).requires_grad_(False).eval()
            x = torch.randn(1, shape.rows, shape.dim, dtype=dtype)
            return model, (x, torch.arange(shape.context - shape.rows, shape.context))

    @torch.no_grad()
    def compiled(self, step: str, caches: Mapping[str, Any], figures: Mapping[str, float]) -> Step:
        """On a GPU a CUDA graph's replay."""
        model, inputs = self._models[step]
        chosen = options.parse(None, {"choose": "ark", "fallback": False})
        # torch._dynamo knows functions by their code: a copy is another one, compiled anew beside the earlier ones.
        own = types.FunctionType(Layer.forward.__code__.replace(), Layer.forward.__globals__)
        with costs.instead(_cost_files.Record(figures, caches, "just now")):
            call = torch.compile(
                types.MethodType(own, model), backend=lambda g, x: backend.compile_graph(g, x, chosen), dynamic=False
            )
            call(*inputs)
        return self._captured(lambda: call(*inputs))

    def _captured(self, step: Step) -> Step:
        if self.device.type != "cuda":
            return step
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            step()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()

        def replay(_alive: Step = step) -> None:
            graph.replay()

        return replay

    def in_turns(self, steps: Mapping[str, Step], turns: int) -> dict[str, float]:
        """Median microseconds of each."""
        taken: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(turns + 1):
            for name, step in steps.items():
                times = self._times(step)
                taken[name] += times if turn > 0 else []  # the first turn fills caches
        return {name: statistics.median(times) for name, times in taken.items()}

    def _times(self, step: Step) -> list[float]:
        if self.device.type != "cuda":
            times = []
            for _ in range(CALLS):
                begin = time.perf_counter()
                step()
                times.append((time.perf_counter() - begin) * 1e6)
            return times
        events = [torch.cuda.Event(enable_timing=True) for _ in range(CALLS + 1)]  # type: ignore[no-untyped-call]
        for event in events[:-1]:
            event.record()
            step()
        events[-1].record()
        torch.cuda.synchronize(self.device)
        return [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events[1:])]


def kept(
    steps: Steps, measured: Mapping[str, float], say: Callable[[str], None], turns: int = TURNS
) -> dict[str, float]:
    """Those of the measured figures with which plans are no slower than with the built-in ones."""
    found: dict[str, float] = {}
    for step, of_tiles in (("large", False), ("prompt", True)):
        own = {name: value for name, value in measured.items() if name.startswith("tile_") == of_tiles}
        if not own:
            continue
        run = {"without": steps.compiled(step, {}, found), "with": steps.compiled(step, {}, {**found, **own})}
        with torch.no_grad():
            times = steps.in_turns(run, turns)
        good = times["with"] <= WORTH * times["without"]
        what = "a prompt" if of_tiles else "a decoding step"
        told = "" if good else ": slower, so the built-in ones stay"
        say(f"{what + ', costs':<26} {times['without']:>9.1f} us without, {times['with']:>9.1f} us with{told}")
        found |= own if good else {}
    return found


def measure(
    steps: Steps, cache_bytes: int, figures: Mapping[str, float], say: Callable[[str], None], turns: int = TURNS
) -> dict[str, Any]:
    """CacheCosts' fields that gain on this machine. `figures`: what plans are made with besides."""
    run = {step: steps.compiled(step, {}, figures) for step in ("large", "near")}
    run |= {name: steps.compiled(step, change, figures) for name, (step, change) in candidates(cache_bytes).items()}
    with torch.no_grad():
        times = steps.in_turns(run, turns)
    for name, (step, _) in candidates(cache_bytes).items():
        say(f"{name:<26} {times[step]:>9.1f} us without, {times[name]:>9.1f} us with")
    gains = decide(times, times, cache_bytes)
    on_large = {constant: value for constant, value in gains.items() if constant != "plain_where_near"}
    if len(on_large) < 2:
        return gains
    together = steps.compiled("large", on_large, figures)
    with torch.no_grad():
        again = steps.in_turns({"plain": run["large"], "together": together}, turns)
    say(f"{'together':<26} {again['plain']:>9.1f} us without, {again['together']:>9.1f} us with")
    if again["plain"] / again["together"] >= WORTH:
        return gains
    return {constant: value for constant, value in gains.items() if constant not in on_large}
