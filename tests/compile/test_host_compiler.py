"""The host compiler as programs see it: named by CXX, missing, failing, killed, used by many at once.

Also a cache with files that cannot be loaded. Each test starts new processes, because a process keeps its compiler.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import logging, sys, torch
logging.basicConfig(level=logging.WARNING, format="%(name)s %(message)s")
call = torch.compile(lambda a: torch.tanh(a) * 2 + 1, backend="ark", options={"choose": "ark", "fallback": FALLBACK})
with torch.no_grad():
    a = torch.linspace(-1, 1, 50)
    torch.testing.assert_close(call(a), torch.tanh(a) * 2 + 1)
print("right")
"""


def start(folder: Path, cxx: str = "", fallback: bool = True) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "ARK_CACHE": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    environment.pop("CXX", None)
    if cxx:
        environment["CXX"] = cxx
    program = PROGRAM.replace("FALLBACK", str(fallback))
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def script(folder: Path, text: str) -> str:
    """A compiler with a space in its name."""
    path = folder / "my cxx"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return f"'{path}'"


def counting(folder: Path) -> str:
    """The real compiler, which also records its calls."""
    real = next(path for name in ("c++", "g++", "clang++") if (path := shutil.which(name)))
    return script(folder, f'echo "$*" >> {folder}/asked; exec {real} "$@"')


def compiled(folder: Path) -> int:
    return (folder / "asked").read_text().count("-o plan.so")


@pytest.mark.changed("csrc/jit/*", "ark_torch/_jit.py")
def test_many_processes_compile_once_and_a_cache_that_does_not_load_is_replaced(tmp_path: Path) -> None:
    cxx = counting(tmp_path) + " -DFROM_CXX"
    for process in [start(tmp_path, cxx) for _ in range(4)]:
        out, told = process.communicate(timeout=200)
        assert out == "right\n", told
    assert compiled(tmp_path) == 1 and "-DFROM_CXX" in (tmp_path / "asked").read_text()
    # As if from another machine: the hash is correct, but the loader refuses it.
    (library,) = (tmp_path / "cache").glob("*.so")
    meta = library.with_suffix(".meta.json")
    was = meta.read_text()
    bad = b"\x7fELF" + bytes(1000)
    library.write_bytes(bad)
    meta.write_text(was.replace(json.loads(was)["so_sha256"], hashlib.sha256(bad).hexdigest()))
    for _ in range(2):
        out, told = start(tmp_path, cxx).communicate(timeout=100)
        assert (out, told) == ("right\n", "")
        assert compiled(tmp_path) == 2


COMPILERS = {
    "missing": (None, "'/no/such/compiler' is not there"),
    "failing": (
        'case "$*" in *plan.so*) echo plan.cpp:1: error: no; exit 1;; esac; exit 0',
        "failed (exit status 1): plan.cpp:1: error: no",
    ),
    # Like coreutils' /bin/false, whose version text is not an error message.
    "no compiler": ("echo Written by nobody; exit 1", "asked for its --version, failed with exit status 1"),
    "killed": ('case "$*" in *plan.so*) kill -9 $$;; esac; exit 0', "was killed by signal 9"),
}


@pytest.mark.changed("csrc/jit/*", "ark_torch/_jit.py")
@pytest.mark.parametrize("name", COMPILERS)
def test_without_a_compiler_that_works(name: str, tmp_path: Path) -> None:
    """One log line and the correct result. It is an error only if the user allows no fallback."""
    text, reason = COMPILERS[name]
    cxx = "/no/such/compiler" if text is None else script(tmp_path, text)
    both = [start(tmp_path, cxx), start(tmp_path, cxx, fallback=False)]
    (out, told), (nothing, error) = (process.communicate(timeout=200) for process in both)
    assert out == "right\n", told
    (sentence,) = [line for line in told.splitlines() if "falls back" in line]
    assert reason in sentence
    assert nothing == "" and both[1].returncode == 1 and reason in error
