"""Large gradients are averaged where autograd left them, and parameters of the last buckets are updated apart."""

from __future__ import annotations

from typing import Any

import torch
from support import training as small
from support.crew import crew_of
from support.groups import ark_only
from support.rank import Rank
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ark_torch.train import capture

pytestmark = [ark_only]


class _Both(torch.autograd.Function):
    """A sum whose gradients are one piece of memory."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
        return one + other

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return gradient.view_as(gradient), gradient.view_as(gradient)


class _Shared(nn.Module):
    """Two large weights whose gradients have one memory, a transposed one, and one that is not used on rank 1."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rank = rank
        self.one, self.other, self.turned, self.rare = (nn.Parameter(torch.randn(80, 80)) for _ in range(4))
        self.turned.data = self.turned.data.t()
        self.small = nn.Linear(80, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ _Both.apply(self.one, self.other)  # type: ignore[no-untyped-call]
        x = (x @ self.turned).tanh()
        if self.rank == 0:
            x = x + (x @ self.rare).tanh()
        y: Tensor = self.small(x)
        return y


def _in_place(rank: Rank) -> None:
    """Large gradients are averaged where they are, others in buckets; parameters of the last buckets are updated by a
    step of their own."""
    rank.init()

    def loss(model: Any, x: Tensor) -> Tensor:
        return model(x).square().mean()

    results, updates, direct = [], 0, []
    for captured in (False, True):
        model = _Shared(rank.rank)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        ddp = DDP(model, find_unused_parameters=True)
        step = capture(ddp, optimizer, loss, bucket_mb=0.02) if captured else None
        if step is not None:
            whole = optimizer.step

            def count(*args: Any, whole: Any = whole, **kwargs: Any) -> Any:
                nonlocal updates
                updates += 1
                return whole(*args, **kwargs)

            optimizer.step = count  # type: ignore[method-assign]
        for number in range(6):
            torch.manual_seed(10 * number + rank.rank)
            x = torch.randn(4, 80)
            if step is not None:
                step(x)
                continue
            optimizer.zero_grad()
            loss(ddp, x).backward()
            optimizer.step()
        if step is not None:
            buckets = step._step.buckets
            assert buckets is not None
            names = {parameter: name for name, parameter in model.named_parameters()}
            direct = sorted(names[parameter] for parameter in buckets.direct)
            step.close()
        results.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        results.append([small.weights(model)])
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[2], strict=True)), "gradients"
    assert torch.equal(results[1][0], results[3][0])
    assert direct == ["rare", "turned"], direct
    assert updates == 2 * 6, updates


def test_large_gradients_are_averaged_in_place() -> None:
    crew_of(2, {}).run(_in_place)
