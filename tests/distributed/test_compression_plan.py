"""Plans of the hook: the same bits as without them, and none outlives what it was made from.

The oracle computes everything anew in each call: layers, widths, segments and residuals, from what the state says now.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from support.groups import ark_only
from support.launcher import run_ranks
from support.rank import Rank
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ark_torch.distributed import compression

pytestmark = [ark_only]


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    sizes = ((37, 65), (65, 64), (64, 64), (64, 41))
    return nn.Sequential(*(part for size in sizes for part in (nn.Linear(*size), nn.ReLU())))


class _Oracle:
    """A hook that lets the state's own hook answer, and demands the bits of an exchange without a plan."""

    def __init__(self, ddp: DDP, state: compression.State) -> None:
        self.state, self.residuals = state, dict[str, Tensor]()
        self.names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
        self.buckets: list[list[str]] = []  # of the current step
        self.widths: list[tuple[str, int]] = []
        ddp.register_comm_hook(None, self.hook)

    # DDP compares the annotations of a hook with its own.
    def hook(self, _, bucket):  # type: ignore[no-untyped-def]
        given = bucket.buffer().clone()
        parameters = bucket.parameters()
        names = [self.names[id(parameter)] for parameter in parameters]
        layers = {layer.name: layer for layer in self.state.layers}
        widths = [self._width(layers.get(name), parameter) for name, parameter in zip(names, parameters, strict=True)]
        if bucket.index() == 0:
            self.buckets, self.widths = [], []
        self.buckets.append(names)
        self.widths += zip(names, widths, strict=True)
        future = compression.hook(self.state, bucket)
        got = future.wait()
        assert torch.equal(got, self._exchanged(given, names, [p.numel() for p in parameters], widths)), names
        return future

    def _width(self, layer: Any, parameter: Tensor) -> int:
        if layer is not None:
            return self.state.width(layer)[0]
        return 0 if parameter.dim() == 1 else self.state.bits  # its first step

    def _exchanged(self, given: Tensor, names: list[str], numels: list[int], widths: list[int]) -> Tensor:
        group = self.state.group
        segments: list[list[int]] = []
        for numel, bits in zip(numels, widths, strict=True):
            if bits == 0 and segments and segments[-1][1] == 0:
                segments[-1][0] += numel
            else:
                segments.append([numel, bits])
        if not any(widths):
            assert not any(self.residuals[name].any() for name in names if name in self.residuals)
            mean = given / group.size()
            dist.all_reduce(mean, group=group)
            return mean
        residual = torch.cat([self.residuals.get(n, torch.zeros(e)) for n, e in zip(names, numels, strict=True)])
        result = torch.ops.ark.compressed_all_reduce(
            given, residual, [numel for numel, _ in segments], [bits for _, bits in segments],
            [self.state.bucket] * len(segments), self.state.format, "nearest", 0, "avg", group.group_name,
        )  # fmt: skip
        self.residuals |= zip(names, (part.clone() for part in residual.split(numels)), strict=True)
        return result

    def same_residuals(self) -> None:
        held = self.state.state_dict()["residuals"]
        assert any(residual.any() for residual in self.residuals.values())
        for name, residual in self.residuals.items():
            assert torch.equal(held.get(name, torch.zeros_like(residual)), residual), name


def _step(ddp: DDP, step: int, rank: int) -> None:
    ddp.zero_grad()
    x = torch.randn(6, 37, generator=torch.Generator().manual_seed(100 * step + rank))
    ddp(x).square().mean().backward()


def _made(bits: Any, **options: Any) -> tuple[DDP, compression.State, _Oracle]:
    ddp = DDP(_net(), bucket_cap_mb=0.02, **options)
    state = compression.State(bits=bits, bucket=128, module=ddp, skip_zeros=False)
    return ddp, state, _Oracle(ddp, state)


def _twenty_steps(rank: Rank) -> None:
    torch.set_num_threads(1)
    rank.init()
    ddp, state, oracle = _made(4)
    _step(ddp, 0, rank.rank)
    first = oracle.buckets
    plans: list[Any] = []
    for step in range(1, 20):
        _step(ddp, step, rank.rank)
        oracle.same_residuals()
        plans.append(dict(state.plans))
    assert len(oracle.buckets) > 1 and oracle.buckets != first, "DDP has built its buckets anew after the first step"
    assert plans[1] == plans[-1], "a plan is made once"


def test_twenty_steps_have_the_bits_of_exchanges_without_plans() -> None:
    run_ranks(_twenty_steps, 2)


def _chosen(rank: Rank) -> None:
    """Bits that Auto chooses count from the next step on."""
    torch.set_num_threads(1)
    rank.init()
    ddp, _, oracle = _made(compression.Auto(budget=5, steps=2, every=4, least=4))
    seen = []
    for step in range(8):
        _step(ddp, step, rank.rank)
        oracle.same_residuals()
        seen.append(sorted(oracle.widths))
    assert seen[1] != seen[2] == seen[3] == seen[5], "bits of the first choice"


def test_bits_chosen_anew_make_new_plans() -> None:
    run_ranks(_chosen, 2)


def _loaded(rank: Rank) -> None:
    """A checkpoint brings other bits and residuals."""
    torch.set_num_threads(1)
    rank.init()
    ddp, state, oracle = _made(4)
    for step in range(4):
        _step(ddp, step, rank.rank)
    saved = copy.deepcopy(state.state_dict())
    saved["bits"] = {"0.weight": 8, "4.weight": 6}
    kept = {name: residual.clone() for name, residual in oracle.residuals.items()}
    for step in range(4, 6):
        _step(ddp, step, rank.rank)
    state.load_state_dict(saved)
    oracle.residuals = kept
    for step in range(4, 8):
        _step(ddp, step, rank.rank)
        oracle.same_residuals()
    widths = dict(oracle.widths)
    assert (widths["0.weight"], widths["2.weight"], widths["4.weight"]) == (8, 4, 6)


def test_a_loaded_state_makes_new_plans() -> None:
    run_ranks(_loaded, 2)


def _of_another_type(rank: Rank) -> None:
    """The same parameters in another dtype: the plan of before would send float32's codes."""
    torch.set_num_threads(1)
    rank.init()

    class Bucket:
        def __init__(self, parameters: list[Tensor], data: Tensor) -> None:
            self._parameters, self._data = parameters, data

        def buffer(self) -> Tensor:
            return self._data

        def parameters(self) -> list[Tensor]:
            return self._parameters

        def index(self) -> int:
            return 0

        def is_last(self) -> bool:
            return True

    weight = nn.Parameter(torch.zeros(64, 64))
    state = compression.State(bits=8, skip_zeros=False)
    data = torch.randn(64 * 64, generator=torch.Generator().manual_seed(rank.rank))
    mean = data.clone()
    dist.all_reduce(mean)
    mean /= rank.world_size
    counted = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32):
        before = state.bytes_sent
        got = compression.hook(state, Bucket([weight], data.to(dtype))).wait()  # type: ignore[arg-type]
        assert got.dtype is dtype and (got.double() - mean).norm() < 0.05 * mean.norm(), dtype
        counted.append(state.bytes_sent - before)
    codes = 64 * 64 + 8 * 8
    assert counted == [codes, 8 * 64 * 64, codes, codes], counted


def test_another_type_makes_a_new_plan() -> None:
    run_ranks(_of_another_type, 2)
