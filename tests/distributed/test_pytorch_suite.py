"""PyTorch's own DistributedTest, from the wheel, over groups of the backend under test.

Four bodies (six from 3 ranks on) name the accepted backends and so fail for any third party. Everything else that runs
must pass. What does not run is listed with its reason in distributed_suite_skips.json (committed). A body that skips
itself and is not in that list is a failure, because a skipped body is untested. ARK_UPDATE_SKIPS=1 rewrites the list.
ARK_SUITE_ONLY=REGEX runs a part.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import suite_rank
import torch
from support import tables
from support.launcher import BACKEND, Job, run_ranks
from support.outcome import RanksFailed
from support.start import Zygote

SKIPS_FILE = Path(__file__).with_name("distributed_suite_skips.json")
TORCH_MINOR = ".".join(torch.__version__.split(".")[:2])

# body -> the required failure: the name that PyTorch itself checks, and nothing else.
FAIL_BY_NAME = {
    "test_get_backend": r"'?ark'? != 'gloo'",
    "test_ddp_logging_data_cpu": r"'custom' != 'ark'|'ark' != 'custom'",
    "test_monitored_barrier_gloo": r"monitored_barrier is only implemented for GLOO backend",
    "test_monitored_barrier_gloo_subgroup": r"monitored_barrier is only implemented for GLOO backend",
    # These two skip themselves below 8 ranks. Here they run from 3 on.
    "test_monitored_barrier_failure_order": r"monitored_barrier is only implemented for GLOO backend",
    "test_monitored_barrier_wait_all_ranks": r"monitored_barrier is only implemented for GLOO backend",
}
BODY_LIMIT_S = 150.0
PARTS = 8  # the gate runs one of these
# Reasons that show only when the body starts. `make test` trusts the list (100 forks fewer); the nightly run starts
# every body.
LACKS_HARDWARE = re.compile(r"CUDA is not available|Need at least \d CUDA devices|small world size")


class Suite:
    """The suite's module as imported with one value of BACKEND and of WORLD_SIZE."""

    def __init__(self, seen_as: str, world_size: int) -> None:
        self.world_size = world_size
        self.zygote = Zygote(
            preload=("torch", "torch.testing._internal.distributed.distributed_test"),
            BACKEND=seen_as,
            WORLD_SIZE=str(world_size),
            INIT_METHOD="file:///nonexistent",
            TEMP_DIR="/nonexistent",
        )
        (self.bodies,) = run_ranks(suite_rank.bodies, 1, zygote=self.zygote)

    def run(self, name: str) -> str:
        """Returns why the body skipped itself ("" if it passed). Raises RanksFailed."""
        with Job(suite_rank.run_body, self.world_size, name, zygote=self.zygote, destroy=False) as job:
            return next((why for why in job.values(BODY_LIMIT_S) if why), "")


@pytest.fixture
def suites(request: pytest.FixtureRequest) -> Iterator[tuple[Suite, Suite]]:
    made = [Suite(seen_as, request.param) for seen_as in ("gloo", "mpi")]
    yield made[0], made[1]
    for suite in made:
        suite.zygote.close()


def _run_all(as_gloo: Suite, as_mpi: Suite, part: int) -> tuple[list[str], dict[str, str], dict[str, str]]:
    """Runs every PARTS-th body. Returns those that passed, skipped ones with reasons, failed ones with reports."""
    passed: list[str] = []
    skipped: dict[str, str] = {}
    failed: dict[str, str] = {}
    only = re.compile(os.environ.get("ARK_SUITE_ONLY", ""))
    believed = {}
    if as_gloo.world_size == 2 and not torch.cuda.is_available() and os.environ.get("ARK_UPDATE_SKIPS") != "1":
        believed = {name: why for name, why in _known_skips(2).items() if LACKS_HARDWARE.search(why)}
    for name, reason in list(as_gloo.bodies.items())[part::PARTS]:
        if not only.search(name):
            continue
        suite, why = as_gloo, reason
        if why and "all_to_all" in name and not as_mpi.bodies[name]:
            suite, why = as_mpi, ""
        if not why and name in believed:
            skipped[name] = believed[name]
            continue
        started = time.monotonic()
        try:
            why = why or suite.run(name)
        except RanksFailed as failure:
            failed[name] = str(failure)
            continue
        if why:
            skipped[name] = why
        else:
            passed.append(name)
        if time.monotonic() - started > 5:
            tables.add("distributed_suite_slow", ranks=as_gloo.world_size, body=name, s=time.monotonic() - started)
    return passed, skipped, failed


def _by_reason(skipped: dict[str, str]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for name, why in sorted(skipped.items(), key=lambda item: (item[1], item[0])):
        reasons.setdefault(why, []).append(name)
    return reasons


def _known_skips(world_size: int) -> dict[str, str]:
    known = json.loads(SKIPS_FILE.read_text()) if SKIPS_FILE.exists() else {}
    per_minor = known.get(TORCH_MINOR) or next(iter(known.values()), {})
    return {name: why for why, names in per_minor.get(str(world_size), {}).items() for name in names}


def _update_skips(world_size: int, bodies: set[str], skipped: dict[str, str]) -> None:
    known = json.loads(SKIPS_FILE.read_text()) if SKIPS_FILE.exists() else {}
    others = {name: why for name, why in _known_skips(world_size).items() if name not in bodies}
    known.setdefault(TORCH_MINOR, {})[str(world_size)] = _by_reason(others | skipped)
    SKIPS_FILE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def _unexpected(failed: dict[str, str]) -> dict[str, str]:
    if BACKEND == "gloo":
        return failed
    return {name: story for name, story in failed.items() if not re.search(FAIL_BY_NAME.get(name, r"(?!)"), story)}


@pytest.mark.changed(
    "csrc/process_group/*", "csrc/collectives/cpu/*", "ark_torch/distributed/*", "tests/distributed/*suite*"
)
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "suites",
    [2, pytest.param(3, marks=pytest.mark.nightly), pytest.param(4, marks=pytest.mark.nightly)],
    indirect=True,
)
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.nightly) for part in range(1, PARTS))], ids="part{}".format
)
def test_every_body(suites: tuple[Suite, Suite], part: int) -> None:
    as_gloo, as_mpi = suites
    world_size = as_gloo.world_size
    passed, skipped, failed = _run_all(as_gloo, as_mpi, part)
    for why, names in _by_reason(skipped).items():
        tables.add("distributed_suite_skips", ranks=world_size, bodies=len(names), why=why.splitlines()[0][:100])
    unexpected = _unexpected(failed)
    tables.add(
        "distributed_suite",
        ranks=world_size,
        passed=len(passed),
        failed_by_name=len(failed) - len(unexpected),
        failed=len(unexpected),
        skipped=len(skipped),
    )
    if os.environ.get("ARK_UPDATE_SKIPS") == "1":
        _update_skips(world_size, {*passed, *skipped, *failed}, skipped)
    stories = "\n\n".join(f"===== {name}\n{story}" for name, story in unexpected.items())
    assert not unexpected, f"{len(unexpected)} bodies failed: {sorted(unexpected)}\n{stories}"
    new = {name: why for name, why in skipped.items() if name not in _known_skips(world_size)}
    assert not new, f"bodies skip themselves that are not in {SKIPS_FILE.name}: {new}"
    assert passed, "no body ran"
