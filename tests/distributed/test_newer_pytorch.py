"""What PyTorch 2.14 and newer ask of a backend: supported, or refused with an error (docs/pytorch-versions.md).

The same file serves every minor version. Each test states the version that introduced its feature.
"""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.groups import ark_only, backend_of, total
from support.launcher import Job, run_ranks
from support.rank import Rank

import ark_torch
from ark_torch._support import minor_of

MINOR = tuple(int(part) for part in minor_of(torch.__version__).split("."))
pytestmark = [ark_only]


def since(major: int, minor: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif((major, minor) > MINOR, reason=f"new in PyTorch {major}.{minor}")


def _children_have_options_of_their_own(rank: Rank) -> None:
    given = ark_torch.Options()
    given.spin_us = 77
    parent = rank.init(pg_options=given, timeout=47)
    own = backend_of(parent).options
    before = (own.group_name, own._timeout, list(own.global_ranks_in_group))
    child = parent.split_group([0, 1], timeout=timedelta(seconds=31), group_name="child", group_desc="all")
    assert child is not None
    kept = backend_of(child).options
    assert kept is not own and kept.spin_us == 77 and kept._timeout == timedelta(seconds=31)
    assert list(kept.global_ranks_in_group) == [0, 1]
    assert (own.group_name, own._timeout, list(own.global_ranks_in_group)) == before
    total(None, 1.0)
    child.shutdown()


@pytest.mark.quick
@since(2, 14)  # earlier versions write the child's name and timeout into the parent's options
def test_a_child_group_leaves_its_parents_options_alone() -> None:
    run_ranks(_children_have_options_of_their_own, 2)


def _merged(rank: Rank) -> None:
    """Merges two groups of one rank into one of two, with the options of the first."""
    given = ark_torch.Options()
    given.spin_us = 77
    alone = dist.PrefixStore(str(rank.rank), rank.store("alone"))
    group = rank.init(pg_options=given, store=alone, rank=0, world_size=1)
    both = group.merge_remote_group(rank.store("both"), 2, timedelta(seconds=30), group_name="both")
    assert both.size() == 2
    tensor = torch.ones(3)
    both.allreduce([tensor]).wait()
    assert tensor.tolist() == [2.0] * 3
    kept = backend_of(both).options
    assert kept is not backend_of(group).options and kept.spin_us == 77
    both.shutdown()


def _extended(rank: Rank) -> str:
    group = rank.init(timeout=6)
    total(None, 1.0)
    if rank.rank == 1:
        time.sleep(9)
        total(None, 1.0)
        rank.wait_for("go")
        return ""
    group._add_ephemeral_timeout(timedelta(seconds=20))
    group._add_ephemeral_timeout(timedelta(seconds=20))
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None and work.timeout == timedelta(seconds=46)
    work.wait()  # the other rank comes after nine seconds
    after = dist.all_reduce(torch.ones(3), async_op=True)
    assert after is not None and after.timeout == timedelta(seconds=6), "the extension ended with the first"
    with pytest.raises(RuntimeError) as raised:
        after.wait()
    rank.report("raised")
    return str(raised.value)


@since(2, 14)
def test_an_ephemeral_timeout_ends_with_the_first_operation() -> None:
    with Job(_extended, 2, destroy=False) as job:
        job.wait_event(0, "raised", timeout=60)
        job.go(1, "go")
        told = job.finish(30)[0].value
    assert told is not None and "rank 1" in told


def _timeouts_of_works(rank: Rank) -> None:
    group = rank.init(timeout=47)
    mine = dist.all_reduce(torch.ones(2), async_op=True)
    assert mine is not None and mine.timeout == timedelta(seconds=47)
    asked = group.barrier(timeout=timedelta(seconds=9))
    assert asked.timeout == timedelta(seconds=9)
    # A message's extension ends with the message, too.
    group._add_ephemeral_timeout(timedelta(seconds=20))
    peer = 1 - rank.rank
    message = dist.irecv(torch.empty(2), peer)
    assert message is not None and message.timeout == timedelta(seconds=67)
    dist.barrier()  # issued while the message is pending, so it has the extension, too, and does not end it
    dist.send(torch.ones(2), peer)
    message.wait()
    later = dist.all_reduce(torch.ones(2), async_op=True)
    assert later is not None and later.timeout == timedelta(seconds=47)
    later.wait()
    mine.wait()
    with pytest.raises(ValueError, match=r"rank \d.*add_ephemeral_timeout: timeout is -1000 ms"):
        group._add_ephemeral_timeout(timedelta(seconds=-1))


@pytest.mark.quick
@since(2, 14)
def test_timeouts_of_works() -> None:
    run_ranks(_timeouts_of_works, 2)


def _abort_hooks(rank: Rank) -> list[str]:
    group = rank.init(timeout=2)
    total(None, 1.0)
    if rank.rank == 1:
        rank.wait_for("go")
        return []
    told: list[str] = []

    def broken() -> None:
        raise ValueError("a hook that fails")

    group.register_abort_hook(3, lambda: told.append("three"))
    group.register_abort_hook(4, lambda: told.append("four"))
    group.register_abort_hook(5, broken)
    group.unregister_abort_hook(4)
    with pytest.raises(RuntimeError, match="rank 1"):
        dist.all_reduce(torch.ones(2))
    assert told, "the hook came before the error"
    told.append("then")
    group.abort()
    rank.report("raised")
    return told


@since(2, 14)
def test_abort_hooks_come_before_the_error() -> None:
    with Job(_abort_hooks, 2, destroy=False) as job:
        job.wait_event(0, "raised", timeout=60)
        job.go(1, "go")
        told = job.finish(30)[0].value
    assert told == ["three", "then", "three"], told


def _gathered(rank: Rank) -> None:
    group = rank.init()
    world, me = rank.world_size, rank.rank
    gather: Any = dist.gather_single  # type: ignore[attr-defined]
    for root in range(world):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            own = torch.arange(6).reshape(2, 3).add(me * 10).to(dtype)
            wanted = torch.cat([torch.arange(6).reshape(2, 3).add(r * 10).to(dtype) for r in range(world)])
            into = torch.zeros(2 * world, 3, dtype=dtype) if me == root else None
            gather(own, into, dst=root)
            assert into is None or torch.equal(into, wanted)
            # A strided result, asynchronously.
            wide = torch.zeros(2 * world, 6, dtype=dtype)[:, ::2] if me == root else None
            work = gather(own, wide, dst=root, async_op=True)
            work.wait()
            assert wide is None or torch.equal(wide, wanted)
    empty = torch.empty(0)
    gather(empty, torch.empty(0) if me == 0 else None, dst=0)
    options = dist.GatherOptions()
    options.rootRank = 0
    if me == 0:
        with pytest.raises(ValueError, match=r"rank 0.*gather_single: gather_tensor"):
            group.gather_single(torch.empty(5), torch.ones(3), options)
    total(None, 1.0)


@pytest.mark.quick
@since(2, 14)
def test_gather_single() -> None:
    run_ranks(_gathered, 3)
    run_ranks(_gathered, 2, env={"ARK_SHARED_MEMORY": "off"})  # carried by Gloo


def _declined(rank: Rank) -> None:
    group = rank.init()
    backend = backend_of(group)
    assert not group.supports_reconfigure
    with pytest.raises(RuntimeError, match="Backend ark does not support"):
        backend.get_reconfigure_handle()
    assert group.supports_window  # tests/distributed/test_windows.py
    total(None, 1.0)


@pytest.mark.quick
@since(2, 14)
def test_what_is_declined_says_so() -> None:
    run_ranks(_declined, 2)


@since(2, 14)
def test_merge() -> None:
    run_ranks(_merged, 2)


# Stands in for the package torchcomms: it exists, but supports only Gloo.
TORCHCOMMS = {
    "__init__.py": "def is_backend_built(name):\n    return name == 'gloo'\n"
    "def new_comm(*arguments, **options):\n    raise AssertionError(f'torchcomms was asked for {arguments}')\n",
    "_comms.py": "class _BackendWrapper: ...\ndef _is_backend_registered(name):\n    return False\n",
    "hooks.py": "class FlightRecorderHook: ...\n",
}


def _as_ever(rank: Rank) -> bool:
    group = rank.init()
    assert backend_of(group).name() == "ark"
    assert total(None, 1.0) == rank.world_size
    assert total(dist.new_group([0, 1]), 2.0) == 2 * rank.world_size
    dist.barrier()
    both = dist.new_group([1, 0], backend="cpu:ark")
    assert backend_of(both).name() == "ark" and total(both, 1.0) == rank.world_size
    import torch.distributed.distributed_c10d as c10d

    return bool(c10d._use_torchcomms_enabled()) if MINOR >= (2, 14) else False


# PyTorch 2.13 passes all backend names to torchcomms.
CHOOSE = ["TORCH_DIST_USE_NCCL2", *(["TORCH_DISTRIBUTED_USE_TORCHCOMMS"] if MINOR >= (2, 14) else [])]


@pytest.mark.nightly
@pytest.mark.parametrize("variable", CHOOSE)
def test_variables_that_choose_other_backends_leave_ark_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    package = tmp_path / "torchcomms"
    package.mkdir()
    for name, text in TORCHCOMMS.items():
        (package / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Job(_as_ever, 2, spawn=True, env={variable: "1"}) as job:
        chosen = job.values(90)
    assert chosen == [MINOR >= (2, 14) and "TORCHCOMMS" in variable] * 2


class _Lying(dist.Store):
    """A store that changes what this rank reports of itself: its PyTorch, or the release in ark's own record."""

    def __init__(self, real: dist.Store, version: str = "", release: int = 0) -> None:
        super().__init__()
        self.real, self.version, self.release = real, version, release

    def set(self, key: str, value: Any) -> None:
        if self.version and key.endswith("torch/1"):
            value = self.version
        elif self.release and (record := _bytes(value)).startswith(b"ARKH"):
            value = record[:28] + self.release.to_bytes(4, "little") + record[32:]
        self.real.set(key, value)

    def get(self, key: str) -> bytes:
        return self.real.get(key)

    def check(self, keys: list[str]) -> bool:
        return self.real.check(keys)

    def add(self, key: str, amount: int) -> int:
        return self.real.add(key, amount)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self.real.wait(keys, *timeout)


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _other_release(rank: Rank, node: bool) -> str:
    """Rank 1 has an ark_torch of its own."""
    from ark_torch import _C
    from ark_torch.distributed.group import complete

    options = ark_torch.Options()
    options.node = rank.rank if node else -1
    options = complete(options)
    options._timeout = timedelta(seconds=40)
    store = rank.store("release")
    kept = _Lying(store, release=0x7_08_09) if rank.rank == 1 else store
    with pytest.raises(ValueError) as caught:
        _C.ProcessGroupArk(kept, rank.rank, rank.world_size, options)
    return str(caught.value)


@pytest.mark.parametrize("node", [False, True], ids=["one node", "two nodes"])
def test_ranks_with_another_ark_torch_do_not_meet(node: bool) -> None:
    own = ark_torch.__version__.partition("+")[0]
    for rank, text in enumerate(run_ranks(_other_release, 2, node)):
        assert text.startswith(f"ark: [rank {rank}] init: "), text
        assert text.endswith(  # by itself, or because the other rank has told it
            f"] init: ranks have different versions: ark_torch {own} on rank 0, ark_torch 7.8.9 on rank 1. Install the "
            "same version on all machines."
        ), text


def _mixed(rank: Rank, version: str) -> list[str]:
    told: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    import ark_torch.distributed.group  # creates the logger

    logging.getLogger("ark_torch").addHandler(Listener())
    store = rank.store("told")
    options = ark_torch.Options()
    from ark_torch import _C
    from ark_torch.distributed.group import complete

    options = complete(options)
    options._timeout = timedelta(seconds=40)
    for turn in ("first", "second"):
        within = dist.PrefixStore(turn, store)
        kept = _Lying(within, version) if rank.rank == 1 else within
        group = _C.ProcessGroupArk(kept, rank.rank, rank.world_size, options)
        tensor = torch.ones(2)
        group.allreduce([tensor]).wait()
        assert tensor.tolist() == [rank.world_size] * 2
        group.shutdown()
    return [line for line in told if "PyTorch versions" in line]


def test_ranks_with_other_minors_are_told_of_once() -> None:
    own = minor_of(torch.__version__)
    told = run_ranks(_mixed, 3, "2.99.1+cpu")
    assert len(told[0]) == 1 and told[1] == told[2] == [], told
    assert f"{own} on ranks 0 and 2, 2.99 on rank 1" in told[0][0], told
    assert run_ranks(_mixed, 3, f"{own}.9+cu130") == [[], [], []]
