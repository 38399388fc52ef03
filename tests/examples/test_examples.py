"""The examples run as users run them: with plain python, which starts two ranks, and under torchrun with three.

Each example compares itself with a single process and fails if they differ, so the exit code is the verdict. The output
is checked as well, because a rank that did nothing would exit with 0, too. The demo runs on a tiny model. Its own
comparison of the runs is tested here with weights that do differ.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import launcher, processes, start

EXAMPLES = start.TESTS.parent / "examples"
of_examples = pytest.mark.changed("examples/*")
TINY = ["--steps=12", "--layers=2", "--width=32", "--context=32", "--batch=4", "--ranks=2", "--tokens=60"]


def run(command: list[str], folder: Path, timeout: float = 150.0) -> subprocess.CompletedProcess[str]:
    """Runs a command and ends everything below it in all cases (torchrun's ranks have their own sessions)."""
    environment = start.base_environment(COLUMNS="120")
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        processes.end_tree([process.pid, *processes.descendants(process.pid)])
    return subprocess.CompletedProcess(command, process.returncode, output, "")


@pytest.mark.parametrize(
    "name, ranks",
    [
        pytest.param("ddp", 2),
        *(pytest.param(name, 2, marks=of_examples) for name in ("fsdp2", "tensor_parallel")),
        pytest.param("captured_training", 2, marks=pytest.mark.changed("examples/*", "ark_torch/train/*")),
        *(pytest.param(name, 3, marks=of_examples) for name in ("ddp", "fsdp2", "tensor_parallel")),  # torchrun
    ],
)
def test_example_equals_one_process(name: str, ranks: int, tmp_path: Path, leaves_nothing: None) -> None:
    script = [str(EXAMPLES / f"{name}.py"), "--backend", launcher.BACKEND]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks != 2 else []
    done = run([sys.executable, *torchrun, *script], tmp_path)
    assert done.returncode == 0, done.stdout
    for rank in range(ranks):
        assert f"rank {rank} of {ranks}: " in done.stdout, done.stdout


@of_examples
def test_all_reduces_are_timed_for_as_long_as_asked(tmp_path: Path, leaves_nothing: None) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = [str(EXAMPLES / "time_all_reduce.py"), "--backend", launcher.BACKEND, "--sizes", "4", "1K", "--seconds=1"]
    done = run([sys.executable, *torchrun, *script], tmp_path)
    assert done.returncode == 0, done.stdout
    for size in (4, 1024):
        found = re.findall(rf"all_reduce of {size} bytes on 2 ranks: ([\d.]+) us, [\d.]+ GB/s", done.stdout)
        assert len(found) >= 2 and all(float(us) > 0 for us in found), done.stdout


@of_examples
@pytest.mark.parametrize("sharding, ranks, more", [("table_wise", 2, ["--capture"]), ("row_wise", 3, [])])
def test_dlrm_learns_and_equals_one_process(
    sharding: str, ranks: int, more: list[str], tmp_path: Path, leaves_nothing: None
) -> None:
    arguments = ["--backend", launcher.BACKEND, "--sharding", sharding, "--steps=110", "--batch=1200", "--max-rows=200"]
    arguments += more
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks != 2 else []
    done = run([sys.executable, *torchrun, str(EXAMPLES / "dlrm.py"), *arguments], tmp_path)
    assert done.returncode == 0, done.stdout
    for rank in range(ranks):
        assert f"rank {rank} of {ranks}: 20 steps equal those of one process" in done.stdout, done.stdout
    before, *later = (float(value) for value in re.findall(r"AUC(?: before:)?\s+(0\.\d+)", done.stdout))
    assert 0.4 < before < 0.6 and later[-1] > 0.66 > before, done.stdout
    assert all(text in done.stdout for text in ("step 100: loss 0.", "step 110: loss 0.")), done.stdout


@of_examples
def test_compressed_gradients_learn_as_exact_ones_do(tmp_path: Path, leaves_nothing: None) -> None:
    arguments = ["--bits=4", "--steps=40", "--layers=1", "--width=32", "--batch=4"]
    done = run([sys.executable, str(EXAMPLES / "compressed_gpt.py"), *arguments], tmp_path)
    assert done.returncode == 0, done.stdout
    share = re.search(
        r"4 bits an element: held-out loss \d\.\d+ nats a byte, .* s, (\d+\.\d)% of the bytes", done.stdout
    )
    assert share is not None and 10 < float(share[1]) < 25, done.stdout
    assert "compressed against exact: " in done.stdout
    done = run([sys.executable, str(EXAMPLES / "compressed_gpt.py"), "--bits", "9"], tmp_path)
    assert done.returncode == 2 and "--bits 9: 1 to 8" in done.stdout


@of_examples
def test_dlrm_data_and_auc(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import dlrm
    import torch

    scores = torch.tensor([0.1, 0.9, 0.4, 0.8, 0.2])
    clicks = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0])
    assert dlrm.auc_of(scores, clicks) == 1.0 and dlrm.auc_of(-scores, clicks) == 0.0
    assert dlrm.auc_of(scores, 1 - clicks) == 0.0
    assert abs(dlrm.auc_of(scores, torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0])) - 2 / 6) < 1e-6
    data = dlrm.Clicks([3, 5000], 4000, 7, torch.device("cpu"))
    one, again = data.batch(3), data.batch(3)
    assert torch.equal(one.dense, again.dense) and torch.equal(one.clicks, again.clicks)
    counts = one.categories[1].flatten().bincount(minlength=5000)
    assert counts[0] > 3 * counts[5] and len(counts) == 5000 and 0.1 < one.clicks.mean() < 0.5
    assert not torch.equal(one.clicks, data.batch(4).clicks)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    pytest.importorskip("matplotlib")
    pytest.importorskip("plotille")
    pytest.importorskip("rich")
    folder = tmp_path_factory.mktemp("demo")
    script = str(EXAMPLES / "train_gpt.py")
    return run(
        [sys.executable, script, "--backend", launcher.BACKEND, "--output", "out", *TINY], folder, timeout=280
    ), folder / "out"


