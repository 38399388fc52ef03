"""The benchmark of messages between two GPUs, without GPUs: kernels and program compile, and tables show rows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import dma
import dma_program
import pytest
from support import start

from ark_torch import _C, _jit

of_benchmarks = pytest.mark.changed("benchmarks/dma*", "csrc/dma/*", "ark_torch/kernels/cuda/*")
ROWS = [
    {"engine": "cpu", "what": "latency", "bytes": 8192, "us": 19.0, "blocks": 0, "wrong": 0},
    {"engine": "packet", "what": "latency", "bytes": 8192, "us": 2.0, "blocks": 4, "wrong": 0},
    {"engine": "bulk", "what": "latency", "bytes": 8192, "us": 2.5, "blocks": 1, "wrong": 0},
    {"engine": "copy_engine", "what": "throughput", "bytes": 1 << 26, "gbps": 390.0, "blocks": 0, "wrong": 0},
    {"engine": "bulk", "what": "throughput", "bytes": 8192, "gbps": 300.0, "blocks": 8, "wrong": 0},
]
ENDS = ("ping", "send", "put")
ABOUT = {"machine": {"cpu": "x"}, "versions": {"torch": "2.13.0"}, "date": "2026-11-21", "rows": ROWS}


@of_benchmarks
@pytest.mark.parametrize(
    "arch", ["sm_90a", *(pytest.param(arch, marks=pytest.mark.nightly) for arch in ("sm_80", "sm_100a", "sm_120"))]
)
def test_kernels_compile(arch: str) -> None:
    _jit.configure()
    _, kernels = _C._compile_kernel(dma_program.stub(), arch)
    names = {kernel["name"] for kernel in kernels}
    ends = {f"{engine}_{end}" for engine in ("store", "warp", "packet", "copy_engine", "proxy") for end in ENDS}
    if arch != "sm_80":  # has TMA
        ends |= {f"bulk_{end}" for end in ENDS} | {"bulk_send_2", "bulk_send_4", "stream_put", "pull_put", "pull_keep"}
        ends |= {f"add_{dtype}_put" for dtype in ("f32", "bf16", "f16")}
    receivers = {"watch", "look", "keep", "packet_keep", "packet_receive", "copy_engine_keep", "copy_engine_receive"}
    assert names == ends | receivers
    for kernel in kernels:
        of_1024_threads = kernel["name"].startswith(("store", "warp", "packet", "keep", "copy_engine_keep"))
        assert 0 < kernel["registers"] <= (64 if of_1024_threads else 128) and kernel["spilled"] <= 64, kernel


@of_benchmarks
@pytest.mark.timeout(400)
def test_program_compiles_and_says_what_it_lacks(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(dma.__file__)), "--build", str(tmp_path / "built")]
    done = subprocess.run(command, env=start.base_environment(), capture_output=True, text=True, timeout=350)
    assert done.returncode == 0, done.stderr
    program = done.stdout.strip()
    env = start.base_environment(CUDA_VISIBLE_DEVICES="")
    without = subprocess.run([program, "kernels=x"], env=env, capture_output=True, text=True, timeout=20)
    assert without.returncode == 1 and without.stderr.startswith("dma: ") and "GPU" in without.stderr
    wrong = subprocess.run([program, "kernels"], env=env, capture_output=True, text=True, timeout=20)
    assert wrong.returncode == 2 and "kernels is not NAME=VALUE" in wrong.stderr


@pytest.mark.quick
def test_verdicts() -> None:
    assert dma.verdicts(ROWS) == [
        "8 KB one way: 2.00 us (packet); goal 2.3: met",
        "times better than CPU-driven: 9.5; goal 8.0: met",
        "8 KB pipelined, bulk: 77% of the copy engine's best; goal 85%: missed",
    ]
    assert dma.verdicts([]) == []


@of_benchmarks
def test_table_and_picture(tmp_path: Path) -> None:
    text = dma.table(ABOUT)
    assert "| one way, us | 8 KB |" in text and "| packet | 2 |" in text
    assert "| GB/s | 8 KB | 64 MB |" in text and "| copy_engine |  | 390 |" in text
    assert dma.draw(ABOUT, tmp_path / "x.png") == ""
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert dma.draw(ABOUT | {"rows": []}, tmp_path / "y.png") == "no picture: nothing was measured"


@of_benchmarks
@pytest.mark.parametrize("options", [["--sizes", "24"], ["--sizes", "8"], ["--blocks", "17"]])
def test_bad_arguments(options: list[str]) -> None:
    command = [sys.executable, str(Path(dma.__file__)), *options]
    done = subprocess.run(command, env=start.base_environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "it takes" in done.stderr
