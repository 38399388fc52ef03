"""A loop kernel that finds an index out of range returns no wrong number, and the next call names the index."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)
MODELS = Path(__file__).resolve().parent.parent / "compile"

SEES = """
    torch.cuda.synchronize()
    call(*good)
    torch.cuda.synchronize()
    call(*bad)
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print("SEEN", type(error).__name__, str(error).splitlines()[0])
    try:
        call(*bad)
    except IndexError as error:
        print("TOLD", error)
"""
INDEX = """
import torch, sys
from ark_torch import _C
table, index = torch.randn(10, 16, device="cuda"), torch.tensor([3, 11], device="cuda")
from torch.nn.functional import embedding
call = torch.compile(lambda t, i: embedding(i, t).relu() + 1, backend="ark", options={"choose": "ark"})
good, bad = (table, index.clamp(max=9)), (table, index)
with torch.no_grad():
"""
# A decoding step whose attention adds the position itself.
POSITION = """
import torch, sys
import models
model = models.Llama(models.Config(max_len=300), 1, torch.bfloat16).eval().cuda()
call = torch.compile(model, backend="ark", options={"choose": "ark"}, dynamic=False)
ids = torch.ones(1, 1, dtype=torch.int64, device="cuda")
good, bad = ((ids, torch.tensor([at], device="cuda")) for at in (299, 300))
model.cos, model.sin = (torch.cat((x, x)) for x in (model.cos, model.sin))
with torch.no_grad():
"""


@pytest.mark.parametrize(
    "script, told",
    [
        (INDEX, "index 11 is out of bounds for dimension 0 with size 10"),
        (POSITION, "index 300 is out of bounds for dimension 2 with size 300 in index_copy_"),
    ],
)
def test_an_index_out_of_range_is_no_wrong_number(script: str, told: str) -> None:
    """The context is lost, as in eager, but the next call names the index."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(MODELS)])}
    done = subprocess.run(
        [sys.executable, "-c", script + SEES], capture_output=True, text=True, timeout=120, env=environment
    )
    assert "SEEN" in done.stdout and "device-side assert" in done.stdout, done.stdout + done.stderr
    assert "TOLD" in done.stdout and told in done.stdout, done.stdout
