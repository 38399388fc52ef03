"""Random small operations from a seed, compared with Gloo in the same processes.

Every rank draws the same plan from the seed: operation, dtype, reduce op, shapes, layout, group, root, sync or async,
thread. Each operation runs on ark and on a Gloo group of the same ranks. Gloo gets contiguous copies and only dtypes
that it supports; the rest is compared bit for bit with the local reference. A failure names seed and step:
ARK_TEST_SEED=SEED ARK_TEST_OPERATIONS=STEP+1 repeats it.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import BACKEND, run_ranks
from support.layouts import Placed, poison
from support.rank import Rank
from support.reference import assert_same_bits, join, make_input, reduce, supported

GLOO_DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64, torch.int8, torch.uint8, torch.float16)
OTHER_DTYPES = (torch.bfloat16, torch.bool, torch.int16, torch.uint32, torch.float8_e5m2, torch.complex64)
KINDS = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "gather",
    "scatter",
    "all_to_all_single",
    "all_to_all",
    "send_recv",
    "barrier",
)
LAYOUTS = ("plain", "plain", "offset", "strided")
if BACKEND == "gloo":  # plain Gloo's features, for working on the tests themselves
    OTHER_DTYPES, GLOO_DTYPES, LAYOUTS = (torch.float64,), (torch.int32, torch.int64), ("plain",)
    KINDS = tuple(kind for kind in KINDS if kind not in ("reduce", "all_to_all"))
EXACT_IN_ANY_ORDER = (torch.int32, torch.int64, torch.int8, torch.uint8)


@dataclass
class Step:
    """One operation of the plan, the same on every rank."""

    number: int
    kind: str
    dtype: torch.dtype
    op: str
    count: int
    layout: str
    group: int
    root: int
    is_async: bool
    splits: list[list[int]]


@dataclass
class Group:
    members: list[int]
    ark: Any
    gloo: Any


def _plan(rng: random.Random, number: int, groups: list[list[int]]) -> Step:
    dtype = rng.choice(GLOO_DTYPES if rng.random() < 0.7 else OTHER_DTYPES)
    op = rng.choice([o for o in ("SUM", "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BXOR") if supported(dtype, o)])
    group = rng.randrange(len(groups))
    size = len(groups[group])
    count = rng.choice([0, 1, 2, 3, 5, 16, 31, 64, 100, 257, 1000, 4097]) if rng.random() < 0.97 else 70_001
    return Step(
        number=number,
        kind=rng.choice(KINDS),
        dtype=dtype,
        op=op,
        count=count,
        layout=rng.choice(LAYOUTS),
        group=group,
        root=rng.randrange(size),
        is_async=rng.random() < 0.4,
        splits=[[rng.choice([0, 1, 7, 60]) for _ in range(size)] for _ in range(size)],
    )


def _run(step: Step, group: Group, me: int) -> list[Callable[[], None]]:
    """Issues the step on ark. The returned functions wait, compare, and issue Gloo's counterpart."""
    members, count, dtype = group.members, step.count, step.dtype
    size, mine = len(members), members.index(me)
    what = f"{step}"
    seed = step.number
    works: list[Any] = []
    inputs = [make_input(dtype, count, seed, r) for r in range(size)]
    wide = [make_input(dtype, count * size, seed, r) for r in range(size)]
    red_op = getattr(dist.ReduceOp, step.op)
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    placed: list[Placed] = []

    def place(values: torch.Tensor) -> torch.Tensor:
        placed.append(Placed(values, step.layout))
        return placed[-1].tensor

    def blank(elements: int) -> torch.Tensor:
        return place(poison(torch.empty(elements, dtype=dtype)))

    def call(function: Any, *args: Any, **kwargs: Any) -> None:
        works.append(function(*args, group=group.ark, async_op=step.is_async, **kwargs))

    root = members[step.root]
    if step.kind == "all_reduce":
        tensor = place(inputs[mine])
        call(dist.all_reduce, tensor, op=red_op)
        results.append((tensor, reduce(inputs, step.op)))
    elif step.kind == "reduce":
        tensor = place(inputs[mine])
        call(dist.reduce, tensor, dst=root, op=red_op)
        results.append((tensor, reduce(inputs, step.op) if mine == step.root else inputs[mine]))
    elif step.kind == "broadcast":
        tensor = place(inputs[mine])
        call(dist.broadcast, tensor, src=root)
        results.append((tensor, inputs[step.root]))
    elif step.kind == "all_gather":
        outputs = [blank(count) for _ in range(size)]
        call(dist.all_gather, outputs, place(inputs[mine]))
        results += zip(outputs, inputs, strict=True)
    elif step.kind == "all_gather_into_tensor":
        tensor = blank(count * size)
        call(dist.all_gather_into_tensor, tensor, place(inputs[mine]))
        results.append((tensor, join(inputs)))
    elif step.kind == "reduce_scatter":
        tensor = blank(count)
        parts = wide[mine].split(count) if count else [wide[mine]] * size
        call(dist.reduce_scatter, tensor, [place(part.clone()) for part in parts], op=red_op)
        results.append((tensor, reduce(wide, step.op)[count * mine : count * (mine + 1)]))
    elif step.kind == "reduce_scatter_tensor":
        tensor = blank(count)
        call(dist.reduce_scatter_tensor, tensor, place(wide[mine]), op=red_op)
        results.append((tensor, reduce(wide, step.op)[count * mine : count * (mine + 1)]))
    elif step.kind == "gather":
        outputs = [blank(count) for _ in range(size)] if mine == step.root else None
        call(dist.gather, place(inputs[mine]), outputs, dst=root)
        results += zip(outputs, inputs, strict=True) if outputs else []
    elif step.kind == "scatter":
        tensor = blank(count)
        call(dist.scatter, tensor, [place(x) for x in inputs] if mine == step.root else None, src=root)
        results.append((tensor, inputs[mine]))
    elif step.kind in ("all_to_all_single", "all_to_all"):
        sent = [list(make_input(dtype, sum(row), seed, r).split(row)) for r, row in enumerate(step.splits)]
        receives = [row[mine] for row in step.splits]
        expected = [sent[r][mine] for r in range(size)]
        if step.kind == "all_to_all":
            outputs = [blank(n) for n in receives]
            call(dist.all_to_all, outputs, [place(x) for x in sent[mine]])
            results += zip(outputs, expected, strict=True)
        else:
            tensor = blank(sum(receives))
            call(dist.all_to_all_single, tensor, place(join(sent[mine])), receives, step.splits[mine])
            results.append((tensor, join(expected)))
    elif step.kind == "send_recv":
        tensor = blank(count)
        after, before = members[(mine + 1) % size], members[(mine - 1) % size]
        if size > 1:
            works.append(dist.isend(place(inputs[mine]), after, group=group.ark, tag=seed % 1000))
            works.append(dist.irecv(tensor, before, group=group.ark, tag=seed % 1000))
            results.append((tensor, inputs[(mine - 1) % size]))
    else:
        call(dist.barrier)

    def finish() -> None:
        for work in works:
            if work is not None:
                work.wait()
        for got, want in results:
            assert_same_bits(got.reshape(-1), want.reshape(-1), what)
        for one in placed:
            one.check(what)

    def against_gloo() -> None:
        if dtype not in GLOO_DTYPES or step.op in ("AVG", "BXOR"):
            return
        if step.kind == "all_reduce":
            twin = inputs[mine].clone()
            dist.all_reduce(twin, red_op, group=group.gloo)
        elif step.kind == "broadcast":
            twin = inputs[mine].clone()
            dist.broadcast(twin, root, group=group.gloo)
        elif step.kind == "all_gather_into_tensor":
            twin = torch.empty(count * size, dtype=dtype)
            dist.all_gather_into_tensor(twin, inputs[mine], group=group.gloo)
        elif step.kind == "reduce_scatter_tensor" and count:
            twin = torch.empty(count, dtype=dtype)
            dist.reduce_scatter_tensor(twin, wide[mine].clone(), red_op, group=group.gloo)
        elif step.kind == "all_to_all_single":
            twin = torch.empty(sum(row[mine] for row in step.splits), dtype=dtype)
            own = make_input(dtype, sum(step.splits[mine]), seed, mine)
            dist.all_to_all_single(twin, own, [row[mine] for row in step.splits], step.splits[mine], group=group.gloo)
        else:
            return
        got = results[0][0].reshape(-1)
        if dtype in EXACT_IN_ANY_ORDER or step.kind not in ("all_reduce", "reduce_scatter_tensor"):
            assert_same_bits(got, twin, f"ark and Gloo differ: {what}")
        else:  # Gloo adds in its own order (and rounds float16 at every step)
            torch.testing.assert_close(
                got,
                twin,
                rtol=2e-2 if dtype is torch.float16 else 1e-4,
                atol=2e-2,
                equal_nan=True,
                msg=lambda m: f"ark and Gloo differ: {what}: {m}",
            )

    return [finish, against_gloo]


