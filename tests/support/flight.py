"""Runs flight records through the converter and PyTorch's own analyser in a separate process, as users do.

The process is forked with PyTorch imported, because the import takes ten times as long as the analysis.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

from ark_torch.tools import flight
from support.launcher import Job
from support.rank import Rank

ANALYSER = "torch.distributed.flight_recorder.fr_trace"


def _analyser(rank: Rank, arguments: list[str]) -> None:
    sys.argv = [ANALYSER, *arguments]
    runpy.run_module(ANALYSER, run_name="__main__", alter_sys=True)


def analyse(folder: Path, *options: str) -> str:
    """Converts the folder's records to folder/converted and runs the analyser. Returns its output."""
    converted = folder / "converted"
    assert flight.main(["convert", str(folder), "--output", str(converted)]) == 0
    with Job(_analyser, 1, [str(converted), *options]) as job:
        (outcome,) = job.finish(120)
    assert outcome.exit_code == 0, outcome.describe()
    return outcome.log


def culprits(output: str) -> set[int]:
    """Returns ranks that the analyser blames for a mismatch: those that differ from the first file that it reads."""
    return {int(rank) for rank in re.findall(r"Culprit rank (\d+)", output)}
