"""where="between": the ranks of a node add exactly, and only what travels between nodes has few bits.

Results are compared bit for bit with sums of nodes made by hand and quantised by the oracle (support/quantizer.py).
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import quantizer
from support import training as small
from support.compression import Heard
from support.groups import ark_only
from support.launcher import run_ranks
from support.quantizer import Segment, Settings
from support.rank import Rank
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ark_torch.distributed import compressed_all_reduce, compression
from ark_torch.distributed.compression import exchange
from ark_torch.distributed.compression.plan import plan_of
from ark_torch.train import capture

pytestmark = [ark_only]

Placement = tuple[int, ...]
TWO: Placement = (0, 0, 1, 1)
MIXED: Placement = (0, 1, 0, 1)  # neighbours are on different nodes
UNEVEN: Placement = (0, 0, 1)
THREE: Placement = (0, 0, 0, 1, 1, 2, 2)
ODD, MASK = 0x9E3779B97F4A7C15, 2**63 - 1

placements = pytest.mark.parametrize(
    "placement",
    [TWO, UNEVEN, *(pytest.param(one, marks=pytest.mark.nightly) for one in (MIXED, THREE))],
    ids=lambda placement: "".join(map(str, placement)),
)


def _start(rank: Rank, placement: Placement) -> dist.ProcessGroup:
    os.environ["ARK_NODE"] = str(placement[rank.rank])
    return rank.init()


def _same_everywhere(tensor: Tensor) -> bool:
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(every, tensor.contiguous())
    return all(torch.equal(one, tensor) for one in every)


def _by_hand(
    inputs: list[Tensor], residuals: list[Tensor], placement: Placement, layers: list[Segment], settings: Settings
) -> Tensor:
    """The sum over ranks, [n] in float32. Replaces residuals, as the ranks do."""
    members = [[r for r, one in enumerate(placement) if one == node] for node in dict.fromkeys(placement)]
    rails, total = min(map(len, members)), torch.empty(inputs[0].numel())
    given = [residual + x.float() for x, residual in zip(inputs, residuals, strict=True)]
    for residual in residuals:
        residual.zero_()
    size = -(-total.numel() // (32 * rails)) * 32
    for place in range(rails):
        begin, end = (min(total.numel(), size * one) for one in (place, place + 1))
        sums = []
        for ranks in members:
            added = given[ranks[0]][begin:end].clone()
            for r in ranks[1:]:
                added += given[r][begin:end]
            sums.append(added)
        segments, at = [], 0
        for layer in layers:
            held = min(at + layer.numel, end) - max(at, begin)
            at += layer.numel
            if held > 0:
                segments.append(Segment(held, layer.bits, layer.bucket))
        mine = Settings(settings.format, settings.rounding, settings.seed ^ (place * ODD & MASK))
        lost = [torch.zeros(end - begin) for _ in members]
        owners = quantizer.owners(segments, 4, len(members))
        total[begin:end] = quantizer.all_reduce(sums, lost, segments, mine, "sum", owners)
        for ranks, error in zip(members, lost, strict=True):
            residuals[ranks[place]][begin:end] = error
    return total


# ---- The function


def _function(rank: Rank, placement: Placement) -> None:
    _start(rank, placement)
    dist.new_group([0, 1])  # which gives some ranks more groups than others
    world = rank.world_size
    for numel in (0, 1, 33, 1003, 9000):
        for dtype, op in ((torch.float32, dist.ReduceOp.SUM), (torch.bfloat16, dist.ReduceOp.AVG)):
            bits, format = (8, "fp8") if numel == 1003 else (5, "uniform")
            inputs = [torch.randn(numel, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world)]
            before = inputs[rank.rank].clone()
            got = compressed_all_reduce(
                inputs[rank.rank], bits=bits, bucket=128, format=format, op=op, where="between"
            )  # fmt: skip
            none = [torch.zeros(numel) for _ in range(world)]
            wanted = _by_hand(inputs, none, placement, [Segment(numel, bits, 128)], Settings(format))
            wanted = (wanted / world if op == dist.ReduceOp.AVG else wanted).to(dtype)
            assert got.dtype == dtype and torch.equal(got, wanted), (numel, dtype)
            assert torch.equal(before, inputs[rank.rank]) and _same_everywhere(got)
    square = torch.ones(3, 5)[:, ::2]
    assert torch.equal(compressed_all_reduce(square, where="between"), torch.full((3, 3), float(world)))
    plain = torch.randn(5000, generator=torch.Generator().manual_seed(rank.rank))
    dist.all_reduce(plain)
    assert _same_everywhere(plain), "a plain all_reduce of the same group"


@placements
def test_the_function_has_the_bits_of_both_stages_by_hand(placement: Placement) -> None:
    run_ranks(_function, len(placement), placement)


# ---- The state


class Net(nn.Module):
    """Three layers, of which a step uses some: so other layers travel together, and parts begin elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.c = (nn.Linear(40, 37 * n) for n in (1, 2, 3))

    def forward(self, x: Tensor, used: str = "abc") -> Tensor:
        return sum(getattr(self, name)(x).square().mean() for name in used)  # type: ignore[return-value]


