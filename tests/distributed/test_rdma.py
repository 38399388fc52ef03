"""Groups over several nodes with RDMA between them: over a pretended libibverbs (tests/support/pretended/verbs).

These tests repeat those of test_carried.py over queue pairs: the bits of all collectives, how groups fail, and the
errors where RDMA is not possible. tests/rdma runs soft-RoCE with the kernel's real verbs.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import resource
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import test_carried as carried
import torch
import torch.distributed as dist
from support import pretended
from support.groups import ark_only, backend_of
from support.launcher import Job, run_ranks
from support.pretended import verbs
from support.rank import Rank

pytestmark = [ark_only]

Env = dict[str, str | None]
LOCKED = 7 << 20  # bytes of memory that may be locked
TWO, UNEVEN, STAR = (0, 0, 1, 1), (0, 0, 1, 1, 1), (1, 0, 0, 0)


@pytest.fixture
def control(tmp_path: Path) -> verbs.Control:
    return verbs.Control(tmp_path / "control")


@pytest.fixture
def env(pretended_verbs: str, control: verbs.Control) -> Env:
    """Ranks must use RDMA. Packets are resent after 34 ms, and a peer is lost after a quarter of a second."""
    return {
        "ARK_NET": "rdma",
        "ARK_RDMA_LIBRARY": pretended_verbs,
        "ARK_RDMA_TIMEOUT": "13",
        "ARK_TEST_VERBS_CONTROL": str(control.path),
    }


def _sizes(rank: Rank, placement: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[str, list[str]]:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ark_torch").addHandler(handler)
    logging.getLogger("ark_torch").setLevel(logging.INFO)
    carried._sizes(rank, placement, sizes)
    return backend_of(dist.group.WORLD).plan, heard


@pytest.mark.parametrize(
    "placement", [carried.by_night((0, 1)), TWO, carried.by_night(UNEVEN), carried.by_night(STAR)], ids=str
)
def test_sizes(placement: tuple[int, ...], env: Env) -> None:
    values = run_ranks(_sizes, len(placement), placement, carried.SIZES, env=env)
    for plan, _ in values:
        assert plan.endswith(", rdma between them"), plan
    said = "\n".join(values[0][1])
    assert "RDMA" in said and "RoCE, MTU 4096; here pretend0 port 1, GID 3 (RoCE v2, IPv4: 10.77.0.1)" in said, said


def test_sizes_over_a_bad_link(env: Env, control: verbs.Control) -> None:
    control.set(loss=100, lose_completions=3, swap_completions=1, receiver_not_ready=5)
    env["ARK_RDMA_TIMEOUT"] = "11"
    run_ranks(_sizes, 4, TWO, carried.SIZES, env=env)


@pytest.mark.nightly
@pytest.mark.parametrize("placement", [TWO, UNEVEN], ids=str)
def test_every_type(placement: tuple[int, ...], env: Env) -> None:
    run_ranks(carried._every_type, len(placement), placement, (7, 40_001), timeout=200, env=env)


def _as_gloo(rank: Rank) -> None:
    """The same inputs over Gloo and over RDMA give the same bits, also in a model's steps under DDP."""
    results = []
    for net in ("gloo", "rdma"):
        os.environ["ARK_NET"] = net
        carried.on_nodes(rank, TWO)
        assert f"{net} between them" in backend_of(dist.group.WORLD).plan
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.Tanh(), torch.nn.Linear(300, 10))
        ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.05)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            data = torch.randn(16, 64, generator=torch.Generator().manual_seed(100 * step + rank.rank))
            optimizer.zero_grad()
            ddp(data).square().mean().backward()
            optimizer.step()
        results.append(copy.deepcopy(model.state_dict()))
        del ddp
        dist.destroy_process_group()
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def test_ddp_has_the_weights_of_gloo(env: Env) -> None:
    run_ranks(_as_gloo, 4, env=env)


def test_subgroups_and_messages_beside(env: Env) -> None:
    run_ranks(_subgroups, 5, env=env)


