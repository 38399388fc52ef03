"""The C++ compiler for compiled regions: precompiled standard headers and no optimisation, a third of the time.

What -O1 is asked for gets -O0, at which the headers are precompiled: GCC 12 also uses headers of another level, and
crashes. Inductor's kernels are compiled with -O1. At night the tests use the compiler without changes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from support.start import TESTS

FOLDER = TESTS.parent / "build" / "compiler-of-tests"
KERNELS = TESTS.parent / "ark_torch" / "kernels"
# Same as in csrc/jit/host_compiler.cpp.
OPTIONS = [
    *("-std=c++20", "-O3", "-march=native", "-fPIC", "-shared", "-fvisibility=hidden"),
    *("-fno-math-errno", "-fno-trapping-math", "-fwrapv", "-ffp-contract=fast", "-Wno-psabi", "-O0"),
]
SCRIPT = """#!/bin/sh
case " $* " in
*" -O0 "*) exec {compiler} "$@" ;;
*" -O1 "*" plan.cpp "*) exec {compiler} -include {header} "$@" -O0 ;;
esac
exec {compiler} "$@" -O1
"""


def compiler(folder: Path) -> str | None:
    """Returns the value of CXX, created once in that folder and reused by later runs, or None if it is not GCC.

    Its name is g++, by which Inductor recognizes that GCC would find its own precompiled header. Inductor keeps one for
    each compiler path and command, so the path must be the same in all runs.
    """
    found = shutil.which("c++")
    if found is None or "CXX" in os.environ:
        return None
    version = subprocess.run([found, "-v"], capture_output=True, text=True).stderr
    if "gcc version" not in version:
        return None
    texts = [path.read_text() for name in ("cpu", "protocol") for path in KERNELS.glob(f"{name}/*.hpp")]
    names = sorted({name for text in texts for name in re.findall(r"^#include <.*>$", text, re.MULTILINE)})
    made_of = "\n".join([found, version, SCRIPT, *OPTIONS, *names])
    folder = folder / hashlib.sha256(made_of.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    script, header = folder / "g++", folder / "standard.hpp"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not script.exists():
            header.write_text("\n".join(names) + "\n")
            command = [found, *OPTIONS, "-x", "c++-header", str(header), "-o", f"{header}.gch"]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
            made = folder / "script"
            made.write_text(SCRIPT.format(compiler=shlex.quote(found), header=shlex.quote(str(header))))
            made.chmod(0o700)
            made.rename(script)
    return str(script)


if __name__ == "__main__":  # for the C++ tests; without GCC it prints any compiler
    print(compiler(FOLDER) or "c++")