@of_examples
def test_demo_runs_agree(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, folder = demo
    assert done.returncode == 0, done.stdout
    report = json.loads((folder / "report.json").read_text())
    assert [run["backend"] for run in report["runs"]] == [launcher.BACKEND, "gloo", launcher.BACKEND]
    assert len(report["verdicts"]) == 3 and all(verdict["holds"] for verdict in report["verdicts"])
    assert report["runs"][0]["losses"] == report["runs"][2]["losses"]
    times = report["communication"]
    assert list(times["backends"]) == list(dict.fromkeys([launcher.BACKEND, "gloo"])) and times["local_ms"] > 0
    assert all(time["gradient_ms"] > 0 and time["step_ms"] > 0 for time in times["backends"].values())
    for one in report["runs"]:
        assert len(one["losses"]) == 12
        assert 0 < one["held_out"][-1][1] < one["held_out"][0][1] < 6


@of_examples
def test_demo_shows_curve_table_and_sample(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, folder = demo
    for text in (
        "loss, nats a byte",
        "held out",
        "all_reduce of the gradients alone",
        "A sample from",
        "tokens a second",
    ):
        assert text in done.stdout, f"{text!r} is missing in:\n{done.stdout}"
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert len((folder / "sample.txt").read_text()) > 60
    assert (folder / "model.pt").stat().st_size > 10_000


@of_examples
def test_demo_writes_in_four_ways_and_shows_them(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, folder = demo
    decoded = json.loads((folder / "decode.json").read_text())
    ways = decoded["ways"]
    assert list(ways) == ["eager", "Inductor", "ark", "ark, resident"]
    assert ways["ark"]["text"] == ways["ark, resident"]["text"] and decoded["resident_as_single_launches"]
    for way in ways.values():
        assert len(way["text"]) == 60 and way["tokens_per_second"] > 0
        assert way["as_eager"] > 0, "the first byte differs from eager's"
    page = (folder / "index.html").read_text()
    assert page.count("data:image/png;base64,") == 1 and page.count("data:image/svg+xml;base64,") == 1
    assert "tokens/s" in page and ">fails<" not in page
    assert 'src="http' not in page and "href=" not in page, "the page needs other files"


@of_examples
def test_a_cache_of_positions_is_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte by byte, or several at once, it gives the logits of the whole text, as long as it fits the context."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import torch
    from gpt.decoding import Decoder
    from gpt.model import GPT, ModelConfig

    torch.manual_seed(3)
    gpt = GPT(ModelConfig(layers=2, width=32, heads=4, context=16)).eval().requires_grad_(False)
    text = torch.randint(256, (1, 16))
    decoder = Decoder(gpt, 40)
    wanted = gpt(text)[0]
    torch.testing.assert_close(decoder(text[:, :5], torch.arange(5))[0], wanted[4])
    for position in range(5, 16):
        got = decoder(text[:, position : position + 1], torch.tensor([position]))
        torch.testing.assert_close(got[0], wanted[position], rtol=1e-4, atol=1e-5)
    # Beyond the context the oldest byte is forgotten. One layer only, whose keys do not depend on earlier bytes.
    gpt = GPT(ModelConfig(layers=1, width=32, heads=4, context=16)).eval().requires_grad_(False)
    decoder = Decoder(gpt, 40)
    text = torch.randint(256, (1, 17))
    decoder(text[:, :16], torch.arange(16))
    got = decoder(text[:, 16:], torch.tensor([16]))
    torch.testing.assert_close(got[0], gpt(text[:, 1:])[0, -1], rtol=1e-4, atol=1e-5)


@of_examples
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--steps", "0"], "'0' is not a whole number of 1 or more"),
        (["--width", "130"], "--width 130 must be a multiple of twice --heads (4)"),
        (["--backend", "fpga"], "backend 'fpga' is not known"),
        (["--text", "no-such-folder"], "text folder no-such-folder does not exist"),
        (["--context", "100000000"], "too few for a context"),
        (["--device", "cuda"], "--device cuda cannot be used"),
    ],
)
def test_demo_refuses_bad_arguments_before_it_starts(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    pytest.importorskip("rich")
    done = run([sys.executable, str(EXAMPLES / "train_gpt.py"), *arguments], tmp_path)
    assert done.returncode == 2
    assert complaint in done.stdout.splitlines()[-1]
    assert "Traceback" not in done.stdout


@pytest.mark.quick
def test_demo_comparison_notices_one_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("matplotlib", "plotille", "rich"):
        pytest.importorskip(module)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import torch
    from gpt.report import compare
    from gpt.training import RunResult

    def result(backend: str, weights: torch.Tensor, last_loss: float = 2.0) -> RunResult:
        losses = [(0, 5.5), (10, last_loss)]
        return RunResult(backend, [5.0], losses, weights, 1.0)

    weights = torch.randn(1000)
    nearly = weights.clone()
    nearly[17] = torch.nextafter(nearly[17], torch.tensor(torch.inf))
    minus_zero, zero = torch.zeros(1000), torch.zeros(1000)
    minus_zero[3] = -0.0
    far = weights + 0.1
    assert [v.holds for v in compare([result("ark", weights), result("gloo", nearly)])] == [True, True]
    assert [v.holds for v in compare([result("ark", weights), result("ark", nearly)])] == [False, True]
    assert [v.holds for v in compare([result("ark", zero), result("ark", minus_zero)])] == [False, True]
    assert [v.holds for v in compare([result("ark", weights), result("gloo", far)])] == [False, True]
    assert [v.holds for v in compare([result("ark", weights, 5.6), result("ark", weights, 5.6)])] == [True, False]


INFERENCE = [
    ("huggingface", ["--only=generate", "--tokens=6"], ["generate(), static cache"]),
    ("huggingface", ["--only=plain", "--tokens=6"], ["plain loop, static cache"]),
    ("huggingface", ["--only=pipeline"], ["pipeline, padded texts"]),
    ("decode_loop", ["--tokens=6"], ["decoding, float32"]),
    ("decode_loop", ["--tokens=6", "--quantize=int8", "--temperature=0.8"], ["decoding, int8, sampled"]),
    ("decode_loop", ["--tokens=6", "--quantize=float8-dynamic", "--dtype=bfloat16"], ["decoding, float8-dynamic"]),
    ("decode_loop", ["--tokens=6", "--resident"], ["decoding, float32, resident by ark"]),
    ("decode_loop", ["--tokens=6", "--quantize=int8", "--torchao"], ["decoding, int8 by torchao"]),
    ("encode", ["--sentences=20"], ["sentence embeddings"]),
]


@of_examples
@pytest.mark.parametrize("name, arguments, told", INFERENCE, ids=lambda value: "".join(value).strip("-"))
def test_inference_gives_eager_pytorchs_results(
    name: str, arguments: list[str], told: list[str], tmp_path: Path, leaves_nothing: None
) -> None:
    """Each compares itself with eager PyTorch. Inductor is left out: it compiles for longer than all else takes."""
    if name != "decode_loop":
        pytest.importorskip("transformers")
    if "--torchao" in arguments:
        pytest.importorskip("torchao")
    done = run([sys.executable, str(EXAMPLES / f"{name}.py"), "--device=cpu", "--times=1", *arguments], tmp_path)
    assert done.returncode == 0, done.stdout
    rates = dict(re.findall(r"^  (eager|ark) +(\d+\.\d) (?:tokens|sentences)/s", done.stdout, re.MULTILINE))
    assert set(rates) == {"eager", "ark"} and all(float(rate) > 0 for rate in rates.values()), done.stdout
    assert told[0] in done.stdout and "WRONG" not in done.stdout


@of_examples
def test_what_torchao_lacks_is_named(tmp_path: Path, leaves_nothing: None) -> None:
    """torchao packs int4 with kernels for GPUs, and its own message does not say what to do without one."""
    pytest.importorskip("torchao")
    command = [sys.executable, str(EXAMPLES / "decode_loop.py"), "--device=cpu", "--torchao"]
    done = run([*command, "--quantize=int4"], tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stdout, done.stdout
    assert all(word in done.stdout for word in ("Int4WeightOnlyConfig", "mslk", "--quantize int8")), done.stdout
    done = run([*command, "--quantize=float8-dynamic"], tmp_path)
    assert done.returncode == 2 and "--torchao takes --quantize int8, float8, int4" in done.stdout, done.stdout


@of_examples
def test_a_wrong_result_ends_an_inference_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from inference import compared

    arguments = compared.arguments("").parse_args(["--device=cpu", "--times=1"])
    given = lambda compiler: lambda: (0 if compiler is None else 1, 1)  # noqa: E731
    assert not compared.compare("a title", "units/s", given, arguments, lambda a, b: a == b)
    assert "WRONG" in capsys.readouterr().out
    assert compared.compare("a title", "units/s", given, arguments, lambda a, b: True)
