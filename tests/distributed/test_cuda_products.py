"""Products with collectives on a pretended device: which ranks meet, and when one kernel is launched. None runs."""

from __future__ import annotations

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
from ark_torch.ops import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter

pytestmark = [ark_only]
OPERATORS = (matmul_all_reduce, matmul_reduce_scatter, all_gather_matmul)


def _matrices(rank: Rank, m: int = 16, k: int = 64, n: int = 128, dtype: Any = torch.bfloat16) -> list[torch.Tensor]:
    return [pretended.on(rank.rank, torch.ones(size, dtype=dtype)) for size in ((m, k), (k, n))]


def _one_kernel(rank: Rank) -> None:
    _jit.configure()
    group, _, _ = begin(rank)
    backend = group._get_backend(torch.device("cuda"))

    def counted(call: Any) -> tuple[int, int]:
        """Returns how many kernels the call launched, and how many operations of the group it used."""
        launches, operations = pretended.driver.pretend_launches(), backend._get_sequence_number_for_group()
        call()
        return (pretended.driver.pretend_launches() - launches,
                backend._get_sequence_number_for_group() - operations)  # fmt: skip

    for operator in OPERATORS:
        a, b = _matrices(rank)
        shapes = []
        call = lambda: shapes.append(operator(a, b, group, form="fused").shape)  # noqa: B023, E731
        assert [counted(call) for _ in range(3)] == [(1, 2), (1, 1), (1, 1)]  # ranks meet before the first
        rows = {matmul_all_reduce: 16, matmul_reduce_scatter: 8, all_gather_matmul: 32}[operator]
        assert shapes == [(rows, 128)] * 3
        # Depths (columns) that differ between ranks do not make it another call.
        own = _matrices(rank, n=128 + 8 * rank.rank) if operator is all_gather_matmul else _matrices(
            rank, k=64 + 8 * rank.rank)  # fmt: skip
        assert counted(lambda: operator(*own, group, form="fused")) == (1, 1)  # noqa: B023
        with pytest.raises(dist.DistBackendError, match="rank 1 has another number of rows of a than rank 0"):
            operator(*_matrices(rank, m=32 + 2 * rank.rank), group, form="fused")
        other = _matrices(rank, m=24)
        with pytest.raises(dist.DistBackendError, match="another form"):
            operator(*other, group, form="fused" if rank.rank else "unfused")
        with pytest.raises(ValueError if rank.rank else dist.DistBackendError, match=r"columns of a|rank 1 refused"):
            operator(other[0], other[1] if rank.rank == 0 else other[0], group, form="fused")
        assert counted(call) == (1, 1)
    large = _matrices(rank, m=4096, k=8, n=2048)
    assert counted(lambda: matmul_all_reduce(*large, group)) == (1, 2)  # as the rule chooses
    long = _matrices(rank, m=4 * 16384 + 2, k=8, n=8)  # more rows than flags for groups of four
    assert counted(lambda: all_gather_matmul(*long, group, form="fused")) == (1, 2)


def test_ranks_meet_before_the_first_call_of_a_shape(pretended_gpu: Any) -> None:
    run_ranks(_one_kernel, 2, env=pretended_gpu)


def _copied(rank: Rank) -> tuple[list[str], list[str]]:
    _jit.configure()
    group, _, lines = begin(rank)
    a, b = _matrices(rank)
    all_gather_matmul(a, b, group, form="fused")  # which stores no result elsewhere
    before = lines.about("fused operator")
    for _ in range(3):
        matmul_all_reduce(a, b, group, form="fused")
    return before, lines.about("fused operator")


def test_a_copy_of_results_is_told_once(pretended_gpu: Any) -> None:
    for rank, (before, told) in enumerate(run_ranks(_copied, 2, env=pretended_gpu)):
        assert before == [] and len(told) == int(rank == 0), told
        assert all("copied once" in line and "register_mem_pool(ark_torch.memory.pool())" in line for line in told)


def _captured(rank: Rank) -> None:
    """A result that needs more memory than exists cannot be captured first."""
    _jit.configure()
    group, _, _ = begin(rank)
    small, large = _matrices(rank), _matrices(rank, m=512, n=512)
    matmul_all_reduce(*small, group, form="fused")
    pretended.driver.pretend_capture(7)
    outs = [matmul_all_reduce(*small, group, form="fused") for _ in range(3)]
    assert len({out.data_ptr() for out in outs}) == 3
    with pytest.raises(ValueError, match="under graph capture, where ranks cannot meet"):
        matmul_all_reduce(*large, group, form="fused")
    pretended.driver.pretend_capture(0)
    matmul_all_reduce(*large, group, form="fused")
    pretended.driver.pretend_capture(8)
    matmul_all_reduce(*large, group, form="fused")
    pretended.driver.pretend_capture(0)
    for graph in (7, 8):
        pretended.driver.pretend_graph_end(graph)


def test_under_capture(pretended_gpu: Any) -> None:
    run_ranks(_captured, 2, env=pretended_gpu)


def _cannot(rank: Rank) -> None:
    _jit.configure()
    group, _, _ = begin(rank)
    for kind, text in (
        ({"dtype": torch.float32}, "it knows float16 and bfloat16, and a is torch.float32"),
        ({"n": 100, "k": 100}, "are no multiple of 8"),
        ({"m": 0}, "there is nothing to send"),
    ):
        for operator in OPERATORS:
            with pytest.raises(ValueError, match=text):
                operator(*_matrices(rank, **kind), group, form="fused")
    large = _matrices(rank, m=65536, k=8, n=4096)
    told = r"the tiles of a rank's part of the result of 128 x 256 are 4096, more than 2048\. Pass form='auto'"
    for operator in (matmul_all_reduce, matmul_reduce_scatter):
        with pytest.raises(ValueError, match=told):
            operator(*large, group, form="fused")
    pretended.driver.pretend_capability(80)
    with pytest.raises(ValueError, match="it needs a Hopper GPU"):
        matmul_all_reduce(*_matrices(rank), group, form="fused")


def test_what_the_kernel_cannot_take(pretended_gpu: Any) -> None:
    run_ranks(_cannot, 2, env=pretended_gpu)
