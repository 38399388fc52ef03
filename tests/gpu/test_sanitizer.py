"""Every family of kernels under compute-sanitizer: no access out of bounds, no race in shared memory.

communicator_random runs one process per rank, each under its own sanitizer. The seed chooses the families (0: packets
and rings; 1: TMA chunks from small sizes on; 2: copy engines and the kernel that adds). A planted error comes first,
because on some (virtual) machines the sanitizer finds nothing. ARK_TEST_SANITIZER_OPERATIONS sets the number of
operations per run.

Loop kernels of torch.compile: a small one for every kind of task (compile_tasks.py). Operators that compute and
communicate in one kernel: small random tensors on two ranks (fused_tasks.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from native import KERNELS
from support import processes, tables

OPERATIONS = os.environ.get("ARK_TEST_SANITIZER_OPERATIONS", "40")
RANKS = min(2, torch.cuda.device_count())
LIMIT_S = 200.0
TASKS = Path(__file__).resolve().parent / "compile_tasks.py"
FUSED = TASKS.with_name("fused_tasks.py")
FOUND = 9  # exit code if the sanitizer found something

PLANTED = r"""
__global__ void beyond(int* values) { values[threadIdx.x + 1000000] = 1; }
__global__ void races(int* out) {
  __shared__ int slot[64];
  slot[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = slot[(threadIdx.x + 33) % 64];
}
int main(int count, char**) {
  int* values = nullptr;
  cudaMalloc(&values, 64 * sizeof(int));
  if (count > 1) races<<<1, 64>>>(values); else beyond<<<1, 64>>>(values);
  cudaDeviceSynchronize();
}
"""


def tool(name: str) -> str:
    """Returns the full path of a program of the CUDA Toolkit."""
    homes = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    path = os.pathsep.join([os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes if home)])
    found = shutil.which(name, path=path)
    assert found, f"no {name}: these tests need the CUDA Toolkit (CUDA_HOME or PATH)"
    return found


def sanitizer(check: str) -> list[str]:
    return [tool("compute-sanitizer"), "--tool", check, "--error-exitcode", str(FOUND), "--print-limit", "20"]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    (folder / "planted.cu").write_text(PLANTED)
    command = [tool("nvcc"), "-arch=native", "-o", folder / "planted", folder / "planted.cu"]
    subprocess.run(command, check=True, timeout=100)
    return folder / "planted"


@pytest.mark.parametrize("check", ["memcheck", "racecheck"])
def test_it_finds_what_is_planted(planted: Path, check: str) -> None:
    command = [*sanitizer(check), planted, *(["races"] if check == "racecheck" else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    what = "Invalid __global__ write" if check == "memcheck" else "hazard"
    assert done.returncode == FOUND and what in done.stdout, f"{check} does not work here:\n{done.stdout}{done.stderr}"


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize(
    "check, seed",
    [("memcheck", 0), ("memcheck", 1), ("memcheck", 2), ("racecheck", 0), ("racecheck", 1), ("synccheck", 1)],
)
def test_kernels(communicator_random: Path, tmp_path: Path, check: str, seed: int) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    program = [communicator_random, str(RANKS), OPERATIONS, str(seed), KERNELS]
    judge(check, seed, tmp_path, lambda rank: [*program, str(rank), folder])


def judge(check: str, seed: object, tmp_path: Path, program: Callable[[int], list[Any]], **env: str) -> None:
    """Runs every rank's program under its own sanitizer."""
    begun = time.monotonic()
    ranks = []
    for rank in range(RANKS):
        with open(tmp_path / f"rank{rank}.log", "wb") as log:
            command = [*sanitizer(check), *program(rank)]
            ranks.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **env}))
    try:
        codes = [rank.wait(max(1.0, begun + LIMIT_S - time.monotonic())) for rank in ranks]
    except subprocess.TimeoutExpired:
        codes = [-1]
    finally:
        processes.end_tree([rank.pid for rank in ranks])
    texts = [(tmp_path / f"rank{rank}.log").read_text(errors="replace") for rank in range(RANKS)]
    tables.add("sanitizer", check=check, seed=seed, operations=OPERATIONS, codes=codes, s=time.monotonic() - begun)
    for rank, text in enumerate(texts):
        story = f"rank {rank} of {check}, {seed}, exit codes {codes}:\n{text[:6000]}\n...\n{text[-3000:]}"
        assert codes == [0] * RANKS, story
        assert "right:" in text and ("0 errors" in text or "0 hazards" in text), story


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.skipif(RANKS < 2, reason="two GPUs")
@pytest.mark.parametrize("check", ["memcheck", "racecheck"])
def test_fused_operators(tmp_path: Path, check: str) -> None:
    program = [sys.executable, str(FUSED), str(RANKS)]
    path = os.pathsep.join([str(FUSED.parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "ARK_TUNE": "0", "PYTHONPATH": path}
    judge(check, "fused operators", tmp_path, lambda rank: [*program, str(rank), str(tmp_path / "store")], **env)
    assert all("right: all" in (tmp_path / f"rank{rank}.log").read_text() for rank in range(RANKS))


def of_loop_kernels(check: str, *more: str) -> subprocess.CompletedProcess[str]:
    command = [*sanitizer(check), sys.executable, str(TASKS), *more]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "ARK_COSTS": "assumed"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


def test_it_finds_what_is_planted_in_a_loop_kernel() -> None:
    done = of_loop_kernels("memcheck", "--planted")
    assert done.returncode == FOUND and "Invalid __global__ read" in done.stdout, done.stdout[-4000:] + done.stderr


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("check", ["memcheck", "racecheck", "synccheck"])
def test_loop_kernels(check: str) -> None:
    begun = time.monotonic()
    done = of_loop_kernels(check)
    tables.add("sanitizer", check=check, seed="loop kernels", codes=[done.returncode], s=time.monotonic() - begun)
    assert done.returncode == 0 and "right: all" in done.stdout, done.stdout[:8000] + done.stderr[-2000:]
