"""The CUDA autotune measures, adds a table to the file's content, and groups use rank 0's numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from on_gpu import GPUS, run, same
from support.rank import Rank
from support.reference import make_input

import ark_torch
from ark_torch import _C
from ark_torch.distributed.group import complete, load_dispatch


def test_the_tool_writes_a_table(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"rules": [], "cuda": [{"max_ranks": 8, "one_shot_to": 7}]}))
    command = [sys.executable, "-m", "ark_torch", "tune", "--cuda", "--ranks", "2", "--rounds", "2"]
    done = subprocess.run(
        [*command, "--output", str(table)], capture_output=True, text=True, timeout=200, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    _, cuda = load_dispatch(str(table))
    assert [ranks for ranks, _ in cuda] == [2, 8] and cuda[1][1] == {"one_shot_to": 7}
    assert set(cuda[0][1]) == set(_C._default_cuda_dispatch(2)), done.stdout


def _rank_0_decides(rank: Rank) -> None:
    """Every rank has another table. If each followed its own, they would hang."""
    torch.cuda.set_device(rank.rank)
    options = complete(ark_torch.Options())
    numbers = {"one_shot_to": 0 if rank.rank == 0 else 1 << 20, "chunks_from": 1024 << (8 * rank.rank)}
    options.cuda_dispatch = [(8, numbers)]
    rank.init(pg_options=options)
    for count in (100, 5000, 70_001, 1 << 20):
        expected = make_input(torch.float32, count, 3, rank.rank)
        tensor = expected.cuda()
        dist.all_reduce(tensor)
        dist.all_reduce(expected)
        same(tensor, expected, f"all_reduce of {count}")


def test_all_ranks_take_the_dispatch_of_rank_0() -> None:
    assert GPUS >= 2
    run(_rank_0_decides, own=True)
