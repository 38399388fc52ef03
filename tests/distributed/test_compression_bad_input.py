"""What compression refuses and the error messages; NaN and Inf; checkpoints of residuals."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.compression import Heard, hooked, mean
from support.groups import ark_only
from support.launcher import run_ranks
from support.rank import Rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ark_torch.distributed import compression
from ark_torch.distributed.compression import agree

pytestmark = [ark_only]

REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"bits": 0}, ValueError, "bits is 0: it is a whole number from 1 to 8"),
    ({"bits": 9}, ValueError, "bits is 9: it is a whole number from 1 to 8"),
    ({"bits": 4.0}, TypeError, "bits is 4.0"),
    ({"bits": True}, TypeError, "bits is True"),
    ({"bucket": 500}, ValueError, "bucket is 500: it is a multiple of 32 from 128 to 4096"),
    ({"bucket": 96}, ValueError, "bucket is 96"),
    ({"bucket": 8192}, ValueError, "bucket is 8192"),
    ({"bucket": "512"}, TypeError, "bucket is '512'"),
    ({"format": "int"}, ValueError, "format is 'int': it is 'uniform' or 'fp8'"),
    ({"format": "fp8"}, ValueError, "bits is 4: format='fp8' has 8 bits"),
    ({"rounding": "up"}, ValueError, "rounding is 'up': it is 'nearest' or 'stochastic'"),
    ({"when": "never"}, ValueError, "when is 'never': it is 'always' or 'faster'"),
    ({"rules": ["0.weight"]}, TypeError, "rules is a list: it maps names or patterns"),
    ({"rules": {"0.weight": 9}}, ValueError, "rules['0.weight'] is 9"),
    ({"rules": {"0.weight": 0}}, ValueError, "rules['0.weight'] is 0"),
    ({"rules": {"0.weight": "half"}}, TypeError, "rules['0.weight'] is 'half': it is bits from 1 to 8, 'exact'"),
    ({"rules": {"0.weight": compression.Rule(4, 100)}}, ValueError, "rules['0.weight'].bucket is 100"),
    ({"rules": {"0.wieght": 8}}, ValueError, "rules['0.wieght'] matches no parameter: there is 0.weight"),
    ({"rules": {"0.weight": 8}, "module": None}, ValueError, "rules=...) names parameters: pass module="),
]


def _refused(rank: Rank) -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        compression.State()
    rank.init()
    for settings, error, text in REFUSED:
        with pytest.raises(error) as caught:
            compression.State(**{"module": nn.Sequential(nn.Linear(64, 64)), **settings})
        assert text in str(caught.value), (settings, str(caught.value))
    for arguments, text in (
        ({"budget": 1.0}, "Auto.budget is 1.0"),
        ({"budget": 9}, "Auto.budget is 9"),
        ({"least": 0}, "Auto.least is 0"),
        ({"steps": 0}, "Auto.steps is 0"),
        ({"steps": 10, "every": 5}, "Auto.every is 5"),
    ):
        with pytest.raises(ValueError) as caught:
            compression.Auto(**arguments)
        assert text in str(caught.value)


def test_settings_that_will_not_do() -> None:
    run_ranks(_refused, 1)


def _differ(rank: Rank, key: str, values: tuple[Any, Any]) -> str:
    rank.init()
    ddp, _ = hooked(nn.Linear(64, 64), **{key: values[min(rank.rank, 1)]})
    with pytest.raises(ValueError) as caught:
        ddp(torch.ones(2, 64)).sum().backward()
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "values", "told"),
    [
        ("bits", (4, 8), "bits is 4 on rank 0 and 8 on rank 1"),
        pytest.param("bucket", (512, 1024), "bucket is 512 on rank 0 and 1024 on rank 1", marks=pytest.mark.nightly),
        ("rules", ({"weight": 8}, {"weight": 2}), "{'weight': {'bits': 2, 'bucket': None}} on rank 1"),
        pytest.param("when", ("always", "faster"), "when is 'always' on rank 0", marks=pytest.mark.nightly),
        pytest.param("seed", (1, 2), "seed is 1 on rank 0 and 2 on rank 1", marks=pytest.mark.nightly),
    ],
)
def test_ranks_with_other_settings(key: str, values: tuple[Any, Any], told: str) -> None:
    for rank, message in enumerate(run_ranks(_differ, 2, key, values)):
        assert message.startswith(f"ark: [rank {rank}] compression: ") and told in message, message


def _not_ark(rank: Rank) -> None:
    rank.init(backend="gloo")
    ddp = DDP(nn.Linear(64, 64))
    ddp.register_comm_hook(compression.State(module=ddp), compression.hook)
    with pytest.raises(ValueError, match=r"\[rank \d\] compression: the group's cpu tensors are carried by 'gloo'"):
        ddp(torch.ones(2, 64)).sum().backward()


def test_a_group_that_is_not_ark() -> None:
    run_ranks(_not_ark, 2)


def _disabled(rank: Rank, why: str) -> None:
    rank.init()
    heard = Heard()
    ddp, state = hooked(nn.Linear(64, 64), bits=1)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(rank.rank))
    for _ in range(2):
        ddp.zero_grad()
        ddp(x).sum().backward()
    torch.testing.assert_close(ddp.module.weight.grad, mean(x.sum(0).expand(64, 64)))
    assert state.bytes_sent == state.bytes_exact > 0
    assert len(heard.of(f"{why}: gradients are sent exact")) == int(rank.rank == 0)


def test_ark_disabled_is_exact_and_told() -> None:
    run_ranks(_disabled, 2, "ARK_DISABLE is set", env={"ARK_DISABLE": "1"})


def test_under_debug_detail_it_is_exact_and_told() -> None:
    """PyTorch's checker hides the group from the operators."""
    why = "TORCH_DISTRIBUTED_DEBUG=DETAIL hides ark's group from its operators"
    run_ranks(_disabled, 2, why, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})


