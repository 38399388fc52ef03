"""Starts ranks: their environment, the warm process that forks them, and the store where they meet.

One warm process and one store serve all tests of a run. Both end with the test process.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from support import processes, wire

TESTS = Path(__file__).resolve().parent.parent

# One compute thread per rank, because test machines have few cores and a fork must not meet the threads of an OpenMP
# pool.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONUNBUFFERED": "1",
    # As in tests/compile/conftest.py: no measurements for plans, and less optimisation by the C++ compiler.
    "ARK_COSTS": "assumed",
    "ARK_OPTIMISE": "1",
}


def base_environment(**extra: str) -> dict[str, str]:
    """Returns the environment of every process that tests start, without the settings of other jobs."""
    foreign = ("ARK_", "TORCH_DISTRIBUTED", "MASTER_", "RANK", "WORLD_SIZE")
    env = {k: v for k, v in os.environ.items() if k.startswith("ARK_TEST_") or not k.startswith(foreign)}
    path = [str(TESTS), str(TESTS.parent)] if os.environ.get("ARK_TEST_FROM_SOURCE", "1") == "1" else [str(TESTS)]
    if "PYTHONPATH" in env:
        path.append(env["PYTHONPATH"])
    if "ARK_TEST_CACHE" in env:  # one for all processes of the run, not the user's
        env["ARK_CACHE"] = env["ARK_TEST_CACHE"]
    return env | _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(path)} | extra


class Zygote:
    """The test process's end of support.zygote."""

    # Dynamo: functional collectives import it at first use, which takes three seconds in every rank. The others are
    # what test modules import, which takes half of a short rank's time.
    WARM = ("torch", "torch.distributed", "torch._dynamo", "pytest", "support.grid", "support.launcher")
    # For ranks that compile. Inductor takes them a second, and would make every other rank's start and end slower.
    COMPILING = (*WARM, "torch._inductor.compile_fx")

    def __init__(self, preload: tuple[str, ...] = WARM, patience: float = 120.0, **env: str) -> None:
        ours, theirs = socket.socketpair()
        processes.become_subreaper()
        self._sock = ours
        command = [sys.executable, "-m", "support.zygote", str(theirs.fileno()), *preload]
        self._process = subprocess.Popen(command, env=base_environment(**env), pass_fds=[theirs.fileno()])
        theirs.close()
        self.pid = self._process.pid
        _zygotes.add(self.pid)
        ours.settimeout(patience)
        ready, _ = wire.receive(ours)
        if ready != "ready":
            raise AssertionError(f"zygote said {ready!r}")

    def fork(self, spec: dict[str, Any], fds: tuple[int, ...]) -> list[int]:
        wire.send(self._sock, spec, fds)
        return wire.receive(self._sock)[0]

    def close(self) -> None:
        _zygotes.discard(self.pid)
        self._sock.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_zygotes: set[int] = set()
_kept: set[int] = set()
_shared: dict[Any, Any] = {}  # the store, and zygotes by what they have imported


def zygote_pids() -> frozenset[int]:
    """Returns the processes that outlive a test on purpose."""
    return frozenset(_zygotes | _kept)


def keep(pids: list[int]) -> None:
    """Marks ranks that outlive the test that starts them (support/crew.py)."""
    _kept.update(pids)


def forget(pids: list[int]) -> None:
    _kept.difference_update(pids)


def shared_zygote(preload: tuple[str, ...] = Zygote.WARM) -> Zygote:
    if preload not in _shared:
        _shared[preload] = Zygote(preload)
    return _shared[preload]


def store_address() -> tuple[str, int]:
    if "store" not in _shared:
        import torch.distributed as dist

        _shared["store"] = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return "127.0.0.1", _shared["store"].port


def close_shared() -> None:
    for preload in (Zygote.WARM, Zygote.COMPILING):
        zygote = _shared.pop(preload, None)
        if zygote is not None:
            zygote.close()
    _shared.pop("store", None)


atexit.register(close_shared)