def _subgroups(rank: Rank) -> None:
    """Groups share the NIC. The user's own messages go over Gloo, whatever their tags."""
    carried.on_nodes(rank, UNEVEN)
    for members in ([1, 2], [4, 0, 3], [2, 3]):
        group = dist.new_group(members)
        if rank.rank in members:
            assert backend_of(group).plan.endswith("rdma between them") == (members != [2, 3])
            for count in (3, 100_000):
                x = torch.full((count,), float(rank.rank))
                dist.all_reduce(x, group=group)
                assert x.unique().tolist() == [sum(members)]
    got = torch.empty(50_000)
    messages = [
        dist.isend(torch.full((50_000,), float(rank.rank)), (rank.rank + 1) % 5, tag=3),
        dist.irecv(got, (rank.rank + 4) % 5, tag=3),
    ]
    x = torch.ones(200_000)
    dist.all_reduce(x)
    assert x.unique().tolist() == [5.0]
    for message in messages:
        message.wait()
    assert got.unique().tolist() == [(rank.rank + 4) % 5]


@pytest.mark.by_day("large")
@pytest.mark.parametrize("call", ["size", "large", "root", "kind"])
def test_ranks_that_disagree(env: Env, call: str) -> None:
    run_ranks(carried._disagree, 4, TWO, call, env=env)


def _alone(rank: Rank, placement: tuple[int, ...], how: str, quiet: int) -> tuple[float, str]:
    """One rank does not call: it is stopped, killed, or calls abort(). Or the link is down for all."""
    group = carried.on_nodes(rank, placement, timeout=5.0 if how == "timeout" else 60.0)
    dist.all_reduce(torch.ones(300_000))
    rank.report("running")
    if how == "link":
        rank.wait_for("go")
    elif rank.rank == quiet:
        if how == "abort":
            rank.wait_for("abort")  # all ranks are past the first operation
            time.sleep(0.5)
            group.abort()
        rank.wait_for("go")
        return 0.0, ""
    began = time.monotonic()
    words = {
        "abort": rf"abort\(\) was called on rank {quiet}",
        "timeout": "timed out after 5000 ms|failed to hear in 5000 ms",
        "killed": rf"rank {quiet} is gone|failed with rank {quiet}|RDMA with rank {quiet} ",
        "link": r"RDMA with rank \d over \w+ failed: the peer's NIC did not answer",
    }
    with pytest.raises(RuntimeError, match=words[how]) as raised:
        for _ in range(1000):
            dist.all_reduce(torch.ones(300_000))
    took = time.monotonic() - began
    with pytest.raises(RuntimeError):
        dist.barrier()
    rank.report("ended")
    return took, str(raised.value)


@pytest.mark.by_day("lone-1-timeout", "TWO-3-abort", "TWO-3-killed")
@pytest.mark.parametrize("how", ["abort", "timeout", "killed"])
@pytest.mark.parametrize(
    "placement, quiet",
    [pytest.param((0, 1), 1, id="lone-1"), pytest.param(TWO, 3, id="TWO-3"), pytest.param(UNEVEN, 0, id="UNEVEN-0")],
)
def test_what_ends_a_collective(placement: tuple[int, ...], quiet: int, how: str, env: Env) -> None:
    world = len(placement)
    with Job(_alone, world, placement, how, quiet, destroy=False, env=env) as job:
        job.wait_all("running")
        if how == "killed":
            time.sleep(0.3)
            job.kill(quiet)
        elif how == "abort":
            job.go(quiet, "abort")
        others = [r for r in range(world) if r != quiet]
        for r in others:
            job.wait_event(r, "ended", timeout=20)
        if how != "killed":
            job.go(quiet, "go")
        for outcome in job.finish(20, others):
            assert outcome.value is not None and outcome.value[0] < 10


