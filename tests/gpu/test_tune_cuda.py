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
from support.told import Lines

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


def _first_use(rank: Rank, cache: str) -> tuple[dict[str, int], list[str], list[str]]:
    """The GPU's model counts as unknown."""
    from ark_torch.distributed import first_use

    os.environ["ARK_CACHE"] = cache
    torch.cuda.set_device(rank.rank)
    first_use.model_of = lambda device: "Unknown GPU"
    lines = Lines()
    rank.init()
    torch.manual_seed(3)
    expected = torch.rand(3, device="cuda")
    torch.manual_seed(3)
    state = torch.cuda.get_rng_state()
    for count in (1, 5000, 300_001, (24 << 20) + 5):
        expected_sum = make_input(torch.float32, count, 3, rank.rank)
        tensor = expected_sum.cuda()
        dist.all_reduce(tensor)
        dist.all_reduce(expected_sum)
        same(tensor, expected_sum, f"all_reduce of {count}")
    assert torch.equal(torch.cuda.get_rng_state(), state) and torch.equal(torch.rand(3, device="cuda"), expected)
    group = dist.new_group(list(range(rank.world_size)))  # does not measure again
    dist.all_reduce(torch.ones(5, device="cuda"), group=group)
    backends = [one._get_backend(torch.device("cuda")) for one in (dist.group.WORLD, group)]
    assert backends[0].cuda_dispatch == backends[1].cuda_dispatch
    return backends[0].cuda_dispatch, lines.about("dispatch for"), lines.lines


def test_first_use_on_an_unknown_gpu(tmp_path: Path) -> None:
    first = run(_first_use, str(tmp_path), own=True, env={"ARK_TUNE": None})
    print("\n" + "\n".join(first[0][1]))
    assert len(first[0][1]) == 1 and "measured in" in first[0][1][0], first[0][2]
    assert all(numbers == first[0][0] for numbers, _, _ in first) and not any(told for _, told, _ in first[1:])
    (path,) = (tmp_path / "dispatch").glob("*.json")
    ((ranks, kept),) = load_dispatch(str(path))[1]
    assert ranks == len(first) and "one_shot_to" in kept
    later = run(_first_use, str(tmp_path), own=True, env={"ARK_TUNE": None})
    assert all(numbers == first[0][0] and not told for numbers, told, _ in later), later[0][1]
