"""Kernels compiled, loaded and launched on a real GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from ark_torch import _C, _jit


def test_the_probe_runs_on_every_gpu() -> None:
    assert _C._has_cuda_driver()
    _jit.configure()
    for device in range(torch.cuda.device_count()):
        for size in (1, 4096, 64 << 20):
            found = _C._probe_device(device, size)
            assert found["device"] == torch.cuda.get_device_name(device)
    assert torch.cuda.current_device() == 0, "the caller's device stays"
    torch.ones(8, device="cuda").sum().item()  # PyTorch's context still works


FIRST_USE_INSIDE_A_CAPTURE = """
import torch
from ark_torch import _C, _jit
_jit.configure()
x = torch.zeros(4, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):  # PyTorch's default, global mode, is the strictest
    x += 1
    found = _C._probe_device(0, 1 << 20)
    x += 1
assert x.tolist() == [0.0] * 4, "something ran instead of being captured"
for _ in range(3):
    graph.replay()
torch.cuda.synchronize()
assert x.tolist() == [6.0] * 4, x
assert found["load_seconds"] > 0
"""


def test_first_use_inside_a_capture(tmp_path: Path) -> None:
    """A kernel first used under capture is compiled and loaded outside of the graph, which stays intact."""
    environment = {**os.environ, "ARK_CACHE": str(tmp_path / "cold")}
    run = subprocess.run(
        [sys.executable, "-c", FIRST_USE_INSIDE_A_CAPTURE], env=environment, capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr
    assert list((tmp_path / "cold").glob("*.cubin"))


def test_many_threads_at_once() -> None:
    _jit.configure()
    failures = []

    def probe() -> None:
        try:
            _C._probe_device(0, 1 << 16)
        except RuntimeError as error:
            failures.append(error)

    threads = [threading.Thread(target=probe) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(RuntimeError, match="device 99"):
        _C._probe_device(99)
