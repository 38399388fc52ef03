"""PyTorch's parallel libraries on GPUs: the scripts of tests/distributed, which compare with one process."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from on_gpu import ENV, WORLD, run, start
from support.rank import Rank
from support.start import base_environment

# DTensor's caches keep meshes, whose groups end with the script, so these run on their own ranks.
KEEP_MESHES = ("fsdp2", "tensor_parallel", "checkpoint")
SCRIPTS = Path(__file__).resolve().parents[1] / "distributed" / "scripts"


def _script(rank: Rank, name: str) -> None:
    start(rank)
    if str(SCRIPTS) not in sys.path:
        sys.path.insert(0, str(SCRIPTS))
    importlib.import_module(name).main()


@pytest.mark.parametrize("world", sorted({2, WORLD}))
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "tensor_parallel", "pipeline", "checkpoint", "zero", "objects"])
def test_script(name: str, world: int) -> None:
    run(_script, name, world=world, own=name in KEEP_MESHES)


def test_under_torchrun() -> None:
    """As users start it: one process per GPU, with the group from the environment."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]
    environment = base_environment(**{name: value for name, value in ENV.items() if value is not None})
    done = subprocess.run(
        [*command, SCRIPTS / "ddp.py"], env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-8000:]
    assert all(f"ok from rank {rank}" in output for rank in range(WORLD)), output[-4000:]
