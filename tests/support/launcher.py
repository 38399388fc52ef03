"""Runs a test function on N ranks, each a real process, under a hard time limit.

    values = run_ranks(body, 4, "argument")            # body(rank: Rank, "argument") on every rank
    with Job(body, 3) as job:                          # or act while they run
        job.wait_event(1, "inside"); job.kill(1); outcomes = job.finish(timeout=20)

Leaving the `with` ends every process of the job in all cases. A job that exceeds its limit is asked for the stacks of
all its threads (they are in the failure's message), then killed.
"""

from __future__ import annotations

import inspect
import itertools
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import processes, wire
from support.outcome import Outcome, RanksFailed
from support.start import TESTS, Zygote, base_environment, shared_zygote, store_address

DEFAULT_TIMEOUT = 120.0
BACKEND = os.environ.get("ARK_TEST_BACKEND", "ark")
STACKS = "(most recent call first)"  # faulthandler's
PYTORCHS_OWN = ("torchinductor_", "torchelastic_")  # caches that PyTorch leaves in the temporary folder
_serial = itertools.count()


class Job:
    """A test function running on `count` ranks."""

    def __init__(
        self,
        body: Callable[..., Any],
        count: int,
        *args: Any,
        env: dict[str, str | None] | None = None,
        spawn: bool = False,
        backend: str | None = None,
        destroy: bool = True,
        leaves_at_once: bool = False,
        store: tuple[str, int] | None = None,
        store_timeout: float = 60.0,
        zygote: Zygote | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.count = count
        self.scratch = Path(tempfile.mkdtemp(prefix="rank-test-"))
        self._spawned: list[subprocess.Popen[bytes]] = []
        spec: dict[str, Any] = {
            "path": inspect.getfile(body),
            "name": body.__qualname__,
            "count": count,
            "args": args,
            "kwargs": kwargs or {},
            "env": {"TMPDIR": str(self._make("tmp")), "XDG_RUNTIME_DIR": str(self._make("run"))} | (env or {}),
            "backend": backend or BACKEND,
            "destroy": destroy,
            "leaves_at_once": leaves_at_once and destroy,
            "store": store or store_address(),
            "store_timeout": store_timeout,
            "job": f"job{next(_serial)}-{secrets.token_hex(4)}",
            "scratch": str(self.scratch),
            "parent": os.getpid(),
            "fork": not spawn,
        }
        pairs = [socket.socketpair() for _ in range(count)]
        ends = tuple(theirs.fileno() for _, theirs in pairs)
        if spawn:
            self.pids = [self._spawn(spec, index, fd) for index, fd in enumerate(ends)]
        else:
            compiles = Path(spec["path"]).parent == TESTS / "compile"
            preload = Zygote.COMPILING if compiles else Zygote.WARM
            self.pids = (zygote or shared_zygote(preload)).fork(spec, ends)
        self.started = time.monotonic()
        self.socks = [ours for ours, _ in pairs]
        for index, (ours, theirs) in enumerate(pairs):
            theirs.close()
            if spawn:
                wire.send(ours, (spec, index))
            wire.send(ours, "start")
        self._readers = [wire.Reader(sock) for sock in self.socks]
        self.outcomes = [Outcome(rank) for rank in range(count)]
        self._selector = selectors.DefaultSelector()
        self._pidfds: list[int] = []
        for rank, sock in enumerate(self.socks):
            self._selector.register(sock, selectors.EVENT_READ, ("message", rank))
            pidfd = os.pidfd_open(self.pids[rank])
            self._pidfds.append(pidfd)
            self._selector.register(pidfd, selectors.EVENT_READ, ("ended", rank))
        self._ended: set[int] = set()

    def _make(self, name: str) -> Path:
        path = self.scratch / name
        path.mkdir(mode=0o700)
        return path

    def _spawn(self, spec: dict[str, Any], index: int, fd: int) -> int:
        env = base_environment(**{k: v for k, v in spec["env"].items() if v is not None})
        command = [sys.executable, "-m", "support.rank", str(fd)]
        self._spawned.append(subprocess.Popen(command, env=env, pass_fds=[fd]))
        return self._spawned[-1].pid

    # -- in the ranks

    def _on_message(self, rank: int, message: tuple[str, Any, Any]) -> None:
        kind, first, second = message
        outcome = self.outcomes[rank]
        if kind == "event":
            outcome.events[first] = second
        else:
            outcome.kind, outcome.value, outcome.ended = kind, first, time.monotonic()

    def _on_end(self, rank: int) -> None:
        for message in self._readers[rank].drain():
            self._on_message(rank, message)
        try:
            _, status = os.waitpid(self.pids[rank], 0)
            self.outcomes[rank].exit_code = processes.exit_code(status)
        except ChildProcessError:
            popen = next((p for p in self._spawned if p.pid == self.pids[rank]), None)
            self.outcomes[rank].exit_code = popen.returncode if popen else None
        outcome = self.outcomes[rank]
        if outcome.kind == "running":
            outcome.kind = "lost"
        outcome.ended = outcome.ended or time.monotonic()
        self._ended.add(rank)

    def _step(self, deadline: float) -> None:
        """Processes events. Waits for one until the deadline."""
        for key, _ in self._selector.select(max(0.0, deadline - time.monotonic())):
            what, rank = key.data
            if what == "ended":
                self._selector.unregister(key.fileobj)
                self._on_end(rank)
            else:
                for message in self._readers[rank].drain():
                    self._on_message(rank, message)
                if self._readers[rank].closed:
                    self._selector.unregister(key.fileobj)

    def has_ended(self, rank: int) -> bool:
        return rank in self._ended

    def wait_until(self, done: Callable[[], bool], timeout: float, what: str) -> None:
        """Processes events until `done()`. When it is late, asks for stacks, ends the ranks and raises."""
        deadline = time.monotonic() + timeout
        while not done():
            if time.monotonic() >= deadline:
                self.fail(f"{what}: not within {timeout:.1f} s")
            self._step(deadline)

    def fail(self, reason: str) -> None:
        """Asks for stacks, ends everything and raises."""
        alive = [rank for rank in range(self.count) if rank not in self._ended]
        for rank in alive:
            processes.signal_quietly(self.pids[rank], signal.SIGCONT)
            processes.signal_quietly(self.pids[rank], signal.SIGUSR1)
        self.read_logs()
        deadline = time.monotonic() + 5  # on a busy machine a rank writes its stacks late; one in the kernel, never
        while time.monotonic() < deadline and any(STACKS not in self.outcomes[rank].log for rank in alive):
            time.sleep(0.05)
            self.read_logs()
        time.sleep(0.2 if alive else 0.0)  # for the rest of them
        self.read_logs()
        error = RanksFailed(reason, self.outcomes)
        self.close()
        raise error

    def read_logs(self) -> None:
        """Copies what the ranks have printed so far to their outcomes."""
        for outcome in self.outcomes:
            path = self.scratch / f"rank{outcome.rank}.log"
            outcome.log = path.read_text(errors="replace") if path.exists() else ""

    # -- for tests

    def wait_event(self, rank: int, name: str, timeout: float = DEFAULT_TIMEOUT) -> Any:
        """Waits until the rank reports the event. Fails at once if the rank ends before."""
        outcome = self.outcomes[rank]
        self.wait_until(lambda: name in outcome.events or rank in self._ended, timeout, f"rank {rank}: {name}")
        if name not in outcome.events:
            self.fail(f"rank {rank} ended before {name!r}")
        return outcome.events[name]

    def wait_all(self, name: str, timeout: float = DEFAULT_TIMEOUT) -> list[Any]:
        return [self.wait_event(rank, name, timeout) for rank in range(self.count)]

    def go(self, rank: int, name: str, value: Any = None) -> None:
        wire.send(self.socks[rank], (name, value))

    def go_all(self, name: str, value: Any = None) -> None:
        for rank in range(self.count):
            self.go(rank, name, value)

    def kill(self, rank: int) -> float:
        """Sends SIGKILL. Returns the time."""
        now = time.monotonic()
        if rank not in self._ended:
            processes.signal_quietly(self.pids[rank], signal.SIGKILL)
        self.outcomes[rank].kind = "killed"
        return now

    def stop(self, rank: int) -> float:
        processes.signal_quietly(self.pids[rank], signal.SIGSTOP)
        now = time.monotonic()
        while processes.state_of(self.pids[rank]) not in ("T", "Z", "") and time.monotonic() < now + 5:
            time.sleep(0.001)
        return now

    def resume(self, rank: int) -> None:
        processes.signal_quietly(self.pids[rank], signal.SIGCONT)

    def wait_outcomes(self, ranks: list[int], timeout: float) -> list[Outcome]:
        """Waits until these ranks have reported their outcome. They may still be exiting."""
        self.wait_until(lambda: all(self.outcomes[r].kind != "running" for r in ranks), timeout, f"ranks {ranks}")
        return [self.outcomes[rank] for rank in ranks]

    def finish(self, timeout: float = DEFAULT_TIMEOUT, ranks: list[int] | None = None) -> list[Outcome]:
        """Waits until the ranks (default: all) have ended."""
        wanted = range(self.count) if ranks is None else ranks
        self.wait_until(lambda: all(r in self._ended for r in wanted), timeout, "the ranks end")
        self.read_logs()
        return [self.outcomes[rank] for rank in wanted]

    def values(self, timeout: float = DEFAULT_TIMEOUT) -> list[Any]:
        """Returns the ranks' values. Raises with every rank's report if one did not return."""
        outcomes = self.finish(timeout)
        if any(o.kind != "result" or o.exit_code != 0 for o in outcomes):
            bad = [o.rank for o in outcomes if o.kind != "result" or o.exit_code != 0]
            for outcome in outcomes:
                if outcome.kind == "result" and outcome.exit_code != 0:
                    outcome.kind = "died after its result"
            raise RanksFailed(f"ranks {bad} failed", outcomes)
        return [o.value for o in outcomes]

    def close(self) -> None:
        if self.scratch.exists():
            processes.end_tree(self.pids)
            for popen in self._spawned:
                popen.wait()
            self._selector.close()
            for sock in self.socks:
                sock.close()
            for pidfd in self._pidfds:
                os.close(pidfd)
            left = [path for name in ("tmp", "run") for path in (self.scratch / name).iterdir()]
            self.left_behind = [str(path) for path in left if not path.name.startswith(PYTORCHS_OWN)]
            shutil.rmtree(self.scratch, ignore_errors=True)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        if _[0] is None and self.left_behind:
            raise AssertionError(f"the job left behind: {self.left_behind}")


def run_ranks(
    body: Callable[..., Any], count: int, *args: Any, timeout: float = DEFAULT_TIMEOUT, **options: Any
) -> list[Any]:
    """Runs the function on every rank and returns the values in rank order.

    By day, a rank that has destroyed its groups exits at once. By night, and in a Job, the interpreter shuts down
    normally.
    """
    options.setdefault("leaves_at_once", "ARK_TEST_NIGHT" not in os.environ)
    with Job(body, count, *args, **options) as job:
        return job.values(timeout)