def _foreign(rank: Rank) -> None:
    """A parameter that the state's module does not have. DDP cannot produce a sparse tensor of integers."""
    rank.init()
    ddp = DDP(nn.Linear(64, 64))
    ddp.register_comm_hook(compression.State(module=nn.Linear(64, 64)), compression.hook)
    with pytest.raises(ValueError, match=r"a parameter of shape .* is not of the module that State got"):
        ddp(torch.ones(2, 64)).sum().backward()


def test_a_state_of_another_module() -> None:
    run_ranks(_foreign, 1)


def _integers(rank: Rank) -> None:
    group = rank.init()
    for dtype in (torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64):
        data = torch.ones(512).to(dtype)
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            torch.ops.ark.compressed_all_reduce(
                data, None, [512], [4], [512], "uniform", "nearest", 0, "avg", group.group_name
            )


def test_integer_tensors() -> None:
    run_ranks(_integers, 2)


# -- NaN and Inf


def _not_finite(rank: Rank, value: float) -> list[str]:
    rank.init()
    heard = Heard()
    torch.manual_seed(0)
    ddp, state = hooked(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), bits=4)
    for step in range(4):
        ddp.zero_grad()
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(rank.rank))
        weight = torch.ones(4, 64)
        if step in (1, 2) and rank.rank == 1:
            weight[2, 7] = value  # one row of the last layer's gradient
        out = ddp(x)
        (out * weight).sum().backward() if step in (1, 2) else out.square().mean().backward()
        gradients = {name: parameter.grad for name, parameter in ddp.module.named_parameters()}
        bad = {name for name, gradient in gradients.items() if not gradient.isfinite().all()}
        if step in (1, 2):
            assert "1.weight" in bad and "1.bias" in bad, bad
            assert not gradients["1.weight"][7].isfinite().any(), "clipped"
        else:
            assert not bad, (step, bad)
    residuals = state.state_dict()["residuals"]
    assert all(one.isfinite().all() for one in residuals.values())
    return heard.of("NaN or Inf")


