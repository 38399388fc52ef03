"""Random operations of the communicator without PyTorch (communicator_random.cpp), on every number of GPUs there is.

The seeds choose which sizes take which algorithm: 0 the measured dispatch, 1 and 2 the large paths for small sizes too.
"""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

REPO = Path(__file__).resolve().parents[2]
KERNELS = REPO / "ark_torch" / "kernels"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("communicator")
    includes = [f"-I{path}" for path in (REPO / "csrc", KERNELS, REPO / "tests" / "csrc")]
    sources = [source for source in (REPO / "csrc").rglob("*.cpp") if source.parent.name != "process_group"]
    sources = [source for source in sources if source.name != "bindings.cpp"]
    sources.append(REPO / "tests" / "gpu" / "communicator_random.cpp")

    def compile_one(source: Path) -> Path:
        target = folder / (str(source.relative_to(REPO)).replace("/", "_") + ".o")
        command = ["g++", "-std=c++20", "-O2", "-ffp-contract=off", *includes, "-c", source, "-o", target]
        subprocess.run(command, check=True, timeout=300)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    linked = folder / "communicator_random"
    subprocess.run(["g++", "-o", linked, *objects, "-ldl", "-lpthread"], check=True, timeout=100)
    return linked


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("ranks", range(1, torch.cuda.device_count() + 1))
def test_random_operations(program: Path, ranks: int, seed: int) -> None:
    done = subprocess.run(
        [program, str(ranks), "400", str(seed), KERNELS], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right:") == ranks, done.stdout
