"""`ark simulate`: times with a closed form, conserved bytes, monotonic growth, one node that stands for all."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ark_torch.simulation import collective, machine, measured, network, world
from ark_torch.simulation.machine import Engine, Machine
from ark_torch.tools import simulate

simpy = pytest.importorskip("simpy")
pytestmark = pytest.mark.quick
KB, MB = 1 << 10, 1 << 20


def made(**changes: object) -> Machine:
    engine = Engine(setup_us=3.0, latency_us=2.0, gbps=100.0)
    engines = {f"all_reduce/{name}": {2: engine} for name in collective.ENGINES}
    given = {"name": "m", "kind": "gpu", "node_ranks": 8, "link_gbps": 50.0, "rail_gbit": 400.0, "rail_latency_us": 5.0}
    return Machine(**{**given, "engines": engines, **changes})  # type: ignore[arg-type]


def test_one_message_is_setup_latency_and_bytes() -> None:
    # From the root to the other rank: the port (50 GB/s) is slower than the engine.
    done = collective.simulate(made(), "broadcast", MB, 2)
    assert done.us == pytest.approx(3 + 2 + MB / 50e3)
    slower = made(engines={"broadcast/lines": {2: Engine(3, 2, 10)}})
    assert collective.simulate(slower, "broadcast", MB, 2).us == pytest.approx(3 + 2 + MB / 10e3)


def test_flows_share_a_link_and_the_rest_goes_to_who_can_use_it() -> None:
    net = network.Network(network.new_environment())
    wide, narrow = network.Link("wide", 10.0), network.Link("narrow", 2.0)
    ends: dict[str, float] = {}
    for name, path, size in (("a", (wide,), 80e3), ("b", (wide, narrow), 20e3)):
        net.transfer(path, size).callbacks.append(lambda _, name=name: ends.update({name: net.env.now}))
    net.env.run()
    assert ends == pytest.approx({"b": 10.0, "a": 10.0})  # b gets the narrow link's 2, a the remaining 8
    assert wide.carried == pytest.approx(100e3) and narrow.carried == pytest.approx(20e3)
    both = network.Network(network.new_environment())
    for _ in range(2):
        both.transfer((wide,), 10e3)
    both.env.run()
    assert both.env.now == pytest.approx(2.0)  # 20 KB over 10 GB/s


@pytest.mark.parametrize("operation", collective.OPERATIONS)
def test_bytes_are_kept_and_what_must_be_sent_is(operation: str) -> None:
    size = 16 * MB
    for ranks in (2, 4, 16):
        one = collective.simulate(made(), operation, size, ranks)
        assert one.sent == one.received
        if operation == "broadcast":  # between nodes it is a sum of times, not messages
            assert one.sent >= size * 0.999
        else:  # the minimum that any algorithm sends, over all ranks
            assert one.sent >= size * (ranks - 1) * 0.999


@pytest.mark.parametrize("operation", collective.OPERATIONS)
def test_more_bytes_take_longer_and_more_bandwidth_less(operation: str) -> None:
    for ranks in (2, 64):
        # Within one algorithm. Where the tables change it, a larger tensor may be faster.
        sizes = [32 * MB, 64 * MB]
        times = [collective.simulate(made(), operation, size, ranks).us for size in sizes]
        assert times == sorted(times) and times[0] < times[-1]
        wide = replace(made(), link_gbps=60.0, rail_gbit=800.0)
        assert collective.simulate(wide, operation, sizes[-1], ranks).us < times[-1]


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("nodes", [3, 4])
def test_one_node_stands_for_all(operation: str, nodes: int) -> None:
    small = replace(made(), node_ranks=2)
    whole = collective.simulate(small, operation, 12 * MB, 2 * nodes, folded=False)
    one = collective.simulate(small, operation, 12 * MB, 2 * nodes, folded=True)
    assert one.us == pytest.approx(whole.us, rel=1e-6)
    assert one.sent * nodes == pytest.approx(whole.sent)


def test_choice_is_the_extensions() -> None:
    fields = collective.cuda_dispatch(2)
    assert collective.gpu_choice("all_reduce", fields["one_shot_to"], 2, fields) == ("one_shot", "packets")
    assert collective.gpu_choice("all_reduce", fields["one_shot_to"] + 1, 2, fields) == ("two_shot", "lines")
    assert collective.gpu_choice("all_reduce", fields["copy_engine_from"], 2, fields) == ("two_shot", "copy_engine")
    assert collective.simulate(made(), "all_reduce", fields["one_shot_to"], 2).engine == "packets"
    assert collective.cpu_choice("all_reduce", MB, 2, 2) == ("one_shot", 256 * KB)
    assert collective.cpu_choice("all_reduce", MB, 4, 2) == ("two_shot", 512 * KB)


def test_no_row_is_fitted_and_compared() -> None:
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    every = measured.rows(results)
    same = [(row.machine, row.operation, row.ranks, row.bytes, row.source, row.engine, row.rail_gbit) for row in every]
    assert len(set(same)) == len(same)
    assert any(row.fitted for row in every) and any(not row.fitted for row in every)


def test_presets_hold_what_was_written() -> None:
    for name, one in machine.presets().items():
        assert one.name == name and one.fitted_from
        assert machine.from_json(json.loads(json.dumps(one.to_json()))) == one


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"kind": "tpu"}, "kind is 'tpu'"),
        ({"node_ranks": 0}, "node_ranks is 0"),
        ({"link_gbps": -1}, "link_gbps is -1"),
        ({"rail_gbit": float("nan")}, "rail_gbit is nan"),
        ({"rail_latency_us": -2}, "rail_latency_us is -2"),
        ({"engines": {}}, "engines has none"),
        ({"colour": 1}, "no field 'colour'"),
        ({"engines": {"lines": {}}}, "OPERATION/ENGINE"),
        ({"engines": {"all_reduce/lines": {"two": {}}}}, "'two' is no number of ranks"),
        ({"engines": {"all_reduce/lines": {"2": {"setup_us": 1}}}}, "missing"),
        ({"engines": {"all_reduce/lines": {"2": {"setup_us": 1, "latency_us": 1, "gbps": 0}}}}, "gbps is 0"),
    ],
)
def test_bad_machines_are_refused(
    change: dict[str, object], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    described = {**json.loads(json.dumps(made().to_json())), **change}
    (tmp_path / "m.json").write_text(json.dumps(described))
    assert simulate.main(["all_reduce", "1M", "--machine", str(tmp_path / "m.json")]) == 2
    error = capsys.readouterr().err
    assert told in error and error.startswith("ark simulate: ")


def test_json_and_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["all_reduce", "1K", "64M", "--ranks", "2", "16", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["ranks"], row["bytes"]) for row in rows] == [(2, KB), (2, 64 * MB), (16, KB), (16, 64 * MB)]
    assert all(row["us"] > 0 for row in rows)
    assert simulate.main(["broadcast", "8K"]) == 0
    assert "broadcast" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["all_reduse", "1M"], "there is no operation 'all_reduse'"),
        (["all_reduce", "1M", "--ranks", "8192"], "takes 2 to 4096"),
        (["all_reduce", "1M", "--ranks", "12"], "do not fill nodes of 8"),
        (["all_reduce", "1M", "--engine", "pigeons"], "there is no engine 'pigeons'"),
        (["all_reduce", "1M", "--engine", "lines", "--ranks", "16"], "GPUs of one node alone"),
        (["all_reduce", "1M", "--engine", "lines", "--machine", "processes"], "GPUs of one node alone"),
        (["all_reduce", "1M", "--machine", "abacus"], "machines are"),
        (["all_reduce", "much"], "much"),
    ],
)
def test_wrong_calls(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(arguments) == 2
    assert told in capsys.readouterr().err


def test_without_simpy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "simpy", None)
    assert simulate.main(["all_reduce", "1M"]) == 2
    assert "pip install" in capsys.readouterr().err


def test_4096_ranks() -> None:
    one = collective.simulate(made(), "all_reduce", MB, 4096)
    assert one.us > collective.simulate(made(), "all_reduce", MB, 64).us
    assert world.World(made(), 4096, folded=True).every() == list(range(8))
