"""The contenders of benchmarks/interference.py: groups, and one operation of one size on each.

A contender has its own tensors in the memory that its kind requires (plain, registered with ark, NCCL's windows,
symmetric memory) and a call without arguments. It knows the expected result after a number of calls. A contender that
the version or machine lacks is left out on all ranks and named on standard error. NCCL (Gloo on CPU) and ark are
required.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from gpu_ranks import EFFICIENCY, ZERO, Rank, ark_group, rival_group

SMALLEST = 2.0**-100  # initial values are small, because every all_reduce makes them grow
RIVALS = ("nccl", "gloo")


def most_calls(ranks: int) -> int:
    """Returns how many all_reduces of values of SMALLEST are possible before they overflow."""
    return int(200 / math.log2(ranks)) - 1 if ranks > 1 else 100


class Contender:
    """One way to run an operation of `count` elements (a rank's whole side of it), on its own tensors."""

    def __init__(self, name: str, rank: Rank, group: Any, operation: str, count: int) -> None:
        self.name, self.rank, self.group, self.operation, self.count = name, rank, group, operation, count
        self.pool: Any = None
        in_place = operation == "all_gather_in_place"
        two_sides = operation in ("all_gather", "reduce_scatter") or (in_place and name == "symm")
        part = count // rank.ranks if two_sides else 0
        if in_place and not part:
            self.whole = self.allocate(count)
            self.part = self.whole.chunk(rank.ranks)[rank.rank]
        elif name == "symm" and operation == "reduce_scatter":  # allocates its own result
            self.whole, self.part = self.allocate(count), torch.empty(part, dtype=torch.bfloat16, device=rank.device)
        elif name == "symm" and part:  # the same
            self.whole, self.part = torch.empty(0, dtype=torch.bfloat16, device=rank.device), self.allocate(part)
        else:
            both = self.allocate(count + part)  # one piece, so that one window covers all of it
            self.whole, self.part = both[:count], both[count:]
        self.call = self.make_call()

    def allocate(self, count: int) -> torch.Tensor:
        device = self.rank.device
        if self.name == "symm":
            import torch.distributed._symmetric_memory as symmetric

            tensor = symmetric.empty(count, dtype=torch.bfloat16, device=device)
            symmetric.rendezvous(tensor, self.group.group_name)
            return tensor
        if self.name == "ark_registered":
            from ark_torch import distributed, memory

            with torch.cuda.use_mem_pool(memory.pool()):
                tensor = torch.empty(count, dtype=torch.bfloat16, device=device)
            distributed.register(tensor, group=self.group)
            return tensor
        if self.name in ("nccl_registered", "nccl_efficiency", "nccl_zero"):
            backend = self.group._get_backend(device)
            self.pool = torch.cuda.MemPool(backend.mem_allocator)
            with torch.cuda.use_mem_pool(self.pool):
                tensor = torch.empty(count, dtype=torch.bfloat16, device=device)
            try:
                backend.register_mem_pool(self.pool, True)
            except TypeError:
                backend.register_mem_pool(self.pool)
            return tensor
        return torch.empty(count, dtype=torch.bfloat16, device=device)

    def make_call(self) -> Callable[[], Any]:
        whole, part, group = self.whole, self.part, self.group
        if self.name == "symm":
            name = group.group_name
            if self.operation == "all_reduce":
                return lambda: torch.ops.symm_mem.two_shot_all_reduce_(whole, "sum", name)
            if self.operation == "reduce_scatter":
                return self.low_contention_reduce_scatter
            return self.low_contention_all_gather
        if self.operation == "all_reduce":
            return lambda: dist.all_reduce(whole, group=group)
        if self.operation == "reduce_scatter":
            return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)

    def low_contention_all_gather(self) -> None:
        result = torch.ops.symm_mem._low_contention_all_gather(self.part, self.group.group_name)
        self.whole = torch.ops._c10d_functional.wait_tensor(result)

    def low_contention_reduce_scatter(self) -> None:
        result = torch.ops.symm_mem._low_contention_reduce_scatter(self.whole, "sum", self.group.group_name)
        self.part = torch.ops._c10d_functional.wait_tensor(result)

    def renew(self) -> None:
        if self.operation in ("all_reduce", "reduce_scatter"):
            self.whole.copy_(self.rank.random(self.count, scale=SMALLEST))
            if self.operation == "reduce_scatter":
                self.part.fill_(float("nan"))
        else:
            self.whole.fill_(float("nan"))
            self.part.copy_(self.rank.random(self.part.numel()))

    def wrong(self, calls: int) -> int:
        """Counts elements that differ from the expected result of that many calls on renewed tensors."""
        if self.operation not in ("all_reduce", "reduce_scatter"):
            parts = [self.rank.random(self.part.numel(), source=r) for r in range(self.rank.ranks)]
            return int((self.whole.view(torch.int16) != torch.cat(parts).view(torch.int16)).sum())
        ranks = self.rank.ranks
        total = self.rank.random(self.count, source=0, scale=SMALLEST).float()
        for r in range(1, ranks):
            total += self.rank.random(self.count, source=r, scale=SMALLEST).float()
        got = self.whole
        if self.operation == "reduce_scatter":  # every call gives the same
            got, total, calls = self.part, total.chunk(ranks)[self.rank.rank], 1
        grown = float(ranks) ** (calls - 1)
        expected = (total.to(torch.bfloat16).double() * grown).to(torch.bfloat16)
        exact = ranks & (ranks - 1) == 0 and (ranks == 2 or self.name.startswith("ark"))
        if exact:
            return int((got.view(torch.int16) != expected.view(torch.int16)).sum())
        # Rivals add in other orders: allow one rounding error of the largest partial sum per call.
        allowed = ranks * SMALLEST * grown * (2**-6 if ranks & (ranks - 1) == 0 else 2**-6 * calls)
        return int(((got.float() - expected.float()).abs() > allowed).sum())

    def close(self) -> None:
        if self.pool is not None:
            self.rank.barrier()
            self.group._get_backend(self.rank.device).deregister_mem_pool(self.pool)
        self.call = lambda: None
        del self.whole, self.part


