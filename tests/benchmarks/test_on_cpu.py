"""The GPU benchmarks on CPU tensors: results are correct, bounded and reported, whatever the times are."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import compressed
import dlrm_step
import fused
import fused_moe
import fused_products
import grouped_products
import interference
import on_gpus
import pipeline
import pytest
import torch
import training
import training_report
from support import launcher, start
from support.scripts import changed, parts_of

FOLDER = start.TESTS.parent / "benchmarks"


def run(script: str, *options: str, folder: Path, timeout: float = 150, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / script), "--output", str(folder / "out.json"), *options]
    return subprocess.run(
        command, env=start.base_environment(**env), capture_output=True, text=True, timeout=timeout, check=False
    )


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    assert found["multicast"] == "off" and found["versions"]["torch"] and found["machine"]["cpu"] and found["date"]
    return found


@changed("four_gpus.sh", "interference.py", "compressed.py")
def test_four_gpus_part_by_part(tmp_path: Path, leaves_nothing: None) -> None:
    def call(*parts: str) -> subprocess.CompletedProcess[str]:
        told = {"DEVICE": "cpu", "RANKS": "2", "SECONDS_ALL": "140", "PYTHON": sys.executable}
        command = [FOLDER / "four_gpus.sh", tmp_path, *parts]
        return subprocess.run(
            command, env=start.base_environment(**told), capture_output=True, text=True, timeout=150, check=False
        )

    first = call("dispatch", "compressed", "nonsense")
    assert first.returncode == 1 and "# dispatch: exit code 0" in first.stdout, first.stdout + first.stderr
    assert "# compressed: exit code 0" in first.stdout, first.stdout + (tmp_path / "compressed.log").read_text()
    assert {row["mb"] for row in json.loads((tmp_path / "compressed.json").read_text())["rows"]} == {0.0078125, 0.25}
    assert "# failed: nonsense" in first.stdout
    assert "nonsense is no part" in (tmp_path / "nonsense.log").read_text()
    rows = json.loads((tmp_path / "dispatch.json").read_text())["rows"]
    assert {row["contender"] for row in rows} >= {f"{launcher.BACKEND}_rings", f"{launcher.BACKEND}_bulk24"}
    assert all(row["wrong"] == 0 for row in rows)
    again = call("dispatch")  # already done, so it does not run again
    assert again.returncode == 0 and again.stdout.strip() == "# failed: none", again.stdout + again.stderr


@changed("interference.py")
@pytest.mark.parametrize("ranks", ["2", "3"])
def test_interference(ranks: str, tmp_path: Path, leaves_nothing: None) -> None:
    small = ["--megabytes", "0.02", "--rounds", "1", "--product", "32", "--window-ms", "5"]
    variants = ["--ark", "debug:ARK_DEBUG=1", "--ark", "engine:copy_engine_from=1048576"]
    done = run("interference.py", "--device", "cpu", "--ranks", ranks, *variants, *small, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = report(tmp_path)["rows"]
    contenders = ["gloo", launcher.BACKEND, f"{launcher.BACKEND}_debug", f"{launcher.BACKEND}_engine"]
    assert [(row["operation"], row["contender"]) for row in rows] == [
        (operation, contender) for operation in interference.OPERATIONS for contender in contenders
    ]
    for row in rows:
        assert row["wrong"] == 0, row
        assert row["ranks"] == int(ranks) and row["collectives"] >= 6 and row["products"] >= 6
        for key in ("product_alone_us", "alone_us", "product_us", "collective_us", "together_ms", "sooner"):
            assert row[key] > 0, (key, row)
        assert row["sooner"] == 1 or row["contender"] != "gloo"
    assert interference.table(report(tmp_path)).count("\n| ") == len(rows) + 2


@changed("fused.py")
def test_fused(tmp_path: Path, leaves_nothing: None) -> None:
    ways = ["eager_gloo", "pool", "pool_gloo", "pool_ark", "fused", "eager_step", "fused_step"]
    small = ["--shapes", "T2-D16-L4-B8", "T1-D33-L3-B5", "--rows", "50", "--rounds", "1", "--training", "--ways", *ways]
    done = run("fused.py", "--device", "cpu", *small, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = report(tmp_path)["rows"]
    assert [row["shape"] for row in rows] == ["T2-D16-L4-B8", "T1-D33-L3-B5"]
    for row in rows:
        assert list(row["us"]) == ways and all(value > 0 for value in row["us"].values()), row
        assert row["wrong"].keys() >= {"eager_gloo", "fused"} and not any(row["wrong"].values()), row
        assert row["of_pool_ark"] > 0 and row["faster_than_rival"] > 0
    assert fused.table(report(tmp_path)).count("\n| T") == len(rows)


@changed("compressed.py")
def test_compressed(tmp_path: Path, leaves_nothing: None) -> None:
    done = run("compressed.py", "--device", "cpu", "--sizes", "0.01", "0.03", "--rounds", "1", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = report(tmp_path)["rows"]
    reduces = [row for row in rows if row["work"] == "all_reduce"]
    assert [row["mb"] for row in reduces] == [0.01, 0.03]
    for row in reduces:
        assert all(value > 0 for value in row["us"].values()) and "exact_gloo" in row["us"], row
        assert row["wrong"].keys() == {"ark_8", "ark_4", "ark_2", "ark_fp8", "carried_4"}, row
        assert not any(row["wrong"].values()) and row["exact_ark_over"]["ark_4"] > 0, row
    alone = [row for row in rows if row["work"] == "quantiser"]
    assert len(alone) == 16 and all(row["quantise_gb_s"] > 0 and row["dequantise_gb_s"] > 0 for row in alone)
    table = compressed.table(report(tmp_path))
    assert table.count(" ranks |") == 2 and table.count(", nearest |") == 8


@changed("dlrm_step.py")
@pytest.mark.parametrize("ranks", ["2", pytest.param("3", marks=pytest.mark.nightly)])
def test_dlrm_step(ranks: str, tmp_path: Path, leaves_nothing: None) -> None:
    ways = ["eager_gloo", "padded_gloo", "ark"]
    small = ["--shapes", "D8-L1-B12", "D16-L3-B5", "--rows", "40", "--width", "16", "--rounds", "1", "--ways", *ways]
    done = run("dlrm_step.py", "--device", "cpu", "--ranks", ranks, *small, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = report(tmp_path)["rows"]
    assert [row["shape"] for row in rows] == ["D8-L1-B12", "D16-L3-B5"]
    for row in rows:
        assert list(row["eager_us"]) == ways and all(value > 0 for value in row["eager_us"].values()), row
        assert row["wrong"] == dict.fromkeys(ways, 0) and row["graph_us"] == {} and row["faster_eager"] > 0, row
    assert dlrm_step.table(report(tmp_path)).count("\n| D") == len(rows)


@changed("pipeline.py")
def test_pipeline(tmp_path: Path, leaves_nothing: None) -> None:
    small = ["--hidden", "32", "--heads", "2", "--sequence", "16", "--micro-batches", "4", "--layers", "2"]
    done = run("pipeline.py", "--device", "cpu", *small, "--rounds", "1", "--steps", "1", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = report(tmp_path)["rows"]
    assert [row["schedule"] for row in rows] == list(pipeline.SCHEDULES)
    for row in rows:
        assert list(row["ms"]) == ["gloo", "ark", "captured_gloo", "captured_ark"] and not row["wrong"], row
        assert row["reasons"]["captured_ark"] == "there are no graphs on CPUs" and row["faster"]["ark"] > 0, row
    assert pipeline.table(report(tmp_path)).count("(eager)") == 2 * len(rows)


@changed("fused_products.py")
def test_fused_products(tmp_path: Path, leaves_nothing: None) -> None:
    shapes = ["all_reduce-6x16x8", "reduce_scatter-8x16x10", "all_gather-8x10x16"]
    ways = ["product", "eager_gloo", "unfused", "default"]
    small = ["--shapes", *shapes, "--rounds", "1", "--ways", *ways]
    done = run("fused_products.py", "--device", "cpu", *small, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = report(tmp_path)["rows"]
    assert [row["shape"] for row in rows] == shapes
    for row in rows:
        assert list(row["eager_us"]) == ways and all(value > 0 for value in row["eager_us"].values()), row
        assert row["wrong"] == {way: 0 for way in ways if way != "product"} and not row["failed"], row
        assert row["of_product"] > 0 and row["faster_than_rival"] > 0
    table = fused_products.table(report(tmp_path))
    assert all(f"\n| {shape}" in table for shape in shapes)


@changed("fused_moe.py")
def test_fused_moe(tmp_path: Path, leaves_nothing: None) -> None:
    shapes = ["E4-K2-16x24-T6", "E2-K1-8x8-T1"]
    ways = ["experts", "eager_gloo", "even_gloo", "dispatch", "pieces", "layer", "eager_step", "step"]
    small = ["--shapes", *shapes, "--rounds", "1", "--training", "--ways", *ways]
    done = run("fused_moe.py", "--device", "cpu", *small, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = report(tmp_path)["rows"]
    assert [row["shape"] for row in rows] == shapes
    for row in rows:
        assert list(row["eager_us"]) == ways and all(value > 0 for value in row["eager_us"].values()), row
        assert row["wrong"] == {"pieces": 0, "layer": 0} and not row["failed"], row
        assert row["faster_than_rival_eager"] > 0
    table = fused_moe.table(report(tmp_path))
    assert all(f"\n| {shape}" in table for shape in shapes)


@changed("grouped_products.py")
def test_grouped_products(tmp_path: Path, leaves_nothing: None) -> None:
    small = ["--shapes", "3-16x24-10", "2-8x8-1", "--rounds", "1"]
    done = run("grouped_products.py", "--device", "cpu", *small, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = report(tmp_path)["rows"]
    assert [(sum(row["counts"]), row["spread"]) for row in rows] == [
        (total, spread) for total in (30, 2) for spread in ("even", "random", "zipf")
    ]
    assert rows[2]["counts"] == [17, 8, 5]
    for row in rows:
        assert row["us"].keys() == {"library", "experts"} and all(value > 0 for value in row["us"].values()), row
        assert row["wrong"] == {"library": 0, "experts": 0} and not row["failed"], row
    table = grouped_products.table(report(tmp_path))
    assert all(table.count(f"\n| {shape} |") == 1 for shape in ("3-16x24-10", "2-8x8-1"))


@changed("training.py")
def test_training(tmp_path: Path, leaves_nothing: None) -> None:
    modes = ["captured", "captured_fsdp2", "graph", "ddp", "fsdp2"]
    small = ["--models", "tiny", "--rounds", "1", "--steps", "1", "--bucket-mb", "0.1"]
    done = run("training.py", "--device", "cpu", "--modes", *modes, *small, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = report(tmp_path)["rows"]
    assert [(row["mode"], row["contender"]) for row in rows] == [
        (mode, contender)
        for mode in modes[:2]
        for contender in ("gloo", "captured_gloo", f"captured_{launcher.BACKEND}", training.FREE)
    ] + [(mode, contender) for mode in modes[2:] for contender in ("gloo", launcher.BACKEND, training.FREE)]
    for row in rows:
        assert row["step_ms"] > 0 and row["gradient_bytes"] > 0
        assert row["cost_ms"] == 0 or row["contender"] != training.FREE
        if row["contender"] != training.FREE:
            assert row["ranks_alike"] and row["difference"] < 1e-3, row
    assert any(row.get("buckets", 0) > 1 for row in rows)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert training_report.table(report(tmp_path)).count("\n| tiny") == len(rows)


@changed("training.py")
def test_options_of_training(tmp_path: Path, leaves_nothing: None) -> None:
    """Other models, all cores busy, single parts of the step left out, sizes of buckets by measurement."""
    models = ["--models", "tiny-llama", "--implementations", "plain", "huggingface", "--modes", "captured"]
    options = ["--busy", "--ablate", "--auto-buckets", "--rounds", "1", "--steps", "1"]
    done = run("training.py", "--device", "cpu", *models, *options, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = [f"captured_{launcher.BACKEND}_{part}" for part in ("in_place", "together")]
    contenders = ["gloo", "captured_gloo", f"captured_{launcher.BACKEND}", *parts, training.FREE]
    rows = report(tmp_path)["rows"]
    assert [(row["implementation"], row["contender"]) for row in rows] == [
        (implementation, contender) for implementation in ("plain", "huggingface") for contender in contenders
    ]
    for row in rows:
        assert row["contender"] == training.FREE or (row["ranks_alike"] and row["difference"] < 1e-3), row


@changed("decode.py", "decode_ranks.py")
def test_decoding_on_several_ranks(tmp_path: Path, leaves_nothing: None) -> None:
    other = tmp_path / "bare_loop"
    other.write_text("#!/bin/sh\necho 645 us\n")
    other.chmod(0o700)
    options = ["--device", "as-cuda", "--ranks", "2", "--ways", "eager", "ark", "--turns", "2", "--beside", str(other)]
    done = run("decode.py", *options, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out.json" / "decode_ranks_rehearsal.json").read_text())
    assert found["beside"] == {"program": "bare_loop", "lines": ["645 us"]}
    rows = found["rows"]
    assert [(row["ranks"], row["contender"]) for row in rows] == [(2, "eager"), (2, "ark")]
    for row in rows:
        assert row["microseconds"]["p90"] >= row["microseconds"]["p10"] > 0 and 0 < row["error"] < 0.02, row
    assert rows[1]["regions"] == 1 and not rows[1]["fallbacks"], rows
    assert done.stdout.count("\n| 2 |") == 2, done.stdout


@changed("interference.py", "training.py", "dma.py")
@pytest.mark.parametrize("script", ["interference.py", "training.py", "dma.py"])
def test_without_a_gpu_one_sentence(script: str, tmp_path: Path) -> None:
    done = run(script, folder=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"{script}: this PyTorch sees no GPU"
    assert not (tmp_path / "out.json").exists()


PATIENT = """
import sys
sys.path.insert(0, {folder!r})
import interference, on_gpus