def _groups(world: int) -> list[list[int]]:
    full = list(range(world))
    return [full, full[:2], full[-2:], full[::-1]] if world > 2 else [full, full, [0], full[::-1]]


def _random(rank: Rank, seed: int, operations: int, threads: int) -> int:
    rank.init(timeout=60)
    me = rank.rank
    plan_groups = _groups(rank.world_size)
    lanes: list[list[Group]] = []
    for _ in range(threads):  # a thread has its own groups, because all ranks must use a group in the same order
        lanes.append(
            [Group(m, dist.new_group(sorted(m)), dist.new_group(sorted(m), backend="gloo")) for m in plan_groups]
        )
        for group in lanes[-1]:
            group.members = sorted(group.members)
    failures: list[BaseException] = []

    def lane(index: int) -> None:
        rng = random.Random(seed * 1000 + index)
        pending: list[Callable[[], None]] = []
        number = -1
        try:
            for number in range(operations // threads):
                step = _plan(rng, number + index * 1_000_000, plan_groups)
                if me in lanes[index][step.group].members:
                    pending += _run(step, lanes[index][step.group], me)
                # The plan decides when to wait, on non-members as well: waiting blocks, so the order must be the same
                # for all.
                if not step.is_async or rng.random() < 0.2:
                    for wait in pending:
                        wait()
                    pending.clear()
            for wait in pending:
                wait()
        except BaseException as error:
            print(f"seed {seed}, thread {index}, step {number}", file=sys.stderr)
            failures.append(error)

    workers = [threading.Thread(target=lane, args=(index,)) for index in range(1, threads)]
    for worker in workers:
        worker.start()
    lane(0)
    if failures:
        raise failures[0]
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]
    return operations