def make_groups(rank: Rank, arguments: argparse.Namespace) -> dict[str, Any]:
    """Creates a group for each requested contender that is available. All ranks get the same set."""
    rival = "nccl" if rank.device.type == "cuda" else "gloo"
    makers: dict[str, Callable[[], Any]] = {rival: lambda: rival_group(rank)}
    makers["ark"] = lambda: ark_group(rank)
    for name, variables in arguments.ark:
        makers[f"ark_{name}"] = lambda variables=variables: ark_group(rank, variables)
    if rival == "nccl":
        makers["ark_registered"] = lambda: registering_group(groups)
        makers["nccl_registered"] = lambda: groups["nccl"]
        makers["nccl_efficiency"] = lambda: rival_group(rank, EFFICIENCY)
        makers["nccl_zero"] = lambda: rival_group(rank, ZERO)
        makers["symm"] = lambda: groups["nccl"]
    groups: dict[str, Any] = {}
    for name, make in makers.items():
        if arguments.contenders and name not in (*arguments.contenders, rival):
            continue
        try:
            groups[name] = make()
        except (RuntimeError, AttributeError, ImportError) as error:  # not in this version, on any rank
            if name in (rival, "ark"):
                raise
            rank.warn(f"left out: {name}: {str(error).splitlines()[0]}")
    return groups


def registering_group(groups: dict[str, Any]) -> Any:
    from ark_torch.distributed import register  # noqa: F401  (ImportError: this version does not register memory)

    return groups["ark"]


def make_contenders(rank: Rank, groups: dict[str, Any], operation: str, count: int) -> list[Contender]:
    made = []
    for name, group in groups.items():
        try:
            made.append(Contender(name, rank, group, operation, count))
        except (RuntimeError, AttributeError, TypeError) as error:
            if name in ("nccl", "gloo", "ark"):
                raise
            rank.warn(f"left out: {name} {operation}: {str(error).splitlines()[0]}")
    return made