if __name__ == "__main__":
    on_gpus.GRACE_S = 100  # ranks may take long to start
    sys.exit(interference.main())
"""


@changed("interference.py")
def test_what_time_does_not_allow_is_left_out(tmp_path: Path) -> None:
    script = tmp_path / "patient.py"
    script.write_text(PATIENT.format(folder=str(FOLDER)))
    # A product of the usual size in bfloat16 takes minutes on a CPU without instructions for it.
    done = run(str(script), "--device", "cpu", "--seconds", "0.1", "--product", "32", folder=tmp_path)
    assert done.returncode == 1  # nothing was measured
    assert f"{3 * len(interference.OPERATIONS)} measurements left out" in done.stdout, done.stderr
    assert report(tmp_path)["rows"] == []


SLOW = """
import os, sys, time
sys.path.insert(0, {folder!r})
import on_gpus

def body(rank, arguments):
    rank.write({{"pid": os.getpid()}})
    rank.barrier()
    if rank.rank == 1 and arguments.ark:
        raise ValueError("this rank is broken")
    time.sleep(100)

if __name__ == "__main__":
    on_gpus.GRACE_S = 1
    parser = on_gpus.parser("", "slow.json", 3)
    print("problem:", on_gpus.measure(body, parser.parse_args())[2])
