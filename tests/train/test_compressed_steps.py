"""Captured steps that compress gradients, over two ranks: DDP's hook in the step's buckets, fully_shard's exchanges."""

from __future__ import annotations

import copy

import fake_graphs
import pytest
import torch
import torch.distributed as dist
from support import training as small
from support.crew import crew_of
from support.groups import ark_only
from support.launcher import run_ranks
from support.rank import Rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ark_torch.train import capture, graphs

pytestmark = [ark_only]
_REAL = graphs.recorder_for


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _compressed(rank: Rank, bits: int) -> tuple[bool, float, float]:
    """DDP with ark's compression hook: the step's buckets are compressed by its state, in replays too."""
    from ark_torch.distributed import compression

    rank.init()
    recorder = fake_graphs.use()
    model = small.make("gpt2")
    exact = copy.deepcopy(model)
    ddp = DDP(model)
    state = compression.State(bits=bits, module=ddp, rounding="nearest", exact_below=256)
    ddp.register_comm_hook(state, compression.hook)
    step, plain = capture(ddp, _adam(ddp), small.loss, bucket_mb=0.05), capture(exact, _adam(exact), small.loss)
    sent = []
    for number in range(8):
        before = state.bytes_sent
        losses = [one(small.batch("gpt2", number, rank.rank)).item() for one in (step, plain)]
        sent.append(state.bytes_sent - before)
        assert abs(losses[0] - losses[1]) < 0.05 * losses[1], (number, losses)
    assert step.captured and recorder.counts["records"] == 2 and len(step._step.buckets.buckets) > 1
    every = [torch.empty_like(small.weights(model)) for _ in range(2)]
    dist.all_gather(every, small.weights(model))
    assert torch.equal(every[0], every[1])
    assert not torch.equal(small.weights(ddp.module)[0], small.weights(exact)[0])
    assert any(layer.residual is not None and layer.residual.any() for layer in state.layers) == (bits < 8)
    # The wrapper still has its hook when it is used by itself again.
    step.close()
    before = state.bytes_sent
    small.loss(ddp, small.batch("gpt2", 9, rank.rank)).backward()
    assert state.bytes_sent > before
    graphs.recorder_for = _REAL
    return len(set(sent)) == 1, sent[0], state.bytes_exact / 9


@pytest.mark.parametrize("bits, share", [(4, 6.0), (8, 3.2)])
def test_a_compression_hook_is_captured(bits: int, share: float) -> None:
    for even, sent, exact in crew_of(2, {}).run(_compressed, bits):
        assert even and 0 < sent * share < exact, (even, sent, exact)


def _not_captured(rank: Rank) -> None:
    from ark_torch.distributed import compression

    rank.init()
    fake_graphs.use()
    for options, words in (
        ({"rounding": "stochastic"}, "draws random numbers"),
        ({"bits": compression.Auto(4.0)}, "reads gradients on the host"),
        ({"when": "faster"}, "measures on the host"),
        ({"skip_zeros": True}, "which layers are zero"),
    ):
        ddp = DDP(small.make("gpt2"))
        ddp.register_comm_hook(compression.State(**{"bits": 4, "module": ddp} | options), compression.hook)
        step = capture(ddp, _adam(ddp), small.loss)
        with pytest.warns(UserWarning, match=f"runs steps eagerly: compression.State: .*{words}"):
            step(small.batch("gpt2", 0, rank.rank))
        step.close()
    graphs.recorder_for = _REAL


def test_compression_that_reads_on_the_host_is_not_captured() -> None:
    crew_of(2, {}).run(_not_captured)


def _sharded_and_compressed(rank: Rank) -> list[str]:
    """The reasons of fsdp()'s states against a capture."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from ark_torch.distributed import compression

    rank.init()
    mesh = init_device_mesh("cpu", (rank.world_size,))
    reasons = []
    for rounding in ("nearest", "stochastic"):
        model = small.make("gpt2")
        fully_shard(model, mesh=mesh)
        compression.fsdp(model, compression.State(bits=4, rounding=rounding, exact_below=256))
        step = capture(model, _adam(model), small.loss)
        step(small.batch("gpt2", 0, rank.rank))
        reasons.append(step.reason)
    return reasons


def test_fully_shard_with_compression() -> None:
    for nearest, stochastic in run_ranks(_sharded_and_compressed, 2):
        assert nearest == "there are no graphs on CPUs"
        assert stochastic.startswith("compression.State: rounding='stochastic' draws random numbers")
