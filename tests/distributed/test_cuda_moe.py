"""Mixtures of experts on a pretended device: which ranks exchange data, and what is launched. No kernel runs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import pretended
from support.groups import ark_only
from support.launcher import run_ranks
from support.pretended.groups import begin
from support.rank import Rank

from ark_torch import _jit
from ark_torch.ops import moe_combine, moe_dispatch, moe_layer

pytestmark = [ark_only]


def _tokens(rank: Rank, tokens: int = 6, k: int = 2, dim: int = 64, dtype: Any = torch.bfloat16) -> list[torch.Tensor]:
    made = [torch.ones(tokens, dim, dtype=dtype), torch.zeros(tokens, k, dtype=torch.int64), torch.ones(tokens, k)]
    return [pretended.on(rank.rank, one) for one in made]


def _launches(rank: Rank) -> None:
    _jit.configure()
    group, _, _ = begin(rank)
    backend = group._get_backend(torch.device("cuda"))

    def counted(call: Any) -> tuple[int, int]:
        """Returns how many kernels the call launched, and how many operations of the group it used."""
        launches, operations = pretended.driver.pretend_launches(), backend._get_sequence_number_for_group()
        call()
        return (pretended.driver.pretend_launches() - launches,
                backend._get_sequence_number_for_group() - operations)  # fmt: skip

    # Without max_tokens, ranks exchange their numbers of tokens in every call.
    given: dict[str, Any] = {"num_experts": 4}
    for more, tokens, told in (
        ({}, 6 + rank.rank, (1, 1, 1)),
        ({"max_tokens": 8}, 6 + rank.rank, (1, 0, 0)),
        ({"max_tokens": 8}, 3 * rank.rank, (0, 0, 0)),  # tokens are not compared
    ):
        x, ids, weights = _tokens(rank, tokens)
        there = partial(moe_dispatch, x, ids, group, **given, **more)
        assert [counted(there) for _ in told] == [(2, 1 + words) for words in told]
        rows, counts, handle = there()
        assert rows.shape == (2 * handle.max_tokens * 2, 64) and counts.shape == (2,) and counts.dtype == torch.int64
        assert handle.max_tokens == (8 if more else 7) and handle.places.shape == (2, tokens, 2)
        back = partial(moe_combine, rows, handle, weights)
        assert counted(back) == (1, 2 if told[0] else 1)  # the first call with this size
        assert back().shape == (tokens, 64) and counted(back) == (1, 1)
    with pytest.raises(dist.DistBackendError, match="rank 1 has another max_rows than rank 0"):
        moe_dispatch(x, ids, group, **given, max_tokens=8, max_rows=40 + rank.rank)
    with pytest.raises(ValueError if rank.rank else dist.DistBackendError, match=r"max_tokens is 8|rank 1 refused"):
        moe_dispatch(*_tokens(rank, 9 if rank.rank else 8)[:2], group, **given, max_tokens=8, max_rows=50)
    with pytest.raises(ValueError, match="a GPU counts at most 1024"):
        moe_dispatch(x, ids, group, num_experts=2048)
    with pytest.raises(TypeError, match=r"x is torch\.float64 on cuda"):
        moe_dispatch(pretended.on(rank.rank, torch.ones(2, 4).double()), ids, group, **given)


def test_ranks_meet_when_they_must(pretended_gpu: Any) -> None:
    run_ranks(_launches, 2, env=pretended_gpu)


def _captured(rank: Rank) -> None:
    """Under capture ranks cannot meet for memory, so a block larger than any before cannot be captured first."""
    _jit.configure()
    group, _, _ = begin(rank)
    small, large = _tokens(rank), _tokens(rank, 4000, dim=512)
    moe_dispatch(*small[:2], group, num_experts=4)
    pretended.driver.pretend_capture(7)
    for _ in range(3):
        rows, _, handle = moe_dispatch(*small[:2], group, num_experts=4)
        moe_combine(rows, handle, small[2])
    with pytest.raises(ValueError, match="under graph capture, where ranks cannot meet"):
        moe_dispatch(*large[:2], group, num_experts=4)
    pretended.driver.pretend_capture(0)
    pretended.driver.pretend_graph_end(7)


def test_under_capture(pretended_gpu: Any) -> None:
    run_ranks(_captured, 2, env=pretended_gpu)


def _layer(rank: Rank) -> None:
    """Dispatch, two products and combine, in one operation of the group."""
    _jit.configure()
    group, _, _ = begin(rank)
    backend = group._get_backend(torch.device("cuda"))
    x, ids, weights = _tokens(rank)
    for gated in (True, False):
        made = [torch.ones(2, 80 * (1 + gated), 64), torch.ones(2, 64, 80)]
        w1, w2 = (pretended.on(rank.rank, one.to(torch.bfloat16)) for one in made)
        for first in (gated, False):  # ranks meet before the first
            launches, operations = pretended.driver.pretend_launches(), backend._get_sequence_number_for_group()
            assert moe_layer(x, ids, weights, w1, w2, group, max_tokens=6).shape == x.shape
            assert pretended.driver.pretend_launches() - launches == 4
            assert backend._get_sequence_number_for_group() - operations == 1 + first
    pretended.driver.pretend_capture(7)
    assert moe_layer(x, ids, weights, w1, w2, group, max_tokens=6, activation="gelu").shape == x.shape
    pretended.driver.pretend_capture(0)
    pretended.driver.pretend_graph_end(7)
    odd = [pretended.on(rank.rank, one) for one in (torch.ones(2, 80, 64), torch.ones(2, 64, 80))]
    with pytest.raises(TypeError, match=r"w1 is torch\.float32 but x is torch\.bfloat16"):
        moe_layer(x, ids, weights, *odd, group, max_tokens=6)


def test_a_layer(pretended_gpu: Any) -> None:
    run_ranks(_layer, 2, env=pretended_gpu)


def _alone(rank: Rank) -> None:
    """One rank: only kernels, no waiting."""
    _jit.configure()
    group, _, _ = begin(rank)
    x, ids, weights = _tokens(rank)
    launches = pretended.driver.pretend_launches()
    rows, _, handle = moe_dispatch(x, ids, group, num_experts=4)
    assert moe_combine(rows, handle, weights).shape == x.shape
    assert pretended.driver.pretend_launches() - launches == 3


def test_a_group_of_one(pretended_gpu: Any) -> None:
    run_ranks(_alone, 1, env=pretended_gpu)
