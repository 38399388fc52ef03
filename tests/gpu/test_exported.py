"""ark_torch.export on a GPU: a fresh process that has no NVRTC loads the program and gets the same bits.

The load of a region plans it again, which must give the text that was compiled, and hands the saved cubin to the
driver. Both tests print how long that takes (issue 39's goal for Llama 1B: 0.3 s).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ark_torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "compile"))

import models
import real_sizes

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.skipif(not hasattr(torch.compiler, "load_compiled_function"), reason="this PyTorch saves no programs"),
]
HERE = Path(__file__).resolve().parent
DEVICE = torch.device("cuda", 0)
SIZES = {"small": models.Config(256, 2, 8, 2, 512, 100, 64), "llama-1b": real_sizes.LLAMA_1B}


def llama(name: str) -> models.Llama:
    """With the same weights in every process."""
    torch.manual_seed(0)
    with DEVICE:
        return real_sizes.ready(models.Llama(SIZES[name], 1, torch.bfloat16), torch.bfloat16, 0.02)  # type: ignore[no-any-return]


def call() -> tuple[Tensor, Tensor]:
    return torch.tensor([[7]], device=DEVICE), torch.tensor([3], device=DEVICE)


# Whatever would compile fails, which the last lines prove.
ELSEWHERE = """
import sys, time
import torch
sys.path.insert(0, {here!r})
import test_exported as case
import ark_torch
from ark_torch.compile import saved
torch.set_grad_enabled(False)
seconds, load = [], saved.SavedRegion.load
def timed(region):
    begin = time.perf_counter()
    loaded = load(region)
    seconds.append(time.perf_counter() - begin)
    return loaded
saved.SavedRegion.load = timed
model = case.llama({name!r})
torch.cuda.synchronize()
begin = time.perf_counter()
run = ark_torch.load("program", model)
loaded = time.perf_counter() - begin
got = [run(*case.call()) for _ in range(3)]
assert all(torch.equal(one, torch.load("result", map_location=case.DEVICE)) for one in got)
[region] = seconds
print(f"LOADED region {{region:.3f}} s, ark_torch.load {{loaded:.3f}} s")
try:
    options = {{"choose": "ark", "minimum": 1, "fallback": False}}
    torch.compile(lambda x: torch.tanh(x) * 3 + 1, backend="ark", options=options)(torch.ones(100, device=case.DEVICE))
except Exception as error:
    assert "{hidden}" in str(error), error
else:
    raise AssertionError("there is a compiler")
"""


def elsewhere(name: str, folder: Path) -> float:
    """Runs the program in a process without a compiler; returns how many seconds its region took to load."""
    hidden = folder / "no-nvrtc"
    hidden.write_text("not a library")
    environment = {
        **os.environ,
        "ARK_NVRTC": str(hidden),
        "ARK_CACHE": str(folder / "new-cache"),
        "CXX": str(folder / "no-compiler"),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    text = ELSEWHERE.format(here=str(HERE), name=name, hidden=hidden.name)
    done = subprocess.run(
        [sys.executable, "-c", text], env=environment, cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("LOADED region ")]
    print(f"\n{name}: {line}")
    return float(line.split()[2])


@pytest.mark.parametrize("name", ["small", "llama-1b"])
def test_an_exported_step_runs_without_a_compiler(name: str, tmp_path: Path) -> None:
    """Beside eager PyTorch here, and with the same bits there. The load may take three times as long as the goal, since
    other programs use the host."""
    model = llama(name)
    wanted = model(*call())
    ark_torch.export(model, call(), tmp_path / "program")
    begin = time.perf_counter()
    run = ark_torch.load(tmp_path / "program", model)
    result = run(*call())
    print(f"\n{name}: loaded and called in this process in {time.perf_counter() - begin:.3f} s")
    close = 2**-4 * float(wanted.abs().max())
    torch.testing.assert_close(result.float(), wanted.float(), rtol=0, atol=close)
    torch.save(result, tmp_path / "result")
    del model, run
    torch.cuda.empty_cache()
    assert elsewhere(name, tmp_path) < 0.9
