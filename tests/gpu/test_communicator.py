"""Random operations of the communicator without PyTorch (communicator_random.cpp), on every available number of GPUs.

The seed chooses which sizes use which algorithm (0 and 3 the measured dispatch, others the large paths for small sizes
too), and whether memory is registered (odd seeds). More ranks than GPUs share them and are slow, so those do less.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from native import KERNELS


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ranks", sorted({*range(1, torch.cuda.device_count() + 1), 3, 4}))
def test_random_operations(communicator_random: Path, ranks: int, seed: int) -> None:
    done = subprocess.run(
        [communicator_random, str(ranks), "300" if ranks <= torch.cuda.device_count() else "30", str(seed), KERNELS],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right:") == ranks, done.stdout
