"""Models compiled inside DDP and as FSDP2's blocks, both with backend "ark"; higher-order gradients; convolutions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.rank import Rank
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent))

import exactness
import models

pytestmark = pytest.mark.timeout(200)

STEPS = 5


class Block(nn.Module):
    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def make() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(Block(), Block())


def train(model: nn.Module, rank: int) -> list[float]:
    """Returns the losses of this rank's own batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x, y = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(10 * step + rank)).unbind(0)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def agree(got: nn.Module, wanted: nn.Module, rank: int) -> None:
    """Compares training, then inference under no_grad, where ark's kernels run."""
    mine, its = train(got, rank), train(wanted, rank)
    assert mine == pytest.approx(its, rel=1e-5) and len(set(its)) == STEPS
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(rank))
    with torch.no_grad():
        first = got(x)
        torch.testing.assert_close(first, wanted(x), rtol=1e-4, atol=1e-5)
        assert torch.equal(got(x), first)


def _ddp(rank: Rank, inside: bool) -> None:
    rank.init()
    torch._dynamo.reset()
    regions = regions_made()
    if inside:
        model: Any = DistributedDataParallel(torch.compile(make(), backend="ark", options={"choose": "ark"}))
    else:
        model = torch.compile(DistributedDataParallel(make()), backend="ark", options={"choose": "ark"})
    agree(model, DistributedDataParallel(make()), rank.rank)
    assert len(regions) > 0


def regions_made() -> list[str]:
    """Returns the names of the regions that this process compiles from now on."""
    from ark_torch.compile import build

    names: list[str] = []
    made = build.make_region

    def noted(*arguments: Any, **keywords: Any) -> Any:
        region = made(*arguments, **keywords)
        names.append(str(arguments[1]))
        return region

    build.make_region = noted
    return names


@pytest.mark.nightly
@pytest.mark.parametrize("inside", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_ddp(inside: bool) -> None:
    run_ranks(_ddp, 2, inside)


def sharded(compiled: str) -> nn.Module:
    model = make()
    for block in model:
        if compiled == "blocks":
            block.compile(backend="ark", options={"choose": "ark"})
        fully_shard(block)
    fully_shard(model)
    return torch.compile(model, backend="ark", options={"choose": "ark"}) if compiled == "model" else model  # type: ignore[return-value]


def _fsdp(rank: Rank, compiled: str) -> None:
    rank.init()
    torch._dynamo.reset()
    regions = regions_made()
    agree(sharded(compiled), sharded(""), rank.rank)
    assert len(regions) > 0
    assert dist.get_backend() == rank.backend


@pytest.mark.nightly
@pytest.mark.parametrize("compiled", ["blocks", pytest.param("model", marks=pytest.mark.nightly)])
def test_fsdp2(compiled: str) -> None:
    run_ranks(_fsdp, 2, compiled)


def test_gradients_of_gradients(compiled: Any) -> None:
    """Works through torch.func. create_graph=True needs an option, because AOTAutograd does not support it."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    x = torch.randn(4, 8)

    def curvature(x: Tensor) -> Tensor:
        first = torch.func.grad(lambda z: model(z).sum())
        return torch.func.grad(lambda y: first(y).square().sum())(x)

    call, report = compiled(curvature)
    torch.testing.assert_close(call(x), curvature(x), rtol=1e-4, atol=1e-6)
    assert report.graphs

    def penalty(f: Any) -> list[Tensor]:
        model.zero_grad()
        given = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(f(given).sum(), given, create_graph=True)
        slope.square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    with torch.enable_grad():
        wanted = penalty(model)
        call, report = compiled(model, differentiate_twice=True)
        for got, right in zip(penalty(call), wanted, strict=True):
            assert torch.equal(got, right)
        assert "eager PyTorch" in str(report) and "differentiate_twice" in str(report)
        torch._dynamo.reset()
        call, _ = compiled(model)
        with pytest.raises(RuntimeError, match="double backward"):  # when this works, the option can go
            penalty(call)


def test_residual_block(compiled: Any) -> None:
    """Convolutions on Inductor, the rest on ark, as accurate as all on Inductor."""
    model = models.ResidualBlock(16, transposed=True).eval()
    x = torch.randn(2, 16, 9, 9)
    report = exactness.check(model, lambda call, dtype: [call(x.to(dtype))], compiled)
    assert [piece.runs_on for piece in report.graphs[0].pieces] == ["inductor", "ark", "inductor", "ark"]
    assert {str(f).split(" (")[0] for f in report.fallbacks} == {"aten.convolution.default: a transposed convolution"}