def test_a_link_that_stays_away_ends_all_ranks(env: Env, control: verbs.Control) -> None:
    with Job(_alone, 4, TWO, "link", 0, destroy=False, env=env) as job:
        job.wait_all("running")
        control.set(link_down=1)
        for r in range(4):
            job.go(r, "go")
        texts = [text for _, text in job.values(30)]
    assert all("status 12" in text for text in texts), texts
    assert any("ARK_RDMA_RETRY_COUNT" in text for text in texts), texts  # the rank that detects it names the remedy


def _through(rank: Rank) -> None:
    carried.on_nodes(rank, TWO)
    dist.all_reduce(torch.ones(3))
    rank.report("running")
    rank.wait_for("go")
    for _ in range(5):
        x = torch.ones(300_000)
        dist.all_reduce(x)
        assert x.unique().tolist() == [4.0]


def test_a_link_that_comes_back_is_survived(env: Env, control: verbs.Control) -> None:
    env["ARK_RDMA_TIMEOUT"] = "17"  # 0.54 s, seven times
    with Job(_through, 4, env=env) as job:
        job.wait_all("running")
        control.set(link_down=1)
        for r in range(4):
            job.go(r, "go")
        time.sleep(1.0)
        control.set(link_down=0)
        job.values(60)


def _refused(rank: Rank, words: str, own: dict[int, dict[str, str]]) -> str:
    os.environ.update(own.get(rank.rank, {}))
    with pytest.raises(ValueError, match=words) as raised:
        carried.on_nodes(rank, (0, 1))
    return str(raised.value)


@pytest.mark.by_day("device", "mtu")
@pytest.mark.parametrize(
    "own, words",
    [
        (
            {1: {"ARK_RDMA_DEVICE": "mlx5_9"}},
            r"rank 1 has no RDMA: there is no RDMA device \"mlx5_9\" \(ARK_RDMA_DEVICE\)",
        ),
        ({0: {"ARK_RDMA_GID_INDEX": "7"}}, r"rank 0 has no RDMA: .*GID 7 \(ARK_RDMA_GID_INDEX\) is empty; there are 0"),
        ({1: {"ARK_RDMA_PORT": "3"}}, r"rank 1 has no RDMA: .*it has 1 ports, and number 3"),
        ({1: {"ARK_NET": "gloo"}}, r"rank 0 asks for RDMA.*and rank 1 has ARK_NET=gloo"),
        (
            {1: {"ARK_RDMA_MTU": "2048"}},
            r"rank 1 asks for an MTU of 2048 bytes \(ARK_RDMA_MTU\), and rank 0 asks for none",
        ),
    ],
    ids=["device", "gid", "port", "gloo", "mtu"],
)
def test_what_one_rank_lacks_is_every_ranks_error(env: Env, own: dict[int, dict[str, str]], words: str) -> None:
    for text in run_ranks(_refused, 2, words, own, env=env):
        assert "ark: [rank" in text


@pytest.mark.by_day("down")
@pytest.mark.parametrize(
    "faults, words",
    [
        ({"port_down": 1}, "pretend0: its port 1 is down: bring its network interface up"),
        ({"no_devices": 1}, "libibverbs finds no RDMA device"),
    ],
    ids=["down", "none"],
)
def test_where_no_rank_has_it(env: Env, control: verbs.Control, faults: dict[str, int], words: str) -> None:
    control.set(**faults)
    run_ranks(_refused, 2, re.escape(words), {}, env=env)


def _mixed_mtu(rank: Rank) -> list[str]:
    if rank.rank == 1:
        os.environ["ARK_RDMA_DEVICE"] = "pretend1"
    return _sizes(rank, (0, 1), (4, 21836))[1]


def test_mixed_mtus_take_the_least(env: Env, control: verbs.Control) -> None:
    control.set(small_mtu=1)
    said = "\n".join(run_ranks(_mixed_mtu, 2, env=env)[0])
    assert "MTU 1024 (the least: rank 1; rank 0 has 4096)" in said, said


def _striped(rank: Rank) -> tuple[str, list[str]]:
    said = _sizes(rank, TWO, (4, 2_000_001))[1]
    rank.report("running")
    rank.wait_for("go")
    for _ in range(3):
        x = torch.ones(2_000_001)
        dist.all_reduce(x)
        assert x.unique().tolist() == [4.0]
    return backend_of(dist.group.WORLD).rdma_trouble, said


