"""PyTorch's ranks on two "nodes" with RDMA between them over soft-RoCE and a wire that loses 1% of its packets.

tests/rdma/run.sh runs it in the guest (`make test` never does). Each test comes from test_rdma.py or test_carried.py,
with the kernel's queue pairs in place of pretended ones.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
import test_carried as carried
import test_rdma as rdma
import torch.distributed as dist
from support.launcher import Job, run_ranks
from support.rank import Rank

pytestmark = [pytest.mark.timeout(600)]
TWO = (0, 0, 1, 1)
SIZES = (4, 964, 13108, 512 << 10, (1 << 20) + 4)
# 0.27 s until a packet is resent, 2 s until a peer is lost, because an emulated processor may pause a rank that long.
ENV: dict[str, str | None] = {"ARK_NET": "rdma", "ARK_RDMA_TIMEOUT": "16"}


_now = ""


def wire(netem: str) -> None:
    global _now
    if netem == _now:
        return
    _now = netem
    for end in ("wire_a", "wire_b"):
        subprocess.run(["tc", "qdisc", "del", "dev", end, "root"], capture_output=True)
        if netem:
            subprocess.run(["tc", "qdisc", "add", "dev", end, "root", "netem", *netem.split()], check=True)


@pytest.fixture(autouse=True)
def _bad_wire() -> Iterator[None]:
    wire("loss 1%")
    yield


def at_its_end(rank: Rank) -> None:
    """Selects the device of this rank's node."""
    os.environ["ARK_RDMA_DEVICE"] = "rxe_b" if TWO[rank.rank] else "rxe_a"


def _sizes(rank: Rank) -> str:
    at_its_end(rank)
    carried._sizes(rank, TWO, SIZES)
    return str(rdma.backend_of(dist.group.WORLD).plan)


def test_all_collectives_have_the_bits_of_the_reference(slowly: Any) -> None:
    for plan in run_ranks(_sizes, 4, env=ENV, timeout=400, **slowly):
        assert plan.startswith("2 nodes (2 + 2 ranks), 2 rails") and plan.endswith("rdma between them"), plan


def _ddp(rank: Rank) -> None:
    at_its_end(rank)
    rdma._as_gloo(rank)


def test_ddp_has_the_weights_of_gloo(slowly: Any) -> None:
    run_ranks(_ddp, 4, env=ENV, timeout=400, **slowly)


def _alone(rank: Rank, how: str) -> tuple[float, str]:
    at_its_end(rank)
    return rdma._alone(rank, TWO, how, 3)


def test_a_killed_rank_ends_all_others(slowly: Any) -> None:
    with Job(_alone, 4, "killed", destroy=False, env=ENV, **slowly) as job:
        job.wait_until(lambda: all("running" in one.events for one in job.outcomes), 300, "all ranks run")
        job.kill(3)
        for outcome in job.finish(150, [0, 1, 2]):
            assert outcome.value is not None and outcome.value[0] < 30


def _through(rank: Rank) -> None:
    at_its_end(rank)
    rdma._through(rank)


def test_a_link_that_is_down_for_two_seconds_is_survived(slowly: Any) -> None:
    with Job(_through, 4, env=ENV | {"ARK_RDMA_TIMEOUT": "18"}, **slowly) as job:
        job.wait_until(lambda: all("running" in one.events for one in job.outcomes), 300, "all ranks run")
        wire("loss 100%")
        for r in range(4):
            job.go(r, "go")
        time.sleep(2.0)
        wire("loss 1%")
        job.values(200)


def test_a_link_that_is_down_for_good_ends_all_ranks(slowly: Any) -> None:
    with Job(_alone, 4, "link", destroy=False, env=ENV, **slowly) as job:
        job.wait_until(lambda: all("running" in one.events for one in job.outcomes), 300, "all ranks run")
        wire("loss 100%")
        for r in range(4):
            job.go(r, "go")
        for outcome in job.finish(150):
            assert outcome.value is not None and outcome.value[0] < 30, outcome
