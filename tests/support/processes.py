"""Finds, stops and ends processes, and checks what they left behind (Linux only).

The test process makes itself a child subreaper. Any process that a test starts becomes its child when the parent ends.
So "nothing is left running" is a statement about our own descendants and does not depend on names.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill the calling process when the parent thread ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(70)


def _stat_fields(pid: int) -> list[str]:
    # The command's name may contain spaces and brackets. After the last ")" the format is regular.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def parent_of(pid: int) -> int:
    return int(_stat_fields(pid)[1])


def state_of(pid: int) -> str:
    """Returns R, S, D, T (stopped), Z (ended, not yet reaped), or "" if there is no such process."""
    try:
        return _stat_fields(pid)[0]
    except (OSError, IndexError):
        return ""


def descendants(root: int, skip: frozenset[int] = frozenset()) -> list[int]:
    """Returns every living process below `root`, without the trees rooted at `skip`."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                children.setdefault(parent_of(int(entry)), []).append(int(entry))
            except (OSError, IndexError):
                continue
    found: list[int] = []
    queue = [root]
    while queue:
        for child in children.get(queue.pop(), []):
            if child not in skip:
                found.append(child)
                queue.append(child)
    return found


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "(gone)"


def signal_quietly(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def reap() -> dict[int, int]:
    """Reaps children that have ended: pid -> wait status."""
    ended = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = status


def end_tree(pids: list[int], bound: float = 10.0) -> None:
    """Kills these processes and all below them. Returns when they are gone."""
    deadline = time.monotonic() + bound
    targets = set(pids)
    for pid in pids:
        targets.update(descendants(pid))
    for pid in targets:
        signal_quietly(pid, signal.SIGKILL)
    while time.monotonic() < deadline:
        for pid in list(targets):
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                pass
            if state_of(pid) == "":
                targets.discard(pid)
        if not targets:
            return
        time.sleep(0.005)
    raise AssertionError(f"processes {sorted(targets)} survived SIGKILL for {bound} s")


def exit_code(status: int) -> int:
    """Converts like subprocess: negative for a signal."""
    return os.waitstatus_to_exitcode(status)


def open_descriptors(pid: int | str = "self") -> dict[int, str]:
    found = {}
    for entry in os.listdir(f"/proc/{pid}/fd"):
        try:
            found[int(entry)] = os.readlink(f"/proc/{pid}/fd/{entry}")
        except OSError:
            continue
    return found


def resident_kib(pid: int | str = "self") -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0


def shared_memory_kib(pid: int | str = "self") -> int:
    """Returns the shared anonymous memory (memfd, shm) that the process has touched."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1])
    return 0
