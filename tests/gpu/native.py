"""Builds the torch-free programs of tests/gpu with the machine's compiler."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
KERNELS = REPO / "ark_torch" / "kernels"
PROGRAMS = ("communicator_random", "peers")


def build(folder: Path) -> Path:
    """Builds the programs in the folder and returns it."""
    includes = [f"-I{path}" for path in (REPO / "csrc", KERNELS, REPO / "tests" / "csrc", REPO / "third_party")]
    sources = [source for source in (REPO / "csrc").rglob("*.cpp") if not source.name.startswith("bindings")]
    with_torch = [REPO / "csrc" / folder for folder in ("process_group", "compiler", "ops")]
    sources = [source for source in sources if not any(folder in source.parents for folder in with_torch)]
    mains = [REPO / "tests" / "gpu" / f"{program}.cpp" for program in PROGRAMS]

    def compile_one(source: Path) -> Path:
        target = folder / (str(source.relative_to(REPO)).replace("/", "_") + ".o")
        command = ["g++", "-std=c++20", "-O2", "-ffp-contract=off", *includes, "-c", source, "-o", target]
        subprocess.run(command, check=True, timeout=300)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, [*mains, *sources]))
    for program, main in zip(PROGRAMS, objects, strict=False):
        command = ["g++", "-o", folder / program, main, *objects[len(mains) :], "-ldl", "-lpthread"]
        subprocess.run(command, check=True, timeout=100)
    return folder
