"""`ark simulate` for processes: closed forms, bytes between nodes, the extension's own plan, shared cores and links."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ark_torch.simulation import carried, collective
from ark_torch.simulation.machine import BadMachine, Engine, Machine, from_json
from ark_torch.simulation.processes import PAYLOAD, Bucket

simpy = pytest.importorskip("simpy")
pytestmark = pytest.mark.quick
KB, MB = 1 << 10, 1 << 20
FIRST = 1024  # bytes of a first message

MEMORY = Engine(setup_us=5.0, latency_us=1.0, gbps=10.0)
TCP = Engine(setup_us=7.0, latency_us=40.0, gbps=2.0, message_us=20.0)


def made(**changes: object) -> Machine:
    """Processes with a core for each of their threads."""
    given = {
        "name": "m", "kind": "cpu", "node_ranks": 2, "link_gbps": 1.0, "rail_gbit": 10.0, "rail_latency_us": 10.0,
        "cores": 64, "engines": {"all_reduce/shared_memory": {2: MEMORY}, "all_reduce/tcp": {2: TCP}},
    }  # fmt: skip
    return Machine(**{**given, **changes})  # type: ignore[arg-type]


def us(machine: Machine, operation: str, size: int, ranks: int) -> float:
    return collective.simulate(machine, operation, size, ranks).us


def test_one_round_of_memory() -> None:
    # Each of two ranks copies its input, then adds two.
    assert us(made(), "all_reduce", 64 * KB, 2) == pytest.approx(5 + 1 + 3 * 64 * KB / 10e3)


def test_one_message() -> None:
    # Nodes of one rank: the first message carries the input, and each rank adds two.
    alone = made(node_ranks=1)
    wire = FIRST / (10 / 8 * 1e3 * PAYLOAD)
    copied = FIRST / 2e3  # by the receiver, while the sender's copy and the wire are done
    assert max(wire, copied) <= 10 + copied
    expected = 7 + 512 / 10e3 + 20 + 10 + copied + 20 + 40 + 2 * 512 / 10e3
    assert us(alone, "all_reduce", 512, 2) == pytest.approx(expected)


def test_processes_share_cores() -> None:
    size = 4 * MB
    free, busy = us(made(), "all_gather", size, 2), us(made(cores=1), "all_gather", size, 2)
    assert busy == pytest.approx(2 * free, rel=0.01)
    apart = made(cores=2)
    assert us(replace(apart, one_host=True), "all_reduce", size, 4) > 1.3 * us(apart, "all_reduce", size, 4)


def test_a_bucket_passes_what_it_has_gathered() -> None:
    bucket = Bucket(100.0, 1000)
    assert bucket.wait(0.0, 1000) == 0
    assert bucket.wait(0.0, 500) == pytest.approx(5)
    assert bucket.wait(2.0, 100) == pytest.approx(4)  # behind the other
    assert bucket.wait(100.0, 1100) == pytest.approx(1)  # full again
    plain = Bucket(100.0, 0)
    assert plain.wait(0.0, 1000) == pytest.approx(10) and plain.wait(0.0, 1000) == pytest.approx(20)


@pytest.mark.parametrize(("nodes", "local"), [(2, 1), (2, 2), (3, 2), (2, 3)])
def test_each_byte_goes_once_to_every_node_that_needs_it(nodes: int, local: int) -> None:
    ranks, machine = nodes * local, made(node_ranks=local)
    size = 6 * MB  # divides into all parts
    needed = {
        # A node's sum goes to all others in parts, and the results come back; two nodes exchange whole sums.
        "all_reduce": size * 2 * (nodes - 1),
        "all_gather": size * (nodes - 1),
        "reduce_scatter": size * (nodes - 1),
        "broadcast": size * (nodes - 1),
        "all_to_all": size * ranks * (ranks - local) // ranks,
    }
    for operation, bytes_needed in needed.items():
        one = collective.simulate(machine, operation, size, ranks)
        peers = max(len(plan.peers) for plan in carried.plans(tuple(r // local for r in range(ranks)), ranks))
        firsts = FIRST * ranks * max(peers, ranks - local)
        rounding = ranks * 64
        assert bytes_needed - rounding <= one.sent <= bytes_needed + firsts, operation
        assert one.sent == one.received


def test_small_tensors_go_with_first_messages() -> None:
    for operation in ("all_reduce", "all_gather", "reduce_scatter"):
        one = collective.simulate(made(), operation, 256, 4)
        assert (one.algorithm, one.sent) == ("first", 4 * FIRST)
    assert collective.simulate(made(), "broadcast", 256, 4).sent == FIRST
    assert collective.simulate(made(), "all_to_all", 256, 4).sent == 8 * FIRST  # both ranks of the other node
    assert collective.simulate(made(), "all_reduce", 4 * KB, 4).algorithm == "whole"
    assert collective.simulate(made(), "all_reduce", MB, 4).algorithm == "pieces"


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize(("nodes", "local"), [(3, 1), (4, 2), (3, 3)])
@pytest.mark.parametrize("one_host", [False, True])
def test_one_node_stands_for_all(operation: str, nodes: int, local: int, one_host: bool) -> None:
    machine = made(node_ranks=local, cores=2, one_host=one_host)
    for size in (576, 72 * KB, 9 * MB):
        whole = collective.simulate(machine, operation, size, nodes * local, folded=False)
        one = collective.simulate(machine, operation, size, nodes * local, folded=True)
        # Each node begins its messages with the next one, so none is the last to hear.
        assert one.us == pytest.approx(whole.us, rel=1e-6), size
        assert one.sent * nodes == whole.sent


def test_nodes_send_in_the_order_of_the_extension() -> None:
    node_of = (0, 0, 1, 1, 2, 2)
    assert [plan.others for plan in carried.plans(node_of, 6)] == [[1, 2], [1, 2], [2, 0], [2, 0], [0, 1], [0, 1]]
    assert [carried.plan_of(node_of, rank).peers for rank in (0, 3, 4)] == [[2, 4], [5, 1], [0, 2]]
    assert carried.plan_of(node_of, 2).foreign == [4, 5, 0, 1]


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter"])
def test_no_rank_hears_from_all_at_once(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If all nodes began with the lowest rank, the last one would hear last."""
    machine = made(node_ranks=2, cores=2)
    staggered = us(machine, operation, 576, 8)
    rising = [
        replace(plan, others=sorted(plan.others), peers=sorted(plan.peers), targets=sorted(plan.targets))
        for plan in carried.plans((0, 0, 1, 1, 2, 2, 3, 3), 8)
    ]
    monkeypatch.setattr(carried, "plans", lambda node_of, ranks: rising)
    assert staggered < 0.9 * us(machine, operation, 576, 8)