"""


@changed("on_gpus.py")
@pytest.mark.parametrize("broken", [False, True])
def test_ranks_that_hang_are_ended_and_what_they_wrote_is_kept(
    broken: bool, tmp_path: Path, leaves_nothing: None
) -> None:
    script = tmp_path / "slow.py"
    script.write_text(SLOW.format(folder=str(FOLDER)))
    began = time.monotonic()
    done = run(
        str(script), "--device", "cpu", "--seconds", "8", *(["--ark", "x:A=1"] if broken else []), folder=tmp_path
    )
    assert time.monotonic() - began < 60
    why = "rank 1 of 2 failed with exit code 1" if broken else "2 ranks were not done after 8 s and were ended"
    assert f"problem: {why}" in done.stdout, done.stdout + done.stderr
    assert ("this rank is broken" in done.stderr) == broken
    found = report(tmp_path)
    assert found["problem"] == why and len(found["rows"]) == 1
    assert not os.path.exists(f"/proc/{found['rows'][0]['pid']}")


@pytest.mark.quick
def test_time_of_one_while_both_streams_were_busy() -> None:
    run_ = interference.Run([10.0, 20.0, 30.0], [15.0, 25.0])
    assert run_.total == 30
    assert run_.each(run_.collectives) == 12.5  # two in 25
    assert run_.each(run_.products) == 10  # two and a half in 25
    alone = interference.Run([10.0, 20.0, 30.0], [])
    assert alone.each(alone.products) == 10


@pytest.mark.quick
@pytest.mark.parametrize("operation", interference.CHOICES)
def test_wrong_results_are_counted(operation: str) -> None:
    rank = on_gpus.Rank(0, 1, torch.device("cpu"), 0.0, Path())
    contender = interference.Contender("ark", rank, None, operation, 1024)
    contender.renew()
    result = contender.whole
    if operation == "all_gather":
        contender.whole.copy_(contender.part)
    elif operation == "reduce_scatter":
        result = contender.part.copy_(contender.whole)
    assert contender.wrong(1) == 0
    result[5] *= 1.01
    result[7] = float("nan")
    assert contender.wrong(1) == 2


@pytest.mark.quick
def test_what_a_benchmark_is_made_of() -> None:
    parts = set(parts_of("training.py"))
    assert parts > {f"benchmarks/{name}.py" for name in ("training", "training_models", "gpu_ranks", "on_gpus")}
    assert not parts & {"benchmarks/fused.py", "benchmarks/torch.py"}


@pytest.mark.quick
def test_values_do_not_overflow() -> None:
    for ranks in range(2, 9):
        calls = interference.most_calls(ranks) + 1
        assert calls > 6 and 2.0**-126 < interference.SMALLEST * float(ranks) ** calls < 2.0**110


@pytest.mark.quick
def test_variants_of_ark() -> None:
    assert on_gpus.variant("few:ARK_A=1,ARK_B=x") == ("few", {"ARK_A": "1", "ARK_B": "x"})
    with on_gpus.environment({"ARK_TEST_X": "1"}):
        assert os.environ["ARK_TEST_X"] == "1"
    assert "ARK_TEST_X" not in os.environ
    for text in ("", ":A=1", "few:A", "few:=1"):
        with pytest.raises(on_gpus.argparse.ArgumentTypeError):
            on_gpus.variant(text)


@changed("nodes.py")
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="needs root and iproute2")
def test_nodes(tmp_path: Path) -> None:
    """Two namespaces on a shaped link: results are checked, and the table is made from the file."""
    command = [sys.executable, str(FOLDER / "nodes.py"), "--rates", "1gbit", "--sizes", "16", "300K", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)],
        env=start.base_environment(), capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    about = json.loads((tmp_path / "nodes.json").read_text())
    assert len(about["rows"]) == 2 * 7 and all(row["us"]["ark"] > 0 < row["us"]["gloo"] for row in about["rows"])
    import nodes

    assert "| all_reduce |" in nodes.table(about)


@pytest.mark.nightly
def test_contest(tmp_path: Path) -> None:
    """Every contestant is timed, and the table is made from the file."""
    command = [sys.executable, str(FOLDER / "contest.py"), "--models", "mlp, one row", "--output", str(tmp_path)]
    done = subprocess.run(
        command, env=start.base_environment(), capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    about = json.loads((tmp_path / "contest.json").read_text())
    (row,) = about["rows"]
    assert set(row["milliseconds"]) == {"eager", "inductor", "ark", "default"} and row["ratio"] > 0
    assert row["chosen"] in ("ark", "Inductor", "eager PyTorch", "not decided")
    assert row["ark_first_s"] > 0 and row["inductor_first_s"] > 0
    import contest

    assert f"| {row['model']} | {row['milliseconds']['eager']:.2f} |" in contest.table(about)


@pytest.mark.quick
def test_a_contest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are kept, failed ones are tried again, the time limit holds, and another machine's rows are dropped."""
    import contest

    times = {"eager": 2.0, "inductor": 1.5, "ark": 1.0, "default": 1.1}
    begun: list[str] = []

    def of_a_model(work: Any, name: str, *_: Any) -> dict[str, Any]:
        if work is contest.plain:
            begun.append(name)
            return {"inductor_first_s": 2.0}
        if name == "bert" and begun.count("bert") == 1:
            raise EOFError
        return {"model": name, "chosen": "ark", "milliseconds": times, "ratio": 1.1, "ark_first_s": 3.0}

    monkeypatch.setattr(contest, "in_a_process", of_a_model)

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["contest.py", "--output", str(tmp_path), "--resume", *arguments])
        return contest.main()

    assert run("--models", "bert", "gpt2", "t5", "--minutes", "0") == 1 and not begun
    assert run("--models", "gpt2", "bert") == 1 and begun == ["gpt2", "bert"]
    assert run("--models", "gpt2", "bert", "t5") == 0 and begun == ["gpt2", "bert", "bert", "t5"]
    file = tmp_path / "contest.json"
    about = json.loads(file.read_text())
    assert [row["model"] for row in about["rows"]] == ["bert", "gpt2", "t5"]  # in the order of all models
    assert "Worst default: 1.10" in contest.table(about) and "1.50 at most" in contest.table(about)
    file.write_text(file.read_text().replace('"cores": ', '"cores": 10'))
    assert run("--models", "t5") == 0 and begun.count("t5") == 2
    assert [row["model"] for row in json.loads(file.read_text())["rows"]] == ["t5"]


