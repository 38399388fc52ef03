"""Random operations from a seed on ark and on a rival group (NCCL), compared on the device.

Every rank draws the same plan from the seed: kind, dtype, reduce op, size, alignment, group, root, stream, and whether
the call is synchronous, asynchronous or in a replayed CUDA graph. Reductions are of small integers, whose sums are
exact in every dtype and order, so that bits must agree. Data movement carries random bytes. No operation waits for the
host: a verdict is a byte on the device, and the bytes of a batch are read together. A failure names seed and step:
ARK_TEST_SEED=SEED ARK_TEST_OPERATIONS=STEP+1 repeats it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from random_plan import KINDS, NCCL_DTYPES, NCCL_FLOATS, POOL, REDUCING, Group, Plan, Step

BATCH = 256
GUARD = 16


class Runner:
    """This rank's side: its pools of values, its groups and streams."""

    def __init__(
        self, device: torch.device, groups: list[Group], seed: int, kinds: tuple[str, ...] = KINDS, streams: int = 4
    ) -> None:
        self.device, self.groups, self.seed = device, groups, seed
        self.me = dist.get_rank()
        self.cuda = device.type == "cuda"
        self.streams: list[Any] = [None] * streams
        if self.cuda:
            self.streams = [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(streams - 1))]
        self.plan = Plan(seed, [group.members for group in groups], streams, self.cuda, kinds)
        generator = torch.Generator().manual_seed(seed * 1000 + self.me)
        self._bytes = torch.randint(0, 256, (16 * POOL + 64,), dtype=torch.uint8, generator=generator).to(device)
        small = torch.randint(-2, 3, (POOL + 64,), generator=generator)
        self._integers = {dtype: small.to(dtype).to(device) for dtype in (*NCCL_FLOATS, torch.complex64)}
        self._integers[torch.bool] = (small > 0).to(device)
        self._verdicts = torch.zeros(BATCH, dtype=torch.bool, device=device)
        self._kept: list[tuple[Step, list[tuple[torch.Tensor, torch.Tensor]]]] = []
        self._graphs: list[Any] = []
        self.done = 0
        if self.cuda:
            torch.cuda.synchronize()

    def run(self, operations: int) -> int:
        """Runs and compares that many more operations. Returns how many this rank has taken part in."""
        for _ in range(operations):
            self._step(self.plan.draw())
            if len(self._kept) == BATCH:
                self.compare()
        self.compare()
        return self.done

    def compare(self) -> None:
        """Waits for the device and reads the verdicts."""
        if self.cuda:
            torch.cuda.synchronize()
        wrong = self._verdicts.tolist()
        for (step, pairs), bad in zip(self._kept, wrong, strict=False):
            assert not bad, self._story(step, pairs)
        self._verdicts.zero_()
        self._kept.clear()
        self._graphs.clear()
        if self.cuda:
            torch.cuda.synchronize()  # other streams write the next verdicts

    def _story(self, step: Step, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> str:
        text = f"seed {self.seed}: {step} in {self.groups[step.group].members}, rank {self.me}:"
        for index, (ours, theirs) in enumerate(pairs):
            a, b = ours.cpu().view(torch.uint8), theirs.cpu().view(torch.uint8)
            if not torch.equal(a, b):
                at = (a != b).nonzero().reshape(-1)
                text += f"\n  tensor {index}: {at.numel()} of {a.numel()} bytes differ, first at {int(at[0])}:"
                text += f" {a[at[:8]].tolist()} is not {b[at[:8]].tolist()}"
        return text

    def _step(self, step: Step) -> None:
        group = self.groups[step.group]
        if self.me not in group.members:
            return
        stream = self.streams[step.stream]
        with torch.cuda.stream(stream) if self.cuda else contextlib.nullcontext():
            ours, theirs = _Call(self, step, group, False), _Call(self, step, group, True)
            if step.how == "graph":
                repeats = self._captured(step, ours)
            else:
                repeats = 1
                ours.issue()
            theirs.issue()
            pairs = list(zip(ours.watched, theirs.watched, strict=True))
            index = len(self._kept)
            for one, two in pairs:
                differ = one.view(torch.uint8) != two.view(torch.uint8)
                self._verdicts[index].logical_or_(differ.any())
        self._kept.append((step, pairs))
        self.done += repeats

    def _captured(self, step: Step, call: _Call) -> int:
        """Captures the call in a graph and replays it. In-place operations get new inputs before each replay."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                call.issue()
            finally:
                graph.capture_end()
        current = torch.cuda.current_stream()
        # Only its stream orders a replay: operations of the group on other streams come before or after it.
        for stream in (side, *self.streams):
            current.wait_stream(stream)
        repeats = 1 + step.number % 3
        for _ in range(repeats):
            call.refill()
            graph.replay()
        for stream in self.streams:
            stream.wait_stream(current)
        self._graphs.append(graph)  # kept until the device is done with it
        return repeats

    def values(self, dtype: torch.dtype, at: int, count: int, reducing: bool) -> torch.Tensor:
        if (reducing and dtype in self._integers) or dtype is torch.bool:
            return self._integers[dtype][at : at + count]
        size = dtype.itemsize
        return self._bytes[at * size : (at + count) * size].view(dtype)


class _Call:
    """One operation's tensors on one of the two sides, and the call itself."""

    def __init__(self, runner: Runner, step: Step, group: Group, rival: bool) -> None:
        self._runner, self._step, self._group, self._rival = runner, step, group, rival
        self.size = len(group.members)
        self.mine = group.members.index(runner.me)
        self.watched: list[torch.Tensor] = []  # compared with the other side's, including the memory around them
        self._sources: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._make()

    def _place(self, count: int, filled: bool, at: int = 0) -> torch.Tensor:
        """Places a tensor in a larger poisoned buffer, which is compared as a whole."""
        step = self._step
        shift = step.shift + (self._runner.me & 1 if step.shift else 0)
        buffer = torch.full(
            ((count + shift + GUARD) * step.dtype.itemsize,), 0x5A, dtype=torch.uint8, device=self._runner.device
        ).view(step.dtype)
        tensor = buffer[shift : shift + count]
        if filled:
            values = self._runner.values(step.dtype, (step.at + at) % (POOL // 8), count, step.kind in REDUCING)
            tensor.copy_(values)
            self._sources.append((tensor, values))
        self.watched.append(buffer)
        return tensor

    def refill(self) -> None:
        for tensor, values in self._sources:
            tensor.copy_(values)

    def _make(self) -> None:
        step, size, mine = self._step, self.size, self.mine
        kind, count = step.kind, step.count
        wide = count * size
        self.first: Any = None
        self.second: Any = None
        if kind in ("all_reduce", "reduce", "broadcast"):
            self.first = self._place(count, True)
            if kind == "reduce" and mine != step.root:
                self.watched.pop()  # defined on the root only
        elif kind in ("all_gather", "all_gather_into_tensor", "gather"):
            self.second = self._place(count, True)
            if kind == "all_gather_into_tensor":
                self.first = self._place(wide, False)
            elif kind == "all_gather" or mine == step.root:
                self.first = [self._place(count, False) for _ in range(size)]
        elif kind in ("reduce_scatter", "reduce_scatter_tensor", "scatter"):
            self.first = self._place(count, False)
            if kind == "reduce_scatter_tensor":
                self.second = self._place(wide, True)
            elif kind == "reduce_scatter" or mine == step.root:
                self.second = [self._place(count, True, at=count * part) for part in range(size)]
        elif kind == "all_to_all_single":
            self.second = self._place(sum(step.splits[mine]), True)
            self.first = self._place(sum(row[mine] for row in step.splits), False)
        elif kind == "all_to_all":
            self.second = [self._place(step.splits[mine][r], True, at=400 * r) for r in range(size)]
            self.first = [self._place(step.splits[r][mine], False) for r in range(size)]
        elif kind == "send_recv" and size > 1:
            self.second = self._place(count + 1, True)
            self.first = self._place(count + 1, False)

    def _seen(self, tensors: Any) -> Any:
        """Returns tensors as the rival can take them: as bytes if it does not support the dtype."""
        dtype = self._step.dtype
        if not self._rival or dtype in NCCL_DTYPES or (self._step.kind in REDUCING and dtype.is_complex):
            return tensors
        if isinstance(tensors, list):
            return [self._seen(tensor) for tensor in tensors]
        return None if tensors is None else tensors.view(torch.uint8)

    def issue(self) -> None:
        step, group = self._step, self._group
        handle = group.rival if self._rival else group.ark
        first, second = self._seen(self.first), self._seen(self.second)
        root = group.members[step.root]
        # Inside a capture a wait is a node. Outside, the rival is called synchronously, so that it stays in order.
        options: dict[str, Any] = {"group": handle, "async_op": step.how == "async" and not self._rival}
        if step.kind in REDUCING:
            options["op"] = getattr(dist.ReduceOp, step.op)
        kind = step.kind
        work: Any
        if kind == "all_reduce":
            work = dist.all_reduce(first, **options)
        elif kind == "reduce":
            work = dist.reduce(first, root, **options)
        elif kind == "broadcast":
            work = dist.broadcast(first, root, **options)
        elif kind == "gather":
            work = dist.gather(second, first, root, **options)
        elif kind == "scatter":
            work = dist.scatter(first, second, root, **options)
        elif kind == "all_to_all_single":
            scale = step.dtype.itemsize // first.element_size()
            receives = [row[self.mine] * scale for row in step.splits]
            sends = [count * scale for count in step.splits[self.mine]]
            work = dist.all_to_all_single(first, second, receives, sends, **options)
        elif kind == "send_recv":
            work = self._messages(handle, first, second)
        elif kind == "barrier":
            work = dist.barrier(**options) if not self._rival else None
        else:
            work = getattr(dist, kind)(first, second, **options)
        for one in work if isinstance(work, list) else [work]:
            if one is not None:
                one.wait()

    def _messages(self, handle: Any, first: Any, second: Any) -> list[Any]:
        if self.size == 1:
            return []
        members, distance = self._group.members, 1 + self._step.root % (self.size - 1)
        to, source = members[(self.mine + distance) % self.size], members[(self.mine - distance) % self.size]
        ops = [dist.P2POp(dist.isend, second, to, group=handle), dist.P2POp(dist.irecv, first, source, group=handle)]
        return list(dist.batch_isend_irecv(ops if self._step.number % 2 else ops[::-1]))
