"""One rank of one body of PyTorch's own DistributedTest, over a group of the backend under test.

The suite decides at import, from $BACKEND, which bodies skip themselves. It is imported with BACKEND set to "gloo" (or
"mpi" for the all-to-all bodies), so that they run, and gets a group of our backend. This mirrors TestDistBackend._run
without its pipes and listener thread.
"""

from __future__ import annotations

import os
import unittest
from datetime import timedelta
from typing import Any

from support.rank import Rank


def _suite() -> Any:
    from torch.testing._internal.distributed import distributed_test

    return distributed_test


def _case() -> Any:
    suite = _suite()
    return type("ArkSuite", (suite.TestDistBackend, suite.DistributedTest._DistTestBase), {})


def bodies(rank: Rank) -> dict[str, str]:
    """Returns every body and why its decorators skip it ("" if they do not)."""
    case = _case()
    names = [name for name in dir(case) if name.startswith("test")]
    return {name: getattr(getattr(case, name), "__unittest_skip_why__", "") for name in names}


def run_body(rank: Rank, name: str, seen_as: str = "", reload: bool = True) -> str:
    """Returns "" if the body passed, otherwise why it skipped itself. Raises what the body raises.

    `seen_as` is the value of BACKEND while the body runs. With `reload`, DDP is saved and loaded between two steps.
    """
    import torch.distributed as dist
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_distributed import TEST_SKIPS

    suite = _suite()
    folder = f"{rank.scratch}/{rank.job.rpartition('/')[2]}"  # ranks that run several bodies need one folder for each
    init = f"file://{folder}/init_dir/file"
    os.environ.update(TEMP_DIR=folder, INIT_METHOD=init, MASTER_ADDR="127.0.0.1")
    # Bodies for the group [1, 2] skip themselves below 8 ranks unless this is "mpi". They need three.
    os.environ["BACKEND"] = seen_as or ("mpi" if rank.world_size > 2 else "gloo")
    usual, suite.INIT_METHOD = suite.INIT_METHOD, suite.INIT_METHOD if reload else "env://"
    suite.Barrier.barrier_id = 0
    for sub in ("barrier", "test_dir", "init_dir"):
        os.makedirs(os.path.join(folder, sub), exist_ok=True)
    case = _case()(name)
    case.rank = rank.rank
    case.file_name = f"{folder}/init_dir/file"
    timeout = timedelta(seconds=suite.CUSTOM_PG_TIMEOUT.get(name, suite.default_pg_timeout))
    dist.init_process_group(rank.backend, init_method=init, world_size=rank.world_size, rank=rank.rank, timeout=timeout)
    case._barrier(timeout=60)
    common_utils.set_rng_seed()
    why = ""
    try:
        getattr(case, name)()
    except unittest.SkipTest as skip:
        why = str(skip) or "SkipTest"
    except SystemExit as leave:
        why = next((skip.message for skip in TEST_SKIPS.values() if skip.exit_code == leave.code), "")
        if not why:
            raise AssertionError(f"{name} left with exit code {leave.code}") from leave
    if not why:
        case._barrier(timeout=60)
    suite.INIT_METHOD = usual  # after a failure this process runs no other body
    if dist.is_initialized():
        dist.destroy_process_group()
    return why