@pytest.mark.parametrize("value", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.nightly)])
def test_nan_arrives_as_nan_and_is_told_once_with_the_layers_name(value: float) -> None:
    told = run_ranks(_not_finite, 2, value)
    for rank, whose in ((0, "another rank's gradient of 1.weight [64, 64]"), (1, "this rank's gradient of 1.weight")):
        assert len([line for line in told[rank] if whose in line]) == 1, told[rank]
        assert len({line.split(" of ")[1] for line in told[rank]}) == len(told[rank]), "told twice"


# -- checkpoints


def _steps(ddp: DDP, rank: int, first: int, last: int) -> None:
    for step in range(first, last):
        ddp.zero_grad()
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step + 100 * rank))
        ddp(x).square().mean().backward()
        torch.optim.SGD(ddp.parameters(), lr=0.1).step()


def _saved(state: compression.State) -> Any:
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def _make(**settings: Any) -> tuple[DDP, compression.State]:
    torch.manual_seed(0)
    # One layer only: in the first step DDP's buckets, by which ranks share the work, have another order.
    return hooked(nn.Sequential(nn.Linear(64, 65, bias=False)), **settings)


def _restored(rank: Rank) -> Any:
    """Interrupted training gives the same bits as uninterrupted training."""
    rank.init()
    for settings in ({"bits": 2}, {"bits": 4, "rounding": "stochastic", "error_feedback": True, "seed": 7}):
        straight, _ = _make(**settings)
        _steps(straight, rank.rank, 0, 6)
        first, state = _make(**settings)
        _steps(first, rank.rank, 0, 3)
        saved, weights = _saved(state), first.state_dict()
        second, state = _make(**settings)
        second.load_state_dict(weights)
        state.load_state_dict(saved)
        _steps(second, rank.rank, 3, 6)
        for ours, wanted in zip(second.parameters(), straight.parameters(), strict=True):
            assert torch.equal(ours, wanted), settings
        again = _saved(state)
        assert (again["rank"], again["world_size"], again["step"]) == (rank.rank, 2, 6)
    every: list[Any] = [None, None]
    dist.all_gather_object(every, saved)
    with pytest.raises(ValueError, match=f"this is rank {1 - rank.rank}'s state"):
        state.load_state_dict(every[1 - rank.rank])
    with pytest.raises(ValueError, match="no state of version 1"):
        state.load_state_dict({})
    state.load_state_dict(every)
    assert torch.equal(state.state_dict()["residuals"]["0.weight"], saved["residuals"]["0.weight"])
    return every


def _on_three(rank: Rank, saved: Any) -> None:
    rank.init()
    heard = Heard()
    ddp, state = _make(bits=2)
    with pytest.raises(ValueError, match="saved by 2 ranks, and there are 3 now: pass a list of the states of all 2"):
        state.load_state_dict(saved[0])
    state.load_state_dict(saved)
    assert len(heard.of("residuals of 2 ranks are summed")) == int(rank.rank == 0)
    mine = state.state_dict()["residuals"]["0.weight"]
    total = mine.clone()
    dist.all_reduce(total)
    before = saved[0]["residuals"]["0.weight"] + saved[1]["residuals"]["0.weight"]
    torch.testing.assert_close(total / 3, before / 2)
    held = mine.ne(0).to(torch.int64)
    dist.all_reduce(held)
    assert held.max() == 1, "an element is held twice"
    _steps(ddp, rank.rank, 3, 4)


def test_checkpoints_on_the_same_and_another_number_of_ranks() -> None:
    saved = run_ranks(_restored, 2)[0]
    run_ranks(_on_three, 3, saved)


def _texts(rank: Rank) -> None:
    group = rank.init()
    texts = agree.gather_text(group, "é" * rank.rank, torch.device("cpu"))
    assert texts == ["é" * other for other in range(rank.world_size)]


def test_texts_of_other_lengths_and_none() -> None:
    run_ranks(_texts, 3)