def test_too_many_processes_are_refused() -> None:
    with pytest.raises(collective.BadCall, match="broadcast of 256 processes on 32 nodes of m: 256 would be simulated"):
        collective.simulate(made(node_ranks=8), "broadcast", MB, 256)


def test_parcels_save_messages() -> None:
    three = made(node_ranks=3)
    small = collective.simulate(three, "all_to_all", 6 * 64, 6)
    assert (small.algorithm, small.sent) == ("parcels", 6 * FIRST)  # one for each rank, with three blocks
    apart = collective.simulate(three, "all_to_all", 6 * 4 * KB, 6)
    assert apart.sent == 6 * (FIRST + 3 * 4 * KB)
    large = collective.simulate(three, "all_to_all", 6 * 64 * KB, 6)
    assert large.sent == 6 * (FIRST + 3 * 64 * KB)


def test_pieces_overlap_their_stages() -> None:
    # A hundred times the bytes take less than a hundred times as long, and the link is what limits.
    machine = made(rail_gbit=1.0)
    short, long = us(machine, "all_reduce", MB, 4), us(machine, "all_reduce", 64 * MB, 4)
    link = 64 * MB / (1 / 8 * 1e3 * PAYLOAD)
    assert link < long < 1.05 * link
    assert long < 64 * short


def test_calls_back_to_back() -> None:
    one = collective.simulate(made(), "all_reduce", 4 * KB, 4)
    four = collective.simulate(made(), "all_reduce", 4 * KB, 4, calls=4)
    assert four.sent == 4 * one.sent
    assert four.us == pytest.approx(one.us, rel=0.05)  # every rank needs every other's input
    # The first call empties the bucket, and is not counted.
    burst = made(rail_gbit=1.0, rail_burst=256 * KB)
    once, many = (collective.simulate(burst, "all_gather", MB, 4, calls=calls).us for calls in (1, 3))
    link = MB / 2 / (1 / 8 * 1e3 * PAYLOAD)
    assert once < 0.7 * link and many == pytest.approx(link, rel=0.05)


def test_more_bytes_and_slower_links_take_longer() -> None:
    for operation in collective.OPERATIONS:
        times = [us(made(), operation, size, 6) for size in (KB, 64 * KB, MB, 4 * MB)]
        assert times == sorted(times)
        assert us(made(rail_gbit=1.0), operation, 4 * MB, 6) > times[-1]


def test_rates_are_interpolated() -> None:
    engine = Engine(0, 0, 8.0, ((KB, 8.0), (100 * KB, 2.0)))
    assert [engine.rate(size) for size in (1, KB, 10 * KB, 100 * KB, MB)] == pytest.approx([8, 8, 4, 2, 2])


@pytest.mark.parametrize(
    ("change", "told"),
    [({"rail_burst": -1}, "rail_burst is -1"), ({"one_host": 1}, "one_host is 1"), ({"cores": 0}, "cores is 0")],
)
def test_bad_hosts_are_refused(change: dict[str, object], told: str) -> None:
    with pytest.raises(BadMachine, match=told):
        made(**change)


@pytest.mark.parametrize("rates", [5, [[1, 2, 3]], [[2, 1.0], [1, 1.0]], [[1, 0.0]]])
def test_bad_rates_are_refused(rates: object) -> None:
    described = made().to_json()
    described["engines"]["all_reduce/tcp"][2]["rates"] = rates
    with pytest.raises(BadMachine, match="rates is"):
        from_json(described)