@pytest.mark.by_day("none", "link")
@pytest.mark.parametrize("fault", ["none", "link", "port"])
def test_two_nics_a_rank(env: Env, control: verbs.Control, fault: str) -> None:
    """Large collectives along both; one whose link goes, or that is down from the start, is left out and named."""
    control.set(port_down_1=int(fault == "port"))
    with Job(_striped, 4, env=env | {"ARK_RDMA_DEVICE": "all"}) as job:
        job.wait_all("running", timeout=60)
        control.set(link_down_1=int(fault == "link"))
        for r in range(4):
            job.go(r, "go")
        values = job.values(60)
    said = "\n".join(values[0][1])
    if fault == "port":
        assert "left out here: no RDMA device can be used: pretend1: its port 1 is down" in said, said
    else:
        assert "RoCE, MTU 4096, 2 rails; here pretend0 port 1" in said and " and pretend1 port 1" in said, said
    for rank, (trouble, _) in enumerate(values):
        words = f"pretend1 is not used with rank {(rank + 2) % 4}: " if fault == "link" else ""
        assert (words in trouble) if words else trouble == "", trouble


def _falls_back(rank: Rank) -> tuple[str, list[str]]:
    if rank.rank == 1:
        os.environ["ARK_RDMA_DEVICE"] = "nothing"
    return _sizes(rank, (0, 1), (4, 21836))


def test_auto_takes_gloo_where_a_rank_has_none_and_says_why(env: Env) -> None:
    values = run_ranks(_falls_back, 2, env=env | {"ARK_NET": "auto"})
    for plan, _ in values:
        assert plan.endswith("gloo between them")
    said = "\n".join(values[0][1])
    assert 'no RDMA: rank 1 has no RDMA: there is no RDMA device "nothing"' in said, said


def _through_gloo(rank: Rank) -> tuple[str, list[str]]:
    return _sizes(rank, TWO, (4, 21836))


def test_auto_takes_gloo_where_the_network_reaches_nobody(env: Env, control: verbs.Control) -> None:
    control.set(link_down=1)
    values = run_ranks(_through_gloo, 4, env=env | {"ARK_NET": "auto"})
    assert all(plan.endswith("gloo between them") for plan, _ in values)
    said = "\n".join(values[0][1])
    assert "no RDMA: rank 0 was refused by the network: RDMA with rank 2 over pretend0 failed" in said, said


def test_a_network_that_reaches_nobody_is_an_error_where_rdma_is_asked_for(env: Env, control: verbs.Control) -> None:
    control.set(link_down=1)
    run_ranks(_refused, 2, r"asks for RDMA.*and rank 0 was refused by the network: .*did not answer", {}, env=env)


def test_an_address_that_cannot_be_reached_is_told(env: Env, control: verbs.Control) -> None:
    control.set(unreachable=1)
    words = r"was refused by the network: .*the connection to rank \d cannot become ready to receive on pretend0"
    run_ranks(_refused, 2, words, {}, env=env)


def test_auto_takes_rdma_where_all_have_it(env: Env) -> None:
    for plan, _ in run_ranks(_sizes, 2, (0, 1), (4,), env=env | {"ARK_NET": "auto"}):
        assert plan.endswith("rdma between them")


class _Damaging(dist.Store):
    """A store that damages what this rank writes of one kind."""

    def __init__(self, real: dist.Store, magic: bytes) -> None:
        super().__init__()
        self.real, self.magic = real, magic

    def set(self, key: str, value: Any) -> None:
        record = value.encode() if isinstance(value, str) else bytes(value)
        self.real.set(key, record[:4] + b"\x09" + record[5:] if record.startswith(self.magic) else value)

    def get(self, key: str) -> bytes:
        return self.real.get(key)

    def check(self, keys: list[str]) -> bool:
        return self.real.check(keys)

    def add(self, key: str, amount: int) -> int:
        return self.real.add(key, amount)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self.real.wait(keys, *timeout)


