"""The C++ compiler of compiled regions, with the standard headers precompiled: two thirds of a small region's time.

Only for -O1: GCC 12 takes what it has precompiled at another level, too, and crashes. Inductor's kernels are compiled
with -O1, too. At night tests use the compiler as it is.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from support.start import TESTS

KERNELS = TESTS.parent / "ark_torch" / "kernels"
# As in csrc/jit/host_compiler.cpp.
OPTIONS = [
    *("-std=c++20", "-O3", "-march=native", "-fPIC", "-shared", "-fvisibility=hidden"),
    *("-fno-math-errno", "-fno-trapping-math", "-fwrapv", "-ffp-contract=fast", "-Wno-psabi", "-O1"),
]
SCRIPT = """#!/bin/sh
case " $* " in
*" -O0 "*) exec {compiler} "$@" ;;
*" -O1 "*" plan.cpp "*) exec {compiler} -include {header} "$@" ;;
esac
exec {compiler} "$@" -O1
"""


def compiler(folder: Path) -> str | None:
    """What CXX is to be, made in that folder once for all processes of a run; None where it is no GCC."""
    found = shutil.which("c++")
    if found is None or "CXX" in os.environ:
        return None
    script, header = folder / "c++", folder / "standard.hpp"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not script.exists():
            if "gcc version" not in subprocess.run([found, "-v"], capture_output=True, text=True).stderr:
                return None
            texts = [path.read_text() for name in ("cpu", "protocol") for path in KERNELS.glob(f"{name}/*.hpp")]
            names = sorted({name for text in texts for name in re.findall(r"^#include <.*>$", text, re.MULTILINE)})
            header.write_text("\n".join(names) + "\n")
            command = [found, *OPTIONS, "-x", "c++-header", str(header), "-o", f"{header}.gch"]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
            script.write_text(SCRIPT.format(compiler=shlex.quote(found), header=shlex.quote(str(header))))
            script.chmod(0o700)
    return str(script)


if __name__ == "__main__":  # for the C++ tests: FOLDER; without a GCC any compiler
    made_in = Path(sys.argv[1]).absolute()
    made_in.mkdir(parents=True, exist_ok=True)
    print(compiler(made_in) or "c++")
