"""Eager collectives under torch.profiler: one record_param_comms event per call, in ProcessGroupNCCL's format.

The expected names and numbers are NCCL's own, which tools such as HTA and Chakra read, so each is written out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.rank import Rank
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile

WORLD = 3
HAS_SEQUENCE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
Call = Callable[[bool], Any]


def _calls(me: int) -> list[Call]:
    """Every collective, in the order of _EXPECTED. The argument tells whether it is asynchronous."""
    parts = [torch.ones(me + 1 + peer) for peer in range(WORLD)]  # sizes differ by pair of ranks
    arrivals = [torch.empty(peer + 1 + me) for peer in range(WORLD)]
    sizes_in, sizes_out = [part.numel() for part in parts], [arrival.numel() for arrival in arrivals]
    three = [torch.empty(4) for _ in range(WORLD)]
    return [
        lambda a: dist.all_reduce(torch.ones(2, 3), async_op=a),
        lambda a: dist.broadcast(torch.ones(5, dtype=torch.int64), 1, async_op=a),
        lambda a: dist.reduce(torch.ones(7, dtype=torch.float64), 2, async_op=a),
        lambda a: dist.all_gather([torch.empty(4) for _ in range(WORLD)], torch.ones(4), async_op=a),
        lambda a: dist.all_gather_into_tensor(torch.empty(12), torch.ones(4), async_op=a),
        lambda a: dist.reduce_scatter(torch.empty(4), [torch.ones(4) for _ in range(WORLD)], async_op=a),
        lambda a: dist.reduce_scatter_tensor(torch.empty(4), torch.ones(12), async_op=a),
        lambda a: dist.all_to_all_single(torch.empty(6), torch.ones(6), async_op=a),
        lambda a: dist.all_to_all_single(torch.cat(arrivals), torch.cat(parts), sizes_out, sizes_in, async_op=a),
        lambda a: dist.all_to_all(arrivals, parts, async_op=a),
        lambda a: dist.gather(torch.ones(4), three if me == 0 else None, 0, async_op=a),
        lambda a: dist.scatter(torch.empty(4), list(torch.ones(12).chunk(3)) if me == 1 else None, 1, async_op=a),
        lambda a: dist.barrier(async_op=a),
    ]


def _expected(me: int) -> list[dict[str, Any]]:
    sizes = str([me + 1 + peer for peer in range(WORLD)])
    total = sum(me + 1 + peer for peer in range(WORLD))
    rows: list[tuple[str, int, int, str, int, str]] = [
        ("allreduce", 6, 6, "Float", me, "[]"),
        ("broadcast", 5, 5, "Long", 1, "[]"),
        ("reduce", 7, 7, "Double", 2, "[]"),
        ("all_gather", 4, 12, "Float", me, "[]"),
        ("_allgather_base", 4, 12, "Float", me, "[]"),
        ("reduce_scatter", 12, 4, "Float", me, "[]"),
        ("_reduce_scatter_base", 12, 4, "Float", me, "[]"),
        ("all_to_all", 6, 6, "Float", me, "[]"),
        ("all_to_allv", total, total, "Float", me, sizes),
        ("all_to_all", total, total, "Float", me, sizes),
        ("gather", 4, 12, "Float", 0, "[]"),
        ("scatter", 12, 4, "Float", 1, "[]"),
        ("barrier", 0, 0, "Byte", me, "[]"),
    ]
    keys = ("Collective name", "In msg nelems", "Out msg nelems", "dtype", "Rank", "In split size")
    return [{**dict(zip(keys, row, strict=True)), "Out split size": row[-1]} for row in rows]


def _events(rank: Rank, run: Callable[[], None]) -> list[dict[str, Any]]:
    """Returns the arguments of the record_param_comms events in the exported trace, in order, without waits."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        run()
    path = rank.scratch / f"trace{rank.rank}.json"
    profiler.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "record_param_comms"]
    events.sort(key=lambda event: event["ts"])
    return [e["args"] for e in events if e["args"].get("Collective name") != "wait"]


def _annotations(rank: Rank) -> list[tuple[str, bool]]:
    rank.init()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for call in _calls(rank.rank)[:2]:
            call(True).wait()
        dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.ones(2), (rank.rank + 1) % WORLD),
                dist.P2POp(dist.irecv, torch.ones(2), (rank.rank - 1) % WORLD),
            ]
        )[0].wait()
    return [(event.name, event.is_async) for event in profiler.events() if event.name.startswith("ark:")]


def test_annotations_are_named_after_the_backend() -> None:
    names = ["ark:all_reduce", "ark:broadcast", "ark:send", "ark:recv"]
    assert run_ranks(_annotations, WORLD) == [[(name, True) for name in names]] * WORLD


def _all_collectives(rank: Rank, asynchronous: bool) -> list[dict[str, Any]]:
    rank.init()

    def run() -> None:
        for call in _calls(rank.rank):
            work = call(asynchronous)
            assert (work is not None) == asynchronous
            if work is not None:
                work.wait()

    run()  # first without the profiler: lazy initialization must not appear as an event
    return _events(rank, run)


