"""Shared by all tests: markers, hard time limits, and the check that a test leaves nothing behind.

Markers: `quick` (make test-quick), none (make test), `nightly` (make test-nightly). A test without a time
limit of its own gets one here; the limit is enforced by a timer signal, so that a test that hangs in the
test process itself fails too (ranks have their own limits, see support/launcher.py).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

import pytest
from support import processes, start, tables

HARD_LIMIT_S = 300.0


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "quick: runs in make test-quick (all of them under 3 minutes)")
    config.addinivalue_line("markers", "nightly: long; runs in make test-nightly only")
    config.addinivalue_line("markers", "limit(seconds): hard time limit of one test")
    # A job in a shell's background is started with Ctrl-C ignored, and so would be all processes that it starts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    marker = item.get_closest_marker("limit")
    limit = float(marker.args[0]) if marker else HARD_LIMIT_S
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expired(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{item.nodeid} ran past its hard limit of {limit:.0f} s")

    previous = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _shared_memory_names() -> set[str]:
    """Names that a job of ours could leave: the machine may run other programs that use /dev/shm."""
    return {name for name in os.listdir("/dev/shm") if "ark" in name}


def _own_memfds() -> set[str]:
    """But for the libraries of compiled regions, which live as long as what Dynamo compiled."""
    links = processes.open_descriptors().values()
    return {link for link in links if link.startswith("/memfd:ark") and not link.startswith("/memfd:ark-plan")}


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    """No process, shared memory file or memfd of the test is left when it ends."""
    before = _shared_memory_names()
    yield
    deadline = time.monotonic() + 5
    left: list[int] = []
    while True:
        processes_left = processes.descendants(os.getpid(), skip=start.zygote_pids())
        left = [pid for pid in processes_left if processes.state_of(pid) not in ("", "Z")]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    commands = [f"{pid}: {processes.command_of(pid)}" for pid in left]
    processes.end_tree(left)
    assert not commands, f"processes are left running: {commands}"
    assert not _own_memfds(), f"the test process holds {_own_memfds()}"
    assert _shared_memory_names() <= before, f"left in /dev/shm: {_shared_memory_names() - before}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tables.print_all(terminalreporter)
