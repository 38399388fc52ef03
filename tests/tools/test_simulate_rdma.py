"""`ark simulate --net rdma`: closed forms, the code's own cuts and sizes, one node that stands for all."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ark_torch.simulation import collective, rdma
from ark_torch.simulation.collective import BadCall, simulate
from ark_torch.simulation.machine import Engine, Machine
from ark_torch.tools import simulate as tool

simpy = pytest.importorskip("simpy")
pytestmark = pytest.mark.quick
KB, MB = 1 << 10, 1 << 20
COSTS = Engine(setup_us=7.0, latency_us=2.0, gbps=10.0, message_us=0.25)
RATE, LATENCY = 50e3, 5.0  # of the rails: bytes a microsecond, microseconds


def made(node_ranks: int = 2, **changes: Any) -> Machine:
    engine = Engine(setup_us=3.0, latency_us=2.0, gbps=100.0)
    engines = {f"all_reduce/{name}": {2: engine} for name in collective.ENGINES} | {"between/rdma": {2: COSTS}}
    given = {"name": "m", "kind": "gpu", "node_ranks": node_ranks, "link_gbps": 50.0, "rail_gbit": RATE * 8e-3}
    return Machine(**{**given, "rail_latency_us": LATENCY, "engines": engines, **changes})  # type: ignore[arg-type]


def write_us(size: int, wire: float = RATE) -> float:
    """From a kernel's request until the other node's kernel sees the count."""
    return 2 * COSTS.message_us + size / wire + LATENCY + COSTS.latency_us


def copy_us(size: float) -> float:
    return size / (COSTS.gbps * 1e3)


def test_a_small_sum_is_one_message_to_each_node() -> None:
    size = 4 * KB
    done = simulate(made(1), "all_reduce", size, 2, net="rdma")
    assert (done.algorithm, done.engine) == ("nodes", "rdma")
    assert done.us == pytest.approx(COSTS.setup_us + copy_us(size) + write_us(size) + copy_us(2 * size))
    assert done.sent == done.received == 2 * size
    # In the node it goes as everywhere: packets, by the tables.
    two = simulate(made(2), "all_reduce", size, 4, net="rdma")
    assert two.us == pytest.approx(done.us + simulate(made(2), "all_reduce", size, 2).us)


def test_a_move_of_several_chunks_is_the_protocols() -> None:
    """One lane of four chunks: the NIC is what limits, and the last chunk is copied when it has come."""
    slow = replace(made(1), rail_gbit=1.0)
    lanes, chunk, slots = rdma.message(2, 64 * KB)
    assert lanes == [64 * KB] and chunk >= 64 * KB and slots % 2 == 0
    rail = rdma.Rail(slow, 2)
    wire = 1e3 / 8
    assert rail.stage(64 * KB) == pytest.approx(COSTS.setup_us + 2 * copy_us(64 * KB) + write_us(64 * KB, wire))
    assert rail.writes == 2 * 2 and rail.sent == 2 * 64 * KB  # of two ranks: a chunk and a credit each


@pytest.mark.parametrize("size", [1, 64 * KB, 64 * KB + 1, 3 * MB, 40 * MB + 16])
def test_messages_are_cut_as_kernels_cut_them(size: int) -> None:
    lanes, chunk, _ = rdma.message(3, size)
    assert sum(lanes) == size and len(lanes) == min(8, -(-size // (64 * KB)))
    rail = rdma.Rail(made(1), 3, folded=True)
    rail.stage(size)
    assert rail.sent == pytest.approx(2 * size)
    assert rail.writes == pytest.approx(2 * 2 * sum(-(-lane // chunk) for lane in lanes))


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("size", [12 * KB, 24 * MB])
def test_one_node_stands_for_all(operation: str, size: int) -> None:
    whole = simulate(made(2), operation, size, 6, net="rdma", folded=False)
    one = simulate(made(2), operation, size, 6, net="rdma", folded=True)
    assert one.us == pytest.approx(whole.us, rel=1e-6) and one.sent == whole.sent


def _stages(operation: str, size: int, ranks: int, node_ranks: int = 2) -> tuple[list[tuple[str, int]], rdma.Nodes]:
    calls: list[tuple[str, int]] = []

    def of_node(what: str, bytes_here: int) -> tuple[float, int]:
        calls.append((what, bytes_here))
        return 1000.0, 0

    nodes = rdma.Nodes(made(node_ranks), ranks, of_node)
    nodes.run(operation, size)
    return calls, nodes


def test_collectives_divide_as_in_the_code() -> None:
    whole, scratch, unit = (rdma.sizes()[name] for name in ("whole", "scratch", "unit"))
    assert _stages("all_reduce", whole // 2, 4)[0] == [("all_reduce", whole // 2)]
    parts = whole // 2 + 4
    assert _stages("all_reduce", parts, 4)[0] == [("reduce_scatter", parts), ("all_to_all", parts)]
    assert _stages("broadcast", whole, 4)[0] == [("broadcast", whole)]
    assert _stages("broadcast", whole + 1, 4)[0] == [("all_to_all", whole + 1)] * 2
    assert _stages("all_gather", 12 * MB, 6)[0] == [("all_gather", 4 * MB)]
    # Blocks go in slices: of all nodes' blocks, or their ranks', as many as the scratch memory holds.
    slice_ = scratch // 2 // unit * unit
    calls, nodes = _stages("reduce_scatter", 4 * (2 * slice_ + 64), 4)
    assert calls == [("reduce_scatter", 2 * slice_), ("reduce_scatter", 2 * 64)]
    assert nodes.us > 3 * 2 * 1000  # two whole slices and the rest, each of both nodes' blocks
    assert nodes.sent == 4 * (2 * slice_ + 64)
    slice_ = scratch // 6 // unit * unit
    calls, _ = _stages("all_to_all", 4 * (slice_ + 16), 4)
    assert calls == [("all_to_all", 2 * slice_), ("all_to_all", 2 * 16)]


@pytest.mark.parametrize(
    ("operation", "size", "requests"),
    [
        ("all_reduce", 8 * KB, 8), ("all_reduce", 6 * MB, 256), ("all_gather", 4 * MB, 64),
        ("reduce_scatter", 4 * MB, 64), ("all_to_all", 4 * MB, 128), ("broadcast", 64 * KB, 2),
        ("broadcast", 4 * MB, 64),
    ],
)  # fmt: skip
def test_the_code_asks_as_often(operation: str, size: int, requests: int) -> None:
    """The code's own figures: NodesTest.AsksAsOftenAsTheSimulatorSays in nodes_communicator_test.cpp."""
    _, nodes = _stages(operation, size, 4)
    assert nodes.writes == requests


