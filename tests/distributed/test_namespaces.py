"""Ranks that share no memory: three network namespaces joined by a bridge, like three machines.

ark detects this by itself (its local sockets belong to a network namespace) and logs one line. Gloo carries the data
between them, bit for bit. Needs root and the ip command; a skip is reported and counted.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import tables
from support.launcher import BACKEND, Job
from support.rank import Rank

SCRIPTS = Path(__file__).with_name("scripts")
CLONE_NEWNS, CLONE_NEWNET, MS_REC, MS_PRIVATE = 0x20000, 0x40000000, 0x4000, 0x40000  # of Linux's headers


def _can_make_namespaces() -> str:
    """Returns why this process may not create namespaces, or ""."""
    if BACKEND != "ark":
        return "what only ark promises"
    if os.geteuid() != 0 or not shutil.which("ip"):
        return "needs root and the ip command (iproute2)"
    name = f"arktry{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


@pytest.fixture(scope="module")
def namespaces() -> Iterator[list[tuple[str, str]]]:
    """Creates three namespaces with the addresses 10.77.0.1 to 10.77.0.3 on one bridge, which lies in the first."""
    why_not = _can_make_namespaces()
    if why_not:
        tables.add("namespaces", test="skipped", why=why_not)
        pytest.skip(why_not)
    tag = os.getpid() % 100_000
    names, links = [f"ark{tag}{letter}" for letter in "abc"], [f"bridge{tag}", f"vb{tag}", f"vc{tag}"]
    commands = [["ip", "netns", "add", name] for name in names]
    commands.append(["ip", "-n", names[0], "link", "add", links[0], "type", "bridge"])
    for name, link in zip(names[1:], links[1:], strict=True):
        port = f"to{link}"
        commands += [
            ["ip", "link", "add", link, "netns", name, "type", "veth", "peer", "name", port, "netns", names[0]],
            ["ip", "-n", names[0], "link", "set", port, "master", links[0], "up"],
        ]
    for index, (name, link) in enumerate(zip(names, links, strict=True)):
        inside = ["ip", "-n", name]
        commands += [
            [*inside, "addr", "add", f"10.77.0.{index + 1}/24", "dev", link],
            [*inside, "link", "set", link, "up"],
            [*inside, "link", "set", "lo", "up"],
        ]
    try:
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                tables.add("namespaces", test="skipped", why=done.stderr.strip())
                pytest.skip(f"{' '.join(command)}: {done.stderr.strip()}")
        yield list(zip(names, links, strict=True))
    finally:
        for name in names:  # this deletes the links as well
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _enter(namespace: str, private_mounts: bool) -> None:
    """Moves this process there: what it opens from now on belongs to that network."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: Any) -> None:
        if getattr(libc, name)(*arguments):
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")

    with open(f"/run/netns/{namespace}") as file:
        call("setns", file.fileno(), CLONE_NEWNET)
    if private_mounts:  # also a private /dev/shm, as in two containers, because names must not matter
        call("unshare", CLONE_NEWNS)
        call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
        call("mount", b"none", b"/dev/shm", b"tmpfs", 0, None)


def _on_a_machine(rank: Rank, machines: list[tuple[str, str]], private_mounts: bool) -> None:
    name, link = machines[rank.rank]
    _enter(name, private_mounts)
    os.environ["GLOO_SOCKET_IFNAME"] = link
    sys.path.insert(0, str(SCRIPTS))
    importlib.import_module("two_machines").main()


def _run(
    namespaces: list[tuple[str, str]], placement: list[int], private_mounts: bool = False, **env: str
) -> list[tuple[int | None, str]]:
    """Runs rank r in namespace placement[r]. Returns exit codes and outputs."""
    meet = {
        "MASTER_ADDR": "10.77.0.1",
        "MASTER_PORT": str(23_000 + os.getpid() % 20_000),
        "ARK_TEST_PLACEMENT": ",".join(map(str, placement)),
    }
    machines = [namespaces[place] for place in placement]
    by_day = "ARK_TEST_NIGHT" not in os.environ
    with Job(_on_a_machine, len(placement), machines, private_mounts, env=meet | env, leaves_at_once=by_day) as job:
        return [(outcome.exit_code, outcome.log) for outcome in job.finish(120)]


def _check(results: list[tuple[int | None, str]], carried: bool) -> None:
    for rank, (code, output) in enumerate(results):
        assert code == 0, f"rank {rank} ended with {code}:\n{output}"
        assert f"ok from rank {rank}" in output, output
        assert f"shares_memory={not carried}" in output, output
    lines = [line for _, output in results for line in output.splitlines() if "Gloo" in line]
    told = [line for line in lines if "group" in line]
    assert (len(told) >= 1) == carried, lines
    for _, output in results:  # one line per group, not per operation
        assert sum("Gloo" in line for line in output.splitlines()) <= 6, output


@pytest.mark.nightly
def test_two_namespaces_are_found_out_and_carried_by_gloo(namespaces: list[tuple[str, str]]) -> None:
    started = time.monotonic()
    results = _run(namespaces, [0, 1])
    _check(results, carried=True)
    tables.add("namespaces", test="two namespaces", why="", s=time.monotonic() - started)


@pytest.mark.by_day("[0, 0, 1, 1]", "[0, 1, 1, 2]")
@pytest.mark.parametrize(
    "placement", [[0, 0, 1, 1], [0, 0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 2], [0, 0, 1, 1, 2, 2]], ids=str
)
def test_several_ranks_in_namespaces(namespaces: list[tuple[str, str]], placement: list[int]) -> None:
    """Ranks of a namespace share memory, and one rank of each pair of rails represents its node."""
    results = _run(namespaces, placement)
    _check(results, carried=True)
    ranks = [placement.count(node) for node in range(1 + max(placement))]
    for _, output in results:
        plan = f"plan={len(ranks)} nodes ({' + '.join(map(str, ranks))} ranks), {min(ranks)} rail"
        assert plan in output, output


@pytest.mark.nightly
def test_private_mounts_as_well(namespaces: list[tuple[str, str]]) -> None:
    _check(_run(namespaces, [0, 1], private_mounts=True), carried=True)


def test_private_mounts_alone_still_share_memory(namespaces: list[tuple[str, str]]) -> None:
    """One network namespace with different mounts (a private /dev/shm): descriptors need no common file system."""
    _check(_run(namespaces, [0, 0], private_mounts=True), carried=False)


@pytest.mark.nightly
def test_shared_memory_on_refuses(namespaces: list[tuple[str, str]]) -> None:
    """ARK_SHARED_MEMORY=on: ranks that share no memory raise an error with the reason, on every rank."""
    for rank, (code, output) in enumerate(_run(namespaces, [0, 1], ARK_SHARED_MEMORY="on", ARK_TEST_INIT_ONLY="1")):
        assert code != 0, output
        last = [line for line in output.splitlines() if "ark:" in line][-1]
        assert f"rank {rank}" in last and "memory" in last and "ARK_SHARED_MEMORY" in output, last
