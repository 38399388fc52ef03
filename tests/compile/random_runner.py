"""`python random_runner.py SEED COUNT [--device cuda] [--survey FOLDER] [--seconds S]`: runs COUNT random programs.

It is a separate process, so that a crash or hang of a compiled program becomes a failure with a program to look at. The
file named by RANDOM_PROGRAM has the current program. The last line of the output is a JSON object of counts. With
--survey, failures are written to FOLDER without shrinking, and the run continues for at most S seconds. On a GPU
nothing is shrunk, because a failure may have lost the process's context.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from random_checks import Check
from random_graphs import Program, programs

PROGRAM_LIMIT_S = 120.0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--survey", type=Path)
    chosen = parser.parse_args()
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    note = os.environ.get("RANDOM_PROGRAM", "")
    on_gpu, ends = chosen.device != "cpu", time.monotonic() + chosen.seconds

    @seed(chosen.seed)
    @settings(
        max_examples=chosen.count,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate] if chosen.survey or on_gpu else [Phase.generate, Phase.shrink],
    )
    @given(programs(chosen.device))
    def each(program: Program) -> None:
        nonlocal ends
        if time.monotonic() > ends:
            return
        if note:
            Path(note).write_text(program.script(), encoding="utf-8")
        faulthandler.dump_traceback_later(PROGRAM_LIMIT_S, exit=True)
        begin = time.perf_counter()
        try:
            with torch.no_grad():
                outcome = Check(program).verify()
        except Exception as error:
            if chosen.survey is None:
                error.add_note("\n" + program.script()) if hasattr(error, "add_note") else None
                print(program.script(), error, sep="\n", file=sys.stderr, flush=True)
                raise
            report(chosen.survey, f"{chosen.seed}-{counts['programs']}", program)
            counts["failed"] += 1
            if on_gpu and context_is_lost():
                ends = 0.0
        else:
            counts["refused"] += outcome.refused
            counts["on ark"] += outcome.regions > 0
            counts["ark's operators"] += outcome.operators
            counts["regions"] += outcome.regions
            counts["Inductor asked"] += bool(outcome.inductor_asked)
            if outcome.inductor_asked:
                counts[f"Inductor asked: {outcome.inductor_asked}"] += 1
            reasons.update(set(outcome.fallen))
        finally:
            faulthandler.cancel_dump_traceback_later()
        counts["programs"] += 1
        counts["statements"] += len(program.body)
        counts["ms"] += int((time.perf_counter() - begin) * 1e3)

    each()
    print(json.dumps({**counts, "reasons": reasons.most_common()}))
    return 0


def context_is_lost() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def report(folder: Path, name: str, program: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    told = "".join(f"# {line}\n" for line in traceback.format_exc().splitlines())
    (folder / f"{name}.py").write_text(program.script() + "\n" + told, encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(2)
    sys.exit(main())
