"""Shared by all tests: markers, hard time limits, and a check that a test leaves nothing behind.

Tiers: `quick` (make test-quick), unmarked (make test), `nightly` (only with --night: make test-nightly, which runs all
tests, the compiler's with full optimisation). `changed("setup.py", ...)`: nightly, but also in `make test` if the last
commit or an uncommitted change touches one of these paths (ARK_TEST_BASE: since another revision). `by_day("3",
"2-carried")`: make test runs only these cases of a parametrized test, the night runs all of them. `alone`: nightly, and
not at the same time as other tests, because it needs both cores or has a time bound. --shard 2/5 runs every fifth test,
starting with the second.

pytest-timeout ends a test that hangs in the test process (pyproject.toml has the limit of tests that name none; ranks
have their own limits, see support/launcher.py).
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
from support import precompiled, processes, start, tables


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--night", action="store_true", help="every test, the long ones too, and full optimisation")
    parser.addoption("--shard", default="", metavar="i/n", help="every n-th test, from the i-th on")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "quick: runs in make test-quick (all of them under 2 minutes)")
    config.addinivalue_line("markers", "nightly: long; runs with --night only (make test-nightly)")
    config.addinivalue_line("markers", "changed(*paths): nightly, but runs in make test too when one of these changed")
    config.addinivalue_line("markers", "by_day(*names): the cases of a parametrized test that are not nightly")
    config.addinivalue_line("markers", "alone: runs beside no other test; nightly, too")
    # A shell starts background jobs with Ctrl-C ignored, and all their child processes would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@functools.cache
def _changed_paths() -> tuple[str, ...]:
    """Returns the paths that differ from the base revision, untracked files included.

    If git cannot tell, it returns everything if a base was requested, and nothing in a clone without history.
    """
    root = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> list[str] | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
        except OSError:
            return None
        return done.stdout.splitlines() if done.returncode == 0 else None

    base = os.environ.get("ARK_TEST_BASE", "")
    changed = git("diff", "--name-only", base or "HEAD~1")
    untracked = git("ls-files", "--others", "--exclude-standard")
    if changed is None or untracked is None:
        return ("*",) if base else ()
    return (*changed, *untracked)


def _is_for_the_night(item: pytest.Item) -> bool:
    if item.get_closest_marker("nightly"):
        return True
    by_day = item.get_closest_marker("by_day")
    if by_day is not None and _case_of(item) not in by_day.args:
        return True
    marker = item.get_closest_marker("changed")
    return marker is not None and not any(
        path == "*" or fnmatch(path, pattern) for path in _changed_paths() for pattern in marker.args
    )


def _case_of(item: pytest.Item) -> str:
    """Returns for example 2-carried for test_reduce[2-carried]."""
    return item.name.partition("[")[2].removesuffix("]")


@pytest.hookimpl(tryfirst=True, specname="pytest_collection_modifyitems")
def pytest_check_cases_by_day(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Checks that the named cases exist. A renamed case would silently become nightly."""
    if any("::" in argument for argument in config.args):
        return
    cases: dict[str, tuple[set[str], set[str]]] = {}
    for item in items:
        by_day = item.get_closest_marker("by_day")
        if by_day is not None:
            _, found = cases.setdefault(item.nodeid.partition("[")[0], (set(by_day.args), set()))
            found.add(_case_of(item))
    unknown = [f"{test}: {sorted(named - found)}" for test, (named, found) in cases.items() if named - found]
    if unknown:
        raise pytest.UsageError(f"by_day names cases that are not there: {'; '.join(unknown)}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = items
    if not config.getoption("--night"):
        kept = [item for item in items if not _is_for_the_night(item)]
        if alone := [item.nodeid for item in kept if item.get_closest_marker("alone")]:
            raise pytest.UsageError(f"`alone` is for the night, and these are not nightly: {', '.join(alone)}")
    shard = config.getoption("--shard")
    if shard:
        index, _, count = shard.partition("/")
        if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
            raise pytest.UsageError(f"--shard {shard}: it is i/n with 1 <= i <= n, such as 2/3")
        kept = kept[int(index) - 1 :: int(count)]
    remaining = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in remaining])
    items[:] = kept


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns one folder for all processes of the run. pytest-xdist gives each process a folder inside it."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def _shared_compilers(request: pytest.FixtureRequest, shared_folder: Path) -> Iterator[None]:
    """Prepares what ark's and Inductor's compilers need, once for this process and all that it starts."""
    cache = shared_folder / "compiled"
    cache.mkdir(mode=0o700, exist_ok=True)
    made = {
        "TORCHINDUCTOR_CACHE_DIR": str(shared_folder / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no processes besides those of the tests
        "ARK_TEST_CACHE": str(cache),
    }
    if request.config.getoption("--night"):
        made["ARK_TEST_NIGHT"] = "1"
    compiler = None if request.config.getoption("--night") else precompiled.compiler(precompiled.FOLDER)
    if compiler is not None:
        made["CXX"] = compiler
    os.environ.update(made)
    config = sys.modules.get("torch._inductor.config")
    if config is not None:  # it has read the environment already
        config.compile_threads = 1  # type: ignore[attr-defined]
    yield
    for name in made:
        del os.environ[name]


def _shared_memory_names() -> set[str]:
    """Returns names that our jobs could leave. Other programs on the machine may use /dev/shm, too."""
    return {name for name in os.listdir("/dev/shm") if "ark" in name}


def _own_memfds() -> set[str]:
    """Leaves out the libraries of compiled regions, which live as long as Dynamo's code."""
    links = processes.open_descriptors().values()
    return {link for link in links if link.startswith("/memfd:ark") and not link.startswith("/memfd:ark-plan")}


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    """Checks that no process, shared memory file or memfd of the test remains when it ends."""
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