def _gradients(model: nn.Module, step: int, rank: int, used: str = "abc") -> Tensor:
    model.zero_grad(set_to_none=False)
    model(torch.randn(6, 40, generator=torch.Generator().manual_seed(10 * step + rank)), used).backward()
    parameters = model.parameters()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])


def _exact(step: int, world: int, used: str = "abc") -> Tensor:
    return torch.stack([_gradients(Net(), step, r, used) for r in range(world)]).mean(0)


def _hooked(**settings: Any) -> tuple[DDP, compression.State]:
    model = DDP(Net(), find_unused_parameters=True)
    state = compression.State(module=model, where="between", exact_below=256, **settings)
    model.register_comm_hook(state, compression.hook)
    return model, state


def _owed(saved: dict[str, Tensor]) -> Tensor:
    """What a rank's residuals add to the mean of some later step, over all ranks."""
    mine = torch.cat([saved.get(name, torch.zeros(p.numel())) for name, p in Net().named_parameters()])
    dist.all_reduce(mine)
    return mine / dist.get_world_size()


def _exchanges(rank: Rank, placement: Placement) -> None:
    """Some exchanges and residuals are those of the oracle, with both ways of rounding."""
    _start(rank, placement)
    world = rank.world_size
    layers = [Segment(2405, 4, 128), Segment(65, 0, 128), Segment(2145, 8, 256)]
    numels = [layer.numel for layer in layers]
    for rounding in ("nearest", "stochastic"):
        state = compression.State(4, 128, True, where="between", rounding=rounding, seed=3)
        known = [state.layers.named(n, f"{n}", [n, 1], None) for n in numels]
        known[1].rule, known[2].rule = compression.Rule(0), compression.Rule(8, 256)
        residuals = [torch.zeros(sum(numels)) for _ in range(world)]
        for step in range(3):
            inputs = [torch.randn(sum(numels), generator=torch.Generator().manual_seed(9 * step + r)) for r in range(world)]  # fmt: skip # noqa: E501
            plan = plan_of(state, known, inputs[rank.rank])
            got = exchange.all_reduce(state, inputs[rank.rank].clone(), plan)
            settings = Settings("uniform", rounding, (3 * ODD + step + 1) & MASK)
            wanted = _by_hand(inputs, residuals, placement, layers, settings) / world
            assert torch.equal(got, wanted), (rounding, step)
            held = torch.cat([layer.residual.flatten() for layer in known if layer.residual is not None])
            assert torch.equal(held, residuals[rank.rank]), (rounding, step)
        # Bytes between two nodes: each rank of a rail sends its part once, half as codes and half as a sum.
        members = [placement.count(node) for node in dict.fromkeys(placement)]
        place = placement[: rank.rank].count(placement[rank.rank])
        share = sum(numels) / min(members) if place < min(members) else 0
        assert state.bytes_exact == pytest.approx(3 * 4 * share * 2 * (len(members) - 1) / len(members), rel=0.02)
        assert (state.bytes_sent < state.bytes_exact / 2) if share else state.bytes_sent == 0
    # A NaN arrives as such, is told with its layer's name, and leaves nothing behind.
    heard, inputs = Heard(), torch.ones(2, sum(numels))
    inputs[0, 2405 + 65 + 300] = torch.nan if rank.rank == 1 else 1
    bad, good = (exchange.all_reduce(state, one, plan_of(state, known, one)) for one in inputs)
    assert bad[2405 + 65 + 256 :][:256].isnan().any() and bad[:2405].isfinite().all() and _same_everywhere(bad.isnan())
    assert good.isfinite().all() and len(heard.of("NaN or Inf")) == len(heard.of("gradient of 2145")) == 1


@placements
def test_exchanges_and_residuals_are_the_oracles(placement: Placement) -> None:
    run_ranks(_exchanges, len(placement), placement)


