"""The contenders of benchmarks/cuda_collectives.py: one operation at one size, in each implementation.

These are ark and NCCL on plain and on registered tensors, ark without what NCCL carries for it by default (ark_alone),
NCCL's efficiency and zero (copy-engine) policies where they apply, and PyTorch's symmetric memory in its one-shot,
two-shot and low-contention forms. Each has its own tensors. A contender that the version or machine lacks is left out
on all ranks and named on standard error. On CPU tensors there are ark and Gloo.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist

Call = Callable[[], Any]
MB = 1 << 20
POLICIES = {"nccl_efficiency": 1, "nccl_zero": 2}  # NCCL_CTA_POLICY_*
RIVALS = {"cuda": "nccl", "cpu": "gloo"}  # PyTorch's group, which also checks what only moves


def finish(device: torch.device) -> None:
    """Waits for all that the device was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def make_groups(
    device: torch.device,
    timeout: Any,
    reduction: str = "exact",
    alone: bool = False,
    variants: Collection[tuple[str, Mapping[str, str]]] = (),
) -> dict[str, Any]:
    """Creates the groups. The rival's is the default one. alone: ark_alone's, too; variants: names, a rule's fields."""
    import ark_torch

    os.environ["ARK_REDUCTION"] = reduction
    groups = {RIVALS[device.type]: dist.group.WORLD, "ark": dist.new_group(backend="ark", timeout=timeout)}
    rules = {f"ark_{name}": {field: int(value) for field, value in fields.items()} for name, fields in variants}
    if alone:
        rules["ark_alone"] = {}  # a table replaces NCCL's share
    for name, numbers in rules.items():
        options = ark_torch.Options()
        options.reduction = reduction
        options.cuda_dispatch = [(dist.get_world_size(), numbers)]
        groups[name] = dist.new_group(backend="ark", timeout=timeout, pg_options=options)
    for name, policy in POLICIES.items() if device.type == "cuda" else ():
        options = dist.ProcessGroupNCCL.Options()
        try:
            options.config.cta_policy = policy
        except AttributeError:
            print(f"left out: {name}: this PyTorch does not set NCCL's policy", file=sys.stderr)
            continue
        groups[name] = dist.new_group(backend="nccl", pg_options=options)
    for group in groups.values():  # the first call connects the ranks
        dist.all_reduce(torch.ones(1, device=device), group=group)
    return groups


