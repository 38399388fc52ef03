"""A copy of the project under build/mutations, the only place where faults are inserted.

The user's own files never change, however a run ends. The copy is kept, so that the next run rebuilds only changes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from support import processes

from faults.fault import Fault

ROOT = Path(__file__).resolve().parents[2]
FLAGS = {
    "plain": (),
    "thread": ("-DARK_SANITIZE=thread",),
    "address": ("-DARK_SANITIZE=address",),
}


class BuildFailed(Exception):
    """Its text is the end of the build's output."""


class Tree:
    """The copy, with at most one fault in it."""

    def __init__(self, place: Path) -> None:
        self.path = place / "tree"
        place.mkdir(parents=True, exist_ok=True)
        self._lock = (place / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"mutations: another run works in {place}: wait for it, or give --folder.") from None
        self._configured: set[str] = set()

    def refresh(self) -> None:
        """Updates the copy from the user's tree. Unchanged files keep their time, so that they are not rebuilt."""
        names = {name for name in _listed(ROOT) if (ROOT / name).is_file()}
        for old in (set(_kept(self.path)) if self.path.exists() else set()) - names:
            (self.path / old).unlink()
        for name in names:
            source, copy = ROOT / name, self.path / name
            content = source.read_bytes()
            if not copy.is_file() or copy.read_bytes() != content:
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(content)
            copy.chmod(source.stat().st_mode & 0o777)

    @contextlib.contextmanager
    def with_fault(self, fault: Fault) -> Iterator[None]:
        file = self.path / fault.file
        before = file.read_text(encoding="utf-8")
        file.write_text(fault.applied(before), encoding="utf-8")
        try:
            yield
        finally:
            file.write_text(before, encoding="utf-8")

    def environment(self) -> dict[str, str]:
        """Puts this Python's tools first. Tests must not see the user's tree, or what another fault left in a cache."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("ARK_")}
        env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
        env["PYTHONPATH"] = str(self.path)
        env["PYTHONDONTWRITEBYTECODE"] = "1"  # wrong for a file that changes twice within a second
        return env

    def build_extension(self) -> None:
        self._build([sys.executable, "setup.py", "-q", "build_ext", "--inplace"])

    def build_programs(self, kind: str, targets: Sequence[str]) -> None:
        folder = f"build/cpp-{kind}"
        if kind not in self._configured:
            self._build(
                [
                    "cmake",
                    "-S",
                    ".",
                    "-B",
                    folder,
                    "-G",
                    "Ninja",
                    "-DARK_WITH_TORCH=OFF",
                    "-DARK_UNITS=OFF",
                    *FLAGS[kind],
                ]
            )
            self._configured.add(kind)
        self._build(["cmake", "--build", folder, "--target", *targets])

    def _build(self, command: Sequence[str]) -> None:
        code, log = self.call(command, self.environment(), None)
        if code != 0:
            raise BuildFailed(f"{' '.join(command[:4])} ...: {log[-3000:]}")

    def call(self, command: Sequence[str], env: Mapping[str, str], limit_s: float | None) -> tuple[int | None, str]:
        """Returns the exit status (None if it exceeded its limit) and the output.

        All processes that it has started end with it: the caller is a subreaper (support/processes.py).
        """
        with tempfile.TemporaryDirectory(prefix="ark-mutations-") as folder, (Path(folder) / "log").open("w+") as log:
            Path(folder).chmod(0o755)  # tests run as other users
            Path(folder, "tmp").mkdir()
            Path(folder, "tmp").chmod(0o1777)
            child = subprocess.Popen(
                ["nice", "-n", "10", *command],
                cwd=self.path,
                env={**env, "TMPDIR": f"{folder}/tmp", "XDG_CACHE_HOME": f"{folder}/cache"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            code: int | None = None
            try:
                code = child.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                pass
            finally:
                processes.end_tree(processes.descendants(os.getpid()))
            return code, Path(log.name).read_text(encoding="utf-8", errors="replace")


def _listed(root: Path) -> list[str]:
    """Lists files that git knows or would add: no build, no environment."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0") if name]


def _kept(copy: Path) -> Iterator[str]:
    """Yields the copy's files, except for what was built there."""
    for folder, folders, files in os.walk(copy):
        folders[:] = [name for name in folders if name not in ("build", "__pycache__", ".pytest_cache")]
        for file in files:
            name = str((Path(folder) / file).relative_to(copy))
            if not name.endswith((".so", "_build_info.py", ".pyc")):
                yield name
