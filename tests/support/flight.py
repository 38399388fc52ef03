"""Runs flight records through the converter and PyTorch's own analyser in a separate process, as users do."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from ark_torch.tools import flight

ANALYSER = "torch.distributed.flight_recorder.fr_trace"


def analyse(folder: Path, *options: str) -> str:
    """Converts the folder's records to folder/converted and runs the analyser. Returns its output."""
    converted = folder / "converted"
    assert flight.main(["convert", str(folder), "--output", str(converted)]) == 0
    command = [sys.executable, "-m", ANALYSER, str(converted), *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def culprits(output: str) -> set[int]:
    """Returns ranks that the analyser blames for a mismatch: those that differ from the first file that it reads."""
    return {int(rank) for rank in re.findall(r"Culprit rank (\d+)", output)}