@pytest.mark.by_day("async")
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_every_collective_is_described(asynchronous: bool) -> None:
    for rank, events in enumerate(run_ranks(_all_collectives, WORLD, asynchronous)):
        expected = _expected(rank)
        assert [{key: event.get(key) for key in expected[0]} for event in events] == expected
        for event in events:
            assert event["Process Group Name"] == "0"
            assert event["Process Group Description"] == "default_pg"
            assert event["Process Group Ranks"] == "[0, 1, 2]"
            assert event["Group size"] == WORLD
        if HAS_SEQUENCE:
            sequences = [event["Seq"] for event in events]
            assert sequences == list(range(sequences[0], sequences[0] + len(events)))
            # barrier's options have no asyncOp before they reach a backend
            assert {event["Is asynchronized op"] for event in events[:-1]} == {int(asynchronous)}
        assert events[0]["Input Dims"][0] == [[2, 3]]


def _coalesced_and_messages(rank: Rank) -> list[dict[str, Any]]:
    rank.init()

    def run() -> None:
        with dist._coalescing_manager():
            dist.all_reduce(torch.ones(5))
            dist.all_reduce(torch.ones(2, 2))
        with dist._coalescing_manager():
            dist.all_gather_into_tensor(torch.empty(6), torch.ones(2))
            dist.all_gather_into_tensor(torch.empty(9), torch.ones(3))
        with dist._coalescing_manager():
            dist.reduce_scatter_tensor(torch.empty(2), torch.ones(6))
            dist.reduce_scatter_tensor(torch.empty(3), torch.ones(9))
        if rank.rank == 0:
            dist.send(torch.ones(7), 1)
        elif rank.rank == 1:
            dist.recv(torch.empty(7), 0)

    return _events(rank, run)


def test_coalesced_operations_and_messages() -> None:
    keys = ("Collective name", "In msg nelems", "Out msg nelems", "Dst Rank", "Src Rank")
    for rank, events in enumerate(run_ranks(_coalesced_and_messages, WORLD)):
        expected = [
            ("allreduce_coalesced", 9, 9, None, None),
            ("allgather_into_tensor_coalesced", 5, 15, None, None),
            ("reduce_scatter_tensor_coalesced", 15, 5, None, None),
        ]
        expected += [[("send", 7, 7, 1, None)], [("recv", 7, 7, None, 0)], []][rank]
        assert [tuple(event.get(key) for key in keys) for event in events] == expected


def _subgroup(rank: Rank) -> list[dict[str, Any]]:
    rank.init()
    pair = dist.new_group([0, 2], group_desc="pair")

    def run() -> None:
        if rank.rank != 1:
            dist.all_reduce(torch.ones(3), group=pair)

    return _events(rank, run)


def test_subgroup_is_named_with_its_global_ranks() -> None:
    events = run_ranks(_subgroup, WORLD)
    assert events[1] == []
    for rank in (0, 2):
        (event,) = events[rank]
        assert event["Process Group Description"] == "pair" and event["Process Group Name"] != "0"
        assert event["Process Group Ranks"] == "[0, 2]" and event["Group size"] == 2
        assert (event["Global rank start"], event["Global rank stride"]) == (0, 2)
        assert event["Rank"] == rank // 2


def _execution_trace(rank: Rank) -> list[dict[str, Any]]:
    rank.init()
    path = rank.scratch / f"execution{rank.rank}.json"
    observer = ExecutionTraceObserver().register_callback(str(path))
    with profile(activities=[ProfilerActivity.CPU], execution_trace_observer=observer):
        dist.all_reduce(torch.ones(6))
        dist.all_gather_into_tensor(torch.empty(4 * WORLD), torch.ones(4), async_op=True).wait()
    observer.unregister_callback()
    nodes = json.loads(path.read_text())["nodes"]
    return [node for node in nodes if node["name"] == "record_param_comms"]


def test_execution_trace_observer() -> None:
    for nodes in run_ranks(_execution_trace, WORLD):
        attributes = [{item["name"]: item["value"] for item in node["attrs"]} for node in nodes]
        assert [a["collective_name"] for a in attributes if a["collective_name"] != "wait"] == [
            "allreduce",
            "_allgather_base",
        ]
        assert attributes[0]["pg_name"] == "0" and attributes[0]["in_msg_nelems"] == 6
        assert nodes[0]["inputs"]["types"][0] == "GenericList[Tensor(float)]"
        assert nodes[0]["inputs"]["shapes"][0] == [[6]] and nodes[0]["outputs"]["shapes"][0] == [[6]]


def _threads_and_nothing(rank: Rank) -> int:
    """After a profile nothing is recorded, and a second profile starts anew."""
    rank.init()
    counts = []
    for _ in range(2):
        counts.append(len(_events(rank, lambda: dist.all_reduce(torch.ones(1)))))
        dist.all_reduce(torch.ones(1))
    assert counts == [1, 1]
    return sum(counts)


def test_profiles_begin_and_end() -> None:
    assert run_ranks(_threads_and_nothing, 2) == [2, 2]
