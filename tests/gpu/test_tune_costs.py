"""`ark tune --costs` on a GPU: every figure is measured, kept, and what later plans are made with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ark_torch import _C, _cost_files

USE = """
import torch, ark_torch
model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)).cuda().bfloat16()
x = torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16)
with torch.no_grad():
    report = ark_torch.explain(model, x, ark_options={"choose": "ark"})
    found = torch.compile(model, backend="ark", options={"choose": "ark"})(x)
    torch.testing.assert_close(found, model(x), rtol=2e-2, atol=2e-2)
print(report)
"""


@pytest.mark.timeout(500)
def test_the_tool_measures_what_plans_use(tmp_path: Path) -> None:
    environment = {**os.environ, "ARK_CACHE": str(tmp_path / "cache")}

    def run(*command: str) -> str:
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "(costs assumed)" in run("-c", USE)
    told = run("-m", "ark_torch", "tune", "--costs", "--no-caches", "--samples", str(tmp_path / "samples.json"))
    (path,) = (tmp_path / "cache" / "costs").iterdir()
    properties = torch.cuda.get_device_properties(0)
    record = _cost_files.read(path, properties.name, properties.multi_processor_count)
    assert record is not None, told
    arch = f"sm_{properties.major}{properties.minor}"
    left_out = {"tile_float8_flops_per_us"}  # not measured
    shown = {line.split()[0] for line in told.splitlines() if len(line.split()) >= 3 and line.split()[2] != "-"}
    assert set(_C.plan.costs_of(arch)) - left_out - {"wait_us"} <= shown, told
    assert set(record.costs) <= shown and (record.costs or "the built-in ones stay" in told), told
    used = run("-c", USE)
    assert f"(costs measured {record.measured})" in used or not record.costs, used