class Row:
    """All implementations of one operation at one size."""

    def __init__(
        self,
        operation: str,
        size: int,
        rank: int,
        ranks: int,
        groups: dict[str, Any],
        only: Collection[str] = (),
        reduction: str = "exact",
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cuda",
    ) -> None:
        """only: the contenders; all that there are if empty. reduction: ark's sums."""
        self.reduction, self.dtype, self.device = reduction, dtype, torch.device(device)
        self.rival = RIVALS[device]
        self.operation, self.size, self.rank, self.ranks = operation, size, rank, ranks
        self.groups = groups
        self.count = max(size // dtype.itemsize // ranks, 1) * ranks
        generator = torch.Generator(device=device).manual_seed(1000 * rank + 1)
        self.seed = torch.randn(self.count, generator=generator, device=device).to(dtype)
        self.tensors: list[torch.Tensor] = []
        self.results: dict[str, torch.Tensor] = {}
        self.undo: list[Call] = []
        self.calls: dict[str, Call] = {}
        own = [name for name in groups if name.startswith("ark")]
        makers = dict.fromkeys([*own, self.rival], self.plain)
        if device == "cuda":
            makers |= {f"{name}_registered": self.ark_registered for name in own if name != "ark_alone"}
            makers |= {name: self.nccl_registered for name in ("nccl_registered", *POLICIES)}
            makers |= {
                "symm_one_shot": self.symmetric,
                "symm_two_shot": self.symmetric,
                "symm_low_contention": self.symmetric,
            }
        for name, make in makers.items():
            if only and name not in only:
                continue
            try:
                made = make(name)
            except (RuntimeError, AttributeError) as error:
                if rank == 0:
                    print(f"left out: {name}: {str(error).splitlines()[0]}", file=sys.stderr)
                continue
            if made is not None:
                self.calls[name] = made

    def renew(self) -> None:
        for tensor in self.tensors:
            tensor.copy_(self.seed[: tensor.numel()])

    def call_on(self, group: Any, tensors: list[torch.Tensor]) -> Call:
        """`tensors` is the whole tensor, and the part or second tensor if the operation has two sides."""
        whole, op = tensors[0], self.operation
        if op == "all_reduce":
            return lambda: dist.all_reduce(whole, group=group)
        if op == "broadcast":
            return lambda: dist.broadcast(whole, 0, group=group)
        other = tensors[1]
        if op == "all_to_all":
            return lambda: dist.all_to_all_single(other, whole, group=group)
        if op == "all_gather":
            return lambda: dist.all_gather_into_tensor(whole, other, group=group)
        if op == "reduce_scatter":
            return lambda: dist.reduce_scatter_tensor(other, whole, group=group)
        left, right = (self.rank - 1) % self.ranks, (self.rank + 1) % self.ranks

        def exchange() -> None:
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, whole, group=group, group_peer=right),
                    dist.P2POp(dist.irecv, other, group=group, group_peer=left),
                ]
            )
            for work in works:
                work.wait()

        return exchange

    def sides(self, name: str) -> list[torch.Tensor]:
        """Allocates both sides in one piece, as NCCL's windows require."""
        parts = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": self.ranks, "send_recv": self.ranks}
        other = self.count // self.ranks * parts.get(self.operation, 0)
        both = torch.empty(self.count + other, dtype=self.dtype, device=self.device)
        made = [both[: self.count], both[self.count :]][: 2 if other else 1]
        self.tensors += made
        self.results[name] = made[1 if self.operation in ("reduce_scatter", "all_to_all", "send_recv") else 0]
        return made

    def plain(self, name: str) -> Call:
        return self.call_on(self.groups[name], self.sides(name))

    def ark_registered(self, name: str) -> Call | None:
        from ark_torch import distributed, memory

        if self.operation == "send_recv":  # messages do not use registered memory
            return None
        group = self.groups[name.removesuffix("_registered")]
        with torch.cuda.use_mem_pool(memory.pool()):
            sides = self.sides(name)
        for side in sides:
            distributed.register(side, group=group)
            self.undo.append(lambda side=side: distributed.deregister(side, group=group))
        return self.call_on(group, sides)

    def nccl_registered(self, name: str) -> Call | None:
        if name == "nccl_efficiency" and self.operation not in ("all_reduce", "all_gather", "reduce_scatter"):
            return None
        if name == "nccl_zero" and self.operation not in ("all_gather", "all_to_all"):
            return None  # has no copy-engine form
        group = self.groups[name if name in POLICIES else "nccl"]
        backend = group._get_backend(torch.device("cuda"))
        pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            sides = self.sides(name)
        try:
            backend.register_mem_pool(pool, True)
        except TypeError:
            backend.register_mem_pool(pool)
        self.undo.append(lambda: backend.deregister_mem_pool(pool))
        return self.call_on(group, sides)

    def symmetric(self, name: str) -> Call | None:
        import torch.distributed._symmetric_memory as symmetric

        low = {
            "all_gather": (1, "_low_contention_all_gather"),
            "reduce_scatter": (self.ranks, "_low_contention_reduce_scatter"),
        }
        if (name == "symm_low_contention") != (self.operation in low):
            return None
        if self.operation not in ("all_reduce", *low) or (name == "symm_one_shot" and self.size > 4 * MB):
            return None
        group = self.groups["nccl"].group_name
        parts = low.get(self.operation, (self.ranks, ""))[0]
        tensor = symmetric.empty(self.count // self.ranks * parts, dtype=self.dtype, device=self.device)
        self.tensors.append(tensor)
        symmetric.rendezvous(tensor, group)
        ops, wait = torch.ops.symm_mem, torch.ops._c10d_functional.wait_tensor
        if self.operation == "all_gather":
            return lambda: wait(ops._low_contention_all_gather(tensor, group))
        if self.operation == "reduce_scatter":
            return lambda: wait(ops._low_contention_reduce_scatter(tensor, "sum", group))
        if name == "symm_one_shot":
            return lambda: ops.one_shot_all_reduce(tensor, "sum", group)
        return lambda: ops.two_shot_all_reduce_(tensor, "sum", group)

    def close(self) -> None:
        finish(self.device)
        for step in self.undo:
            step()
        for kept in (self.calls, self.tensors, self.undo, self.results):
            kept.clear()

    def wrong(self) -> int:
        """Counts elements of ark's results that are wrong. -1: not checked.

        A sum is right if it is the float32 sum in rank order, rounded once; with reduction "fast", if it differs by no
        more than rounding after each addition explains. What only moves is right if it is what the rival brings.
        """
        sums = "reduce" in self.operation
        if sums and self.size > 256 * MB:
            return -1
        self.renew()
        expected, bound = self._sums() if sums else (self._by_rival(), None)
        bits = torch.int16 if self.dtype.itemsize == 2 else torch.int32
        wrong = 0
        for name in [name for name in self.calls if name.startswith("ark")]:
            self.calls[name]()
            finish(self.device)
            if bound is None:
                wrong += int((self.results[name].view(bits) != expected.view(bits)).sum())
            else:
                wrong += int(((self.results[name].float() - expected.float()).abs() > bound).sum())
        return wrong

    def _by_rival(self) -> torch.Tensor:
        self.calls[self.rival]()
        finish(self.device)
        return self.results[self.rival].clone()

    def _sums(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The sum of this rank's elements, and how much another may differ from it; None: not at all."""
        inputs = torch.empty(self.ranks, self.count, dtype=self.dtype, device=self.device)
        dist.all_gather_into_tensor(inputs.view(-1), self.seed, group=self.groups[self.rival])
        if self.operation == "reduce_scatter":
            inputs = inputs.view(self.ranks, self.ranks, -1)[:, self.rank]
        total = inputs[0].to(torch.float32, copy=True)
        for r in range(1, self.ranks):
            total += inputs[r].float()
        roundings = self.ranks * (2 if self.dtype == torch.float32 else 1)  # in float32 this sum rounds as often, too
        rounding = roundings * torch.finfo(self.dtype).eps / 2 * inputs.abs().sum(0, dtype=torch.float32)
        return total.to(self.dtype), rounding if self.reduction == "fast" else None