@pytest.mark.parametrize("operation", collective.OPERATIONS)
def test_bytes_and_bandwidth(operation: str) -> None:
    size = 64 * MB
    one = simulate(made(2), operation, size, 8, net="rdma")
    assert one.sent == one.received >= size * (1 if operation == "broadcast" else 7) * 0.999
    larger = simulate(made(2), operation, 4 * size, 8, net="rdma")
    assert larger.us > one.us
    slow = replace(made(2), rail_gbit=RATE * 1e-3)  # an eighth: slower than what lanes copy
    assert simulate(slow, operation, 4 * size, 8, net="rdma").us > 1.2 * larger.us


def test_large_sums_use_the_rails_twice_for_each_part() -> None:
    fast = made(1, engines={"between/rdma": {2: replace(COSTS, gbps=1e3)}})
    size, nodes = 256 * MB, 4
    least = 2 * size * (nodes - 1) / nodes / RATE
    assert least < simulate(fast, "all_reduce", size, nodes, net="rdma").us < 1.15 * least


def test_what_is_not_carried() -> None:
    with pytest.raises(BadCall, match=r"65 nodes of 1 ranks: RDMA carries .* up to 64 nodes of up to 8 ranks"):
        simulate(made(1), "all_reduce", MB, 65, net="rdma")
    with pytest.raises(BadCall, match="there is no net 'pigeons' between nodes; it is one of nccl, rdma"):
        simulate(made(1), "all_reduce", MB, 2, net="pigeons")


def test_the_tool(capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["all_reduce", "1M", "--ranks", "16", "512", "--net", "rdma", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["engine"] for row in rows] == ["rdma", "rdma"] and 0 < rows[0]["us"] < rows[1]["us"]
    assert tool.main(["all_reduce", "1M", "--ranks", "4", "--machine", "namespaces", "--net", "rdma"]) == 2
    assert "use Gloo" in capsys.readouterr().err