def _conserved(rank: Rank, placement: Placement) -> None:
    """All results and what is still owed add up to the exact means, whichever layers travel; a restart goes on with the
    same bits; and residuals of another number of ranks arrive, each once."""
    _start(rank, placement)
    world, used = rank.world_size, ("abc", "abc", "ab", "bc", "abc", "ac", "ab", "abc")
    for bits in (1, 4):
        (model, state), total, wanted = _hooked(bits=bits), torch.zeros(0), torch.zeros(0)
        for step, names in enumerate(used):
            got, exact = _gradients(model, step, rank.rank, names), _exact(step, world, names)
            assert _same_everywhere(got) and not torch.equal(got, exact)
            total, wanted = (got, exact) if step == 0 else (total + got, wanted + exact)
        saved = state.state_dict()
        torch.testing.assert_close(total + _owed(saved["residuals"]), wanted, rtol=1e-4, atol=1e-6)
    again, restarted = _hooked(bits=4)
    _gradients(again, 99, rank.rank)  # as DDP's first step, after which it orders its buckets
    restarted.load_state_dict(saved)
    assert torch.equal(_gradients(again, 8, rank.rank), _gradients(model, 8, rank.rank))
    other = world + 1
    states = [{**saved, "rank": r, "world_size": other, "residuals": {"c.weight": torch.full((4440,), r / 100)}}
              for r in range(other)]  # fmt: skip
    moved, state = _hooked(bits=4)
    state.load_state_dict(states)
    got = _gradients(moved, 0, rank.rank) + _owed(state.state_dict()["residuals"])
    owed = _exact(0, world)
    owed[37 * 41 * 3 :][:4440] += sum(r / 100 for r in range(other)) / other
    torch.testing.assert_close(got, owed, rtol=1e-4, atol=1e-6)


@placements
def test_nothing_is_lost(placement: Placement) -> None:
    run_ranks(_conserved, len(placement), placement)


def _captured(rank: Rank) -> None:
    """A captured step's buckets go the same way."""
    _start(rank, TWO)
    ddp = DDP(small.make("gpt2"))
    state = compression.State(bits=8, module=ddp, where="between", exact_below=256, rounding="nearest")
    ddp.register_comm_hook(state, compression.hook)
    step = capture(ddp, torch.optim.AdamW(ddp.parameters(), lr=1e-2), small.loss, bucket_mb=0.02)
    losses = [step(small.batch("gpt2", number, rank.rank)).item() for number in range(8)]
    assert losses[-1] < losses[0] and 0 < 2 * state.bytes_sent < state.bytes_exact
    assert _same_everywhere(small.weights(ddp.module))


def test_a_captured_step() -> None:
    run_ranks(_captured, 4)


# ---- One node, and bad input


def _one_node(rank: Rank) -> None:
    rank.init()
    heard = Heard()
    model, state = _hooked(bits=1)
    for step in range(2):
        torch.testing.assert_close(_gradients(model, step, rank.rank), _exact(step, 2))
    assert state.bytes_sent == state.bytes_exact == 0
    x = torch.randn(999, generator=torch.Generator().manual_seed(rank.rank)).bfloat16()
    exact = sum(torch.randn(999, generator=torch.Generator().manual_seed(r)).bfloat16().float() for r in range(2))
    for _ in range(2):
        assert torch.equal(compressed_all_reduce(x, bits=1, where="between"), exact.bfloat16())
    for text in ("gradients are sent exact", "sums are exact"):
        assert len(heard.of(f"all ranks are on one node: {text}")) == int(rank.rank == 0)


def test_on_one_node_all_is_exact() -> None:
    run_ranks(_one_node, 2)


def _refused(rank: Rank) -> None:
    _start(rank, (0, 1))
    with pytest.raises(ValueError, match="where is 'outside': it is 'everywhere' or 'between'"):
        compression.State(where="outside")
    x = torch.ones(300)
    for given, kind, text in (
        ({"where": "inside"}, ValueError, "where is 'inside': it is 'everywhere' or 'between'"),
        ({"bits": 9}, ValueError, "bits is 9"),
        ({"bits": 0.5}, TypeError, "bits is 0.5"),
        ({"bits": 4, "format": "fp8"}, ValueError, "bits is 4: format='fp8' has 8 bits"),
        ({"bucket": 100}, ValueError, "bucket is 100"),
        ({"format": "int"}, ValueError, "format is 'int'"),
        ({"op": dist.ReduceOp.MAX}, ValueError, "op is .*MAX"),
        ({"tensor": x.double()}, TypeError, "tensor is torch.float64"),
        ({"tensor": x.clone().requires_grad_()}, ValueError, "tensor requires grad"),
        ({"group": dist.new_group(backend="gloo")}, ValueError, "carried by 'gloo'"),
        ({"bits": 4 + rank.rank}, ValueError, "bits is 4 on rank 0 and 5 on rank 1: pass the same"),
    ):
        with pytest.raises(kind, match=text):
            compressed_all_reduce(**{"tensor": x, "where": "between"} | given)
    assert (compressed_all_reduce(x, where="between") == 2).all()
    model = DDP(Net())
    state = compression.State(module=model, where=("everywhere", "between")[rank.rank])
    model.register_comm_hook(state, compression.hook)
    with pytest.raises(ValueError, match="where is 'everywhere' on rank 0 and 'between' on rank 1"):
        _gradients(model, 0, rank.rank)


def test_bad_input() -> None:
    run_ranks(_refused, 2)