def _damaged(rank: Rank, magic: bytes) -> str:
    os.environ["ARK_NODE"] = str(rank.rank)
    store = rank.store("damaged")
    with pytest.raises((ValueError, RuntimeError)) as raised:
        rank.init(timeout=30, store=_Damaging(store, magic) if rank.rank == 1 else store)
    return str(raised.value)


@pytest.mark.parametrize(
    ("magic", "record"), [(b"ARKO", "RDMA offer"), (b"ARKE", "RDMA handle record")], ids=["offer", "handle"]
)
def test_malformed_records_are_rejected_and_their_rank_named(env: Env, magic: bytes, record: str) -> None:
    said = run_ranks(_damaged, 2, magic, env=env)
    assert f"of rank 1: {record} rejected: version is 9, not 2" in said[0], said
    assert "Run the same version of ark_torch on all ranks" in said[0] and "rank 1" in said[1], said


def _memory(rank: Rank) -> str:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (LOCKED, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]))
    carried.on_nodes(rank, (0, 1))
    dist.all_reduce(torch.ones(3))
    rank.report("running")
    rank.wait_for("go")
    with pytest.raises(RuntimeError, match=r"cannot register|failed") as raised:
        dist.all_gather([torch.empty(1_000_000) for _ in range(2)], torch.ones(1_000_000))
    return str(raised.value)


def test_memory_that_may_not_be_locked(env: Env, control: verbs.Control) -> None:
    with Job(_memory, 2, destroy=False, env=env) as job:
        job.wait_all("running")
        control.set(most_memory=700)
        for r in range(2):
            job.go(r, "go")
        said = [str(outcome.value) for outcome in job.finish(30)]
    told = [text for text in said if "bytes of memory with pretend0" in text]
    # The limit itself; and the command, from a rank that was refused, not from one that has heard of it.
    assert told and all(f"limited to {LOCKED >> 10} KiB (ulimit -l)" in text for text in told), said
    assert any("`ulimit -l unlimited`" in text for text in told), said


def _doctor(rank: Rank) -> str:
    from ark_torch.tools import _probe_rdma

    return "".join(f"{row['state']} {row['found']} -> {row['advice']}" for row in _probe_rdma.rows())


def test_doctor_tells_the_device_or_why_there_is_none(env: Env, control: verbs.Control) -> None:
    def told(**changes: str) -> str:
        return str(run_ranks(_doctor, 1, env=env | changes)[0])

    assert told().startswith("ok pretend0 port 1, GID 3 (RoCE v2, IPv4: 10.77.0.1), MTU 4096\n")
    assert "counts as lost after 0.235 s" in told()
    control.set(port_down=1)
    assert "its port 1 is down" in told() and "warn" in told(), "it is asked for"
    assert told(ARK_RDMA_LIBRARY=__file__, ARK_NET="auto").startswith("info none, so Gloo carries groups")


def _doctor_of_gpus(rank: Rank) -> list[str]:
    from ark_torch.tools import _probe_rdma

    pretended.enter()
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 2
    pretended.driver.pretend_dma_buf(1, 100)
    found = [_probe_rdma.rows()[0]["found"]]
    pretended.driver.pretend_dma_buf(1, 0)
    return [*found, _probe_rdma.rows()[0]["found"]]


def test_doctor_tells_which_nics_reach_gpu_memory(pretended_gpu: dict[str, str | None], env: Env) -> None:
    both = env | pretended_gpu | {"ARK_RDMA_DEVICE": "all"}
    reached, not_reached = run_ranks(_doctor_of_gpus, 1, env=both)[0]
    for gpu in range(2):
        for nic in ("pretend0", "pretend1"):
            assert f"memory of cuda:{gpu} from {nic}: reached directly, by dma-buf" in reached, reached
    assert "memory of cuda:0 from pretend0: not reached, so it goes through the host's memory: kernels" in not_reached