@pytest.mark.nightly
def test_cache_policies(tmp_path: Path) -> None:
    """Small models under all four options: the same bits, table, picture and JSON, and the plot from the JSON alone."""
    chosen = ["pooled embedding, Zipf", "softmax chain"]
    done = run("cache_policy.py", "--device", "cpu", "--turns", "2", "--only", *chosen, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = report(tmp_path)
    assert [row["application"] for row in found["rows"]] == chosen and found["left_out"] == []
    for row in found["rows"]:
        assert row["same_bits"] and row["regions"] == 1 and row["fallbacks"] == []
        assert list(row["microseconds"]) == ["auto", "none", "all-first", "all-last"]
        assert set(row["policies"]["none"]) == {"normal"}
        assert row["policies"]["all-first"]["evict_first"] == row["policies"]["all-last"]["evict_last"] > 0
    assert set(found["geometric_mean"]) == set(row["microseconds"]) and set(found["behind_best_static"]) == set(chosen)
    more = [*chosen, "norm chain"]  # the JSON's rows are kept
    again = run("cache_policy.py", "--device", "cpu", "--turns", "2", "--only", *more, folder=tmp_path)
    assert again.returncode == 0 and re.findall(r"^# (.*?): auto", again.stdout, re.M) == ["norm chain"], again.stdout
    by_name = {row["application"]: row for row in report(tmp_path)["rows"]}
    assert set(by_name) == set(more) and all(by_name[row["application"]] == row for row in found["rows"])
    plotted = run("cache_policy.py", "--plot", folder=tmp_path)
    assert plotted.returncode == 0 and "| geometric mean |" in plotted.stdout, plotted.stderr
