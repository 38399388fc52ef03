"""PyTorch's own DistributedTest on GPUs: every body that NCCL runs, over groups of ark.

The suite is imported as for NCCL, so that bodies are those for CUDA tensors, but they get ark's group. Bodies for what
no GPU group supports (CPU tensors, Gloo's and MPI's own features, more machines or ranks than there are) skip
themselves, for a reason listed here. Any other skip is a failure, and so is any failure except those that name the
backend. One set of ranks runs many bodies. A failed body runs once more on its own ranks before it counts. PARTS tests
share the bodies, for the shards. ARK_SUITE_ONLY=REGEX runs some of them.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from on_gpu import ENV, GPUS
from support import tables
from support.crew import Crew
from support.outcome import RanksFailed
from support.rank import Rank

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))
import suite_rank

PARTS = 4
BODY_LIMIT_S = 90.0
EXPECTED_SKIPS = re.compile(
    r"[Nn]ccl does not support|N(CCL|ccl) send/recv tested by|^Only (MPI|[Gg]loo)|^GLOO Batch|Gloo-only test|"
    r"requires backend nccl to be one of|^Requires file|(small|odd) world size|requires (an exact )?world size|"
    r"Need at least \d CUDA devices|no torchvision|github.com/pytorch/pytorch/issues|Test is failing|flakiness|"
    r"Currently failing in NVIDIA"
)
# body -> the required failure: the name that PyTorch itself checks, and nothing else.
FAIL_BY_NAME = {
    "test_get_backend": r"'?ark'? != 'nccl'",
    "test_ddp_profiling_execution_trace": r"'?ark'? != 'nccl'",
    "test_ddp_logging_data_gpu": r"'custom' != 'nccl'|'ark' != 'nccl'|'custom' != 'ark'|'ark' != 'custom'",
    "test_monitored_barrier_gloo": r"monitored_barrier is only implemented for GLOO backend",
}


# It fails over NCCL in the same way: a DDP with a static graph that is saved and loaded between two steps no longer
# averages (PyTorch 2.11, on GPUs). So those two steps are skipped, and all others run.
WITHOUT_RELOAD = {"test_DistributedDataParallel"}


def _prepare(rank: Rank) -> None:
    """Called before the suite is imported, and before each body."""
    torch.cuda.set_device(rank.rank)
    scratch = str(rank.scratch)
    os.environ.update(BACKEND="nccl", INIT_METHOD=f"file://{scratch}/none", TEMP_DIR=scratch, MASTER_ADDR="127.0.0.1")


def _bodies(rank: Rank) -> dict[str, str]:
    _prepare(rank)
    return suite_rank.bodies(rank)


def _body(rank: Rank, name: str) -> str:
    _prepare(rank)
    return suite_rank.run_body(rank, name, "nccl", reload=name not in WITHOUT_RELOAD)


class Suite:
    """Ranks that run bodies, restarted after each failure."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.crew = Crew(world, ENV)
        self.bodies: dict[str, str] = self.crew.run(_bodies)[0]

    def run(self, name: str) -> str:
        if not self.crew.alive:
            self.crew = Crew(self.world, ENV)
        return next((why for why in self.crew.run(_body, name, timeout=BODY_LIMIT_S) if why), "")


@pytest.fixture(scope="module")
def suites() -> Iterator[dict[int, Suite]]:
    made: dict[int, Suite] = {}
    yield made
    for suite in made.values():
        suite.crew.finish()


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("world", [count for count in (2, 4) if count <= GPUS])
def test_bodies(suites: dict[int, Suite], world: int, part: int) -> None:
    if world not in suites:
        suites[world] = Suite(world)
    suite = suites[world]
    only = re.compile(os.environ.get("ARK_SUITE_ONLY", ""))
    passed: list[str] = []
    again: list[str] = []
    skipped: dict[str, str] = {}
    failed: dict[str, str] = {}
    seconds: dict[str, float] = {}
    started = time.monotonic()
    runnable = [name for name in suite.bodies if not suite.bodies[name]]
    skipped.update({name: why for name, why in suite.bodies.items() if why and part == 0})
    for name in runnable[part::PARTS]:
        if not only.search(name):
            continue
        begun = time.monotonic()
        for attempt in range(2):
            try:
                why = suite.run(name)
            except RanksFailed as failure:
                failed[name] = str(failure)
                if "not within" in failed[name] or re.search(FAIL_BY_NAME.get(name, r"(?!)"), failed[name]):
                    break
                continue
            failed.pop(name, None)
            if why:
                skipped[name] = why
            else:
                passed.append(name)
                again += [name] * attempt
            break
        seconds[name] = time.monotonic() - begun
    by_name = [name for name, story in failed.items() if re.search(FAIL_BY_NAME.get(name, r"(?!)"), story)]
    unexpected = {name: story for name, story in failed.items() if name not in by_name}
    odd = {name: why for name, why in skipped.items() if not EXPECTED_SKIPS.search(why)}
    row = {
        "ranks": world,
        "part": part,
        "passed": len(passed),
        "passed on ranks of their own": len(again),
        "failed by name": len(by_name),
        "failed": len(unexpected),
        "skipped": len(skipped),
        "s": time.monotonic() - started,
    }
    tables.add("distributed_suite_cuda", **row)
    report = {"row": row, "passed": passed, "again": again, "skipped": skipped, "failed": failed, "seconds": seconds}
    path = tables.results_folder() / f"distributed_suite_cuda_{world}_{part}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    stories = "\n\n".join(f"===== {name}\n{story[-3000:]}" for name, story in unexpected.items())
    assert not unexpected, f"{len(unexpected)} bodies failed: {sorted(unexpected)} (whole: {path})\n{stories}"
    assert not odd, f"bodies skip themselves for a reason that is not known here: {odd}"
    assert passed or only.pattern, "no body ran"
