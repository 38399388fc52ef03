"""PyTorch's parallel libraries over ark, as users run them: scripts under torchrun, compared with one process.

Each script (scripts/*.py) checks its results and prints a line per rank. This file starts the processes, limits their
time and counts the lines.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import processes, tables
from support.start import base_environment

SCRIPTS = Path(__file__).with_name("scripts")
LIMIT_S = 150.0


def _torchrun(ranks: int, script: str, *arguments: str, options: tuple[str, ...] = (), **env: str) -> str:
    """Returns the output of all ranks. Fails with it if torchrun fails, and ends everything that it started."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *options]
    environment = base_environment(PYTHONFAULTHANDLER="1", **env)
    started = time.monotonic()
    process = subprocess.Popen(
        [*command, str(SCRIPTS / script), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        for pid in processes.descendants(process.pid):
            processes.signal_quietly(pid, signal.SIGABRT)  # makes faulthandler print the stacks
        time.sleep(1)
        processes.end_tree([process.pid])
        output = process.communicate()[0]
        raise AssertionError(f"{script} ran past {LIMIT_S} s:\n{output[-8000:]}") from None
    assert process.returncode == 0, f"{script} failed with {process.returncode}:\n{output[-8000:]}"
    for rank in range(ranks):
        assert f"ok from rank {rank}" in output, output[-4000:]
    tables.add("integration", script=" ".join((script, *arguments[1:])), ranks=ranks, s=time.monotonic() - started)
    return output


@pytest.mark.nightly
def test_object_collectives_and_monitored_barrier() -> None:
    _torchrun(2, "objects.py")


def test_distributed_data_parallel() -> None:
    _torchrun(2, "ddp.py")


@pytest.mark.changed("tests/distributed/scripts/fsdp2.py")
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_fully_shard(ranks: int) -> None:
    _torchrun(ranks, "fsdp2.py")


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_dtensor_and_tensor_parallel(ranks: int) -> None:
    _torchrun(ranks, "tensor_parallel.py")


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_pipeline_schedules(ranks: int) -> None:
    _torchrun(ranks, "pipeline.py")


@pytest.mark.nightly
def test_distributed_checkpoint() -> None:
    _torchrun(2, "checkpoint.py")


@pytest.mark.nightly
def test_zero_redundancy_optimizer_and_join() -> None:
    _torchrun(2, "zero.py")


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["kill", pytest.param("raise", marks=pytest.mark.nightly)])
def test_elastic_restart(how: str, tmp_path: Path) -> None:
    _torchrun(2, "elastic.py", str(tmp_path), how, options=("--max-restarts=1", "--monitor-interval=0.2"))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"attempt{attempt}-rank{rank}" for attempt in (0, 1) for rank in (0, 1)]


@pytest.mark.nightly
@pytest.mark.parametrize("script", ["ddp.py", "fsdp2.py", "pipeline.py", "checkpoint.py", "zero.py", "objects.py"])
def test_carried_by_gloo(script: str) -> None:
    _torchrun(2, script, ARK_SHARED_MEMORY="off")


@pytest.mark.nightly
@pytest.mark.parametrize("script", ["ddp.py", "fsdp2.py", "tensor_parallel.py", "objects.py", "zero.py"])
def test_under_debug_detail(script: str) -> None:
    _torchrun(2, script, TORCH_DISTRIBUTED_DEBUG="DETAIL")


def test_a_failing_rank_ends_the_job(tmp_path: Path) -> None:
    """Without restarts, torchrun reports the failure, and nothing hangs or remains."""
    with pytest.raises(AssertionError, match="failed with 1"):
        _torchrun(2, "elastic.py", str(tmp_path), "kill", options=("--max-restarts=0", "--monitor-interval=0.2"))
    assert not [pid for pid in processes.descendants(os.getpid()) if "elastic.py" in processes.command_of(pid)]