def _seed(default: int) -> int:
    return int(os.environ.get("ARK_TEST_SEED", str(default)))


@pytest.mark.quick
def test_a_few_random_operations() -> None:
    run_ranks(_random, 2, _seed(1), 400, 1, timeout=100)


@pytest.mark.by_day("2-3")
@pytest.mark.parametrize(
    "world, threads", [(2, 3), (3, 2), *(pytest.param(*more, marks=pytest.mark.nightly) for more in ((2, 1), (4, 1)))]
)
def test_random_operations(world: int, threads: int) -> None:
    operations = int(os.environ.get("ARK_TEST_OPERATIONS", "1250"))
    run_ranks(_random, world, _seed(7 + world), operations, threads, timeout=280)


def test_random_operations_carried_by_gloo() -> None:
    run_ranks(_random, 2, _seed(77), 400, 2, env={"ARK_SHARED_MEMORY": "off"}, timeout=280)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world, threads", [(2, 1), (2, 4), (3, 2), (4, 1), (4, 3)])
def test_a_hundred_thousand_random_operations(world: int, threads: int) -> None:
    operations = int(os.environ.get("ARK_TEST_OPERATIONS", "20000"))
    run_ranks(_random, world, _seed(100 + world * 10 + threads), operations, threads, timeout=3500)
