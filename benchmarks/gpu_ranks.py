"""One rank of a benchmark on GPUs: exchange of values between ranks, and the groups to compare.

Ranks exchange values over Gloo (the group `control`), which does not use the GPUs and so does not affect the figures.
Tensors are drawn from seeds, so that every rank knows what the others sent. Groups: ark, optionally with its own
environment variables or dispatch rule, and its rival: NCCL with a policy, or Gloo on CPU tensors. NVLink multicast is
off for all. This module turns it off on import, before any group exists.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this tree's package, installed or not

import torch
import torch.distributed as dist

import ark_torch  # noqa: F401  (registers the backend)

Row = dict[str, Any]


@dataclass
class Rank:
    """One process of the benchmark."""

    rank: int
    ranks: int
    device: torch.device
    ends: float  # a time.time() value
    rows: Path
    control: Any = None
    skipped: int = 0

    def time_for(self, seconds: float) -> bool:
        """Returns whether that much time is left. All ranks get rank 0's answer."""
        answer = [time.time() + seconds < self.ends]
        dist.broadcast_object_list(answer, 0, group=self.control)
        self.skipped += not answer[0]
        return bool(answer[0])

    def barrier(self) -> None:
        dist.barrier(group=self.control)

    def share(self, value: Any) -> list[Any]:
        """Returns every rank's value."""
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value, group=self.control)
        return values

    def slowest(self, rounds: list[float]) -> float:
        """Returns the median over rounds of the slowest rank's time."""
        return statistics.median(max(times) for times in zip(*self.share(rounds), strict=True))

    def write(self, row: Row) -> None:
        if self.rank == 0:
            with self.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def random(self, *shape: int, source: int | None = None, scale: float = 1.0) -> torch.Tensor:
        """Draws bfloat16 values that any rank can reproduce: `source` is the rank that owns them."""
        seed = 1 + (self.rank if source is None else source)
        generator = torch.Generator(device=self.device).manual_seed(seed)
        return (torch.randn(*shape, generator=generator, device=self.device) * scale).to(torch.bfloat16)

    def warn(self, text: str) -> None:
        if self.rank == 0:
            print(f"# {text}", file=sys.stderr, flush=True)


# --- groups ------------------------------------------------------------------------------------------------------

EFFICIENCY, ZERO = 1, 2  # NCCL_CTA_POLICY_*: fewer SMs; no SMs where copy engines suffice


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def first_call(rank: Rank, group: Any) -> Any:
    """Connects the ranks of a group and shares memory, which happens at the first call."""
    dist.all_reduce(torch.ones(1, device=rank.device), group=group)
    if rank.device.type == "cuda":
        torch.cuda.synchronize()
    return group


def ark_group(rank: Rank, given: dict[str, str] | None = None) -> Any:
    variables = {name: value for name, value in (given or {}).items() if name.isupper()}
    rule = {name: int(value) for name, value in (given or {}).items() if not name.isupper()}
    if rule:
        file, path = tempfile.mkstemp(prefix="dispatch-", suffix=".json", dir=rank.rows.parent)
        with os.fdopen(file, "w", encoding="utf-8") as table:
            json.dump({"cuda": [{"max_ranks": rank.ranks, **rule}]}, table)
        variables["ARK_DISPATCH"] = path
    with environment(variables):
        return first_call(rank, dist.new_group(backend="ark", timeout=timedelta(seconds=30)))


def rival_group(rank: Rank, policy: int | None = None) -> Any:
    """Returns a group of NCCL, or of Gloo on CPU tensors."""
    if rank.device.type == "cpu":
        return first_call(rank, dist.new_group(backend="gloo"))
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if policy is not None:
        options.config.cta_policy = policy
    return first_call(rank, dist.new_group(backend="nccl", pg_options=options, timeout=timedelta(seconds=60)))
