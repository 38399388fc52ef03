"""Compiles and starts the C++ program of channels between two GPUs (benchmarks/dma).

dma.py measures with it, and tests/gpu/test_channels.py checks with it. It does not use torch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
REPO = FOLDER.parent
sys.path.insert(0, str(REPO))  # this tree's package, installed or not

from ark_torch import _jit  # noqa: E402

# In include order. The package's own headers are found by name.
CHANNELS = ("store", "packet", "bulk", "copy_engine", "proxy")
HEADERS = (
    "slots.hpp",
    "flag.hpp",
    "channel.cuh",
    "bulk_mover.cuh",
    *(f"channel_{engine}.cuh" for engine in CHANNELS),
    "params.cuh",
    "kernels.cuh",
    "bulk_kernels.cuh",
)
OWN = re.compile(rf'^#(pragma once|include "({"|".join(map(re.escape, HEADERS))})")\n', re.MULTILINE)
# The package sources that the program needs. None uses torch.
SOURCES = ("csrc/util/*.cpp", "csrc/cuda/d*.cpp", "csrc/jit/*.cpp", "csrc/dma/*.cpp", "benchmarks/dma/*.cpp")


def stub() -> str:
    """Returns the source of the kernels for NVRTC, which instantiates every channel."""
    parts = [(FOLDER / "dma" / name).read_text(encoding="utf-8") for name in HEADERS]
    return OWN.sub("", "\n".join(parts))


def build(folder: Path) -> Path:
    """Compiles the program into the folder. Raises CalledProcessError on failure."""
    compiler = os.environ.get("CXX", "c++")
    includes = [f"-I{REPO / path}" for path in ("csrc", "third_party", "ark_torch/kernels", "benchmarks/dma")]
    launcher = ["ccache"] if shutil.which("ccache") else []

    def compile_one(source: Path) -> Path:
        target = folder / (str(source.relative_to(REPO)).replace("/", "_") + ".o")
        command = [*launcher, compiler, "-std=c++20", "-O2", *includes, "-c", str(source), "-o", str(target)]
        subprocess.run(command, check=True, timeout=200)
        return target

    sources = [source for pattern in SOURCES for source in sorted(REPO.glob(pattern))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    program = folder / "dma"
    subprocess.run([compiler, "-o", program, *objects, "-ldl", "-lpthread"], check=True, timeout=100)
    return program


def command(program: Path, **given: str) -> list[str]:
    """Returns the command line: these arguments, and where compiler, headers and cache are."""
    kernels = program.parent / "stub.cu"
    kernels.write_text(stub(), encoding="utf-8")
    toolkits = [path for name in ("CUDA_HOME", "CUDA_PATH") if (path := os.environ.get(name))]
    all_given = {
        "kernels": str(REPO / "ark_torch" / "kernels"),
        "stub": str(kernels),
        "cache": _jit.default_cache(),
        "roots": ":".join(_jit.library_roots()),
        "toolkit": ":".join([*toolkits, "/usr/local/cuda"]),
        **given,
    }
    return [str(program), *(f"{name}={value}" for name, value in all_given.items())]
