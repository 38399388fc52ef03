"""Random operations of the communicator without PyTorch (communicator_random.cpp), on every number of GPUs there is.

The seeds choose which sizes take which algorithm: 0 the measured dispatch, 1 and 2 the large paths for small sizes too.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from native import KERNELS


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("ranks", range(1, torch.cuda.device_count() + 1))
def test_random_operations(communicator_random: Path, ranks: int, seed: int) -> None:
    done = subprocess.run(
        [communicator_random, str(ranks), "400", str(seed), KERNELS],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right:") == ranks, done.stdout
