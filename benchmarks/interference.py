"""What collectives cost the computation beside them, and it them: matrix products on one stream, collectives on
another.

    python benchmarks/interference.py --ranks 2 [--operations all_reduce] [--megabytes 64] [--contenders ark nccl]

Products are 4096^3 in bfloat16. Collectives of 25 MB (DDP's default bucket), 64 and 256 MB are called eagerly, one
after the other, on a stream of high priority. Both streams are filled before they start, which is at the end of a first
collective: that brings the ranks together. Slowdowns compare the time of one, while both streams were busy, with its
time alone; `together` is the time until a fixed amount of both is done (the same for all contenders), `sooner` NCCL's
by this contender's. All contenders take turns; a figure is the median over rounds of the slowest rank's. Values are
random; every all_reduce doubles them (on two ranks), and the result of the whole stream is checked, ark's to the bit.

Contenders: ark, and ark_NAME for each --ark NAME:VARIABLE=VALUE; ark_registered where the package registers memory;
nccl (plain tensors, its default policy); nccl_registered, nccl_efficiency and nccl_zero (registered windows, CTA policy
default, efficiency, zero); symm (PyTorch's symmetric memory: two-shot all-reduce, low-contention all-gather).
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import on_gpus
import torch
import torch.distributed as dist
from on_gpus import MB, Rank, Row

OPERATIONS = ("all_reduce", "all_gather")
SMALLEST = 2.0**-100  # what the values start with: an all_reduce makes them grow
GATE_MS = 5.0  # while streams are filled
RIVALS = ("nccl", "gloo")


# --- streams and events; on the CPU everything happens in the order of the calls -----------------------------------


class HostEvent:
    def record(self, stream: Any) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, later: HostEvent) -> float:
        return (later.at - self.at) * 1e3


class HostStream:
    def wait_event(self, event: HostEvent) -> None:
        pass


class Machine:
    def __init__(self, device: torch.device) -> None:
        self.gpu = device.type == "cuda"
        self.products = torch.cuda.Stream() if self.gpu else HostStream()
        self.collectives = torch.cuda.Stream(priority=-1) if self.gpu else HostStream()

    def event(self) -> Any:
        return torch.cuda.Event(enable_timing=True) if self.gpu else HostEvent()

    def on(self, stream: Any) -> Any:
        return torch.cuda.stream(stream) if self.gpu else contextlib.nullcontext()

    def close_gate(self) -> None:
        if self.gpu:
            torch.cuda._sleep(int(GATE_MS * 1.8e6))  # cycles, at some 1.8 GHz

    def synchronize(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()


# --- contenders --------------------------------------------------------------------------------------------------


class Contender:
    """One way to carry an operation of `count` elements (a rank's whole side of it), on tensors of its own."""

    def __init__(self, name: str, rank: Rank, group: Any, operation: str, count: int) -> None:
        self.name, self.rank, self.group, self.operation, self.count = name, rank, group, operation, count
        self.pool: Any = None
        part = count // rank.ranks if operation == "all_gather" else 0
        if name == "symm" and part:  # it makes its result itself
            self.whole, self.part = torch.empty(0, dtype=torch.bfloat16, device=rank.device), self.allocate(part)
        else:
            both = self.allocate(count + part)  # one piece, so that a window holds all of it
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
            return self.low_contention_all_gather
        if self.operation == "all_reduce":
            return lambda: dist.all_reduce(whole, group=group)
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)

    def low_contention_all_gather(self) -> None:
        result = torch.ops.symm_mem._low_contention_all_gather(self.part, self.group.group_name)
        self.whole = torch.ops._c10d_functional.wait_tensor(result)

    def renew(self) -> None:
        if self.operation == "all_reduce":
            self.whole.copy_(self.rank.random(self.count, scale=SMALLEST))
        else:
            self.whole.fill_(float("nan"))
            self.part.copy_(self.rank.random(self.part.numel()))

    def wrong(self, calls: int) -> int:
        """Elements that are not what so many calls make of renewed tensors."""
        if self.operation == "all_gather":
            parts = [self.rank.random(self.part.numel(), source=r) for r in range(self.rank.ranks)]
            return int((self.whole.view(torch.int16) != torch.cat(parts).view(torch.int16)).sum())
        ranks = self.rank.ranks
        total = self.rank.random(self.count, source=0, scale=SMALLEST).float()
        for r in range(1, ranks):
            total += self.rank.random(self.count, source=r, scale=SMALLEST).float()
        grown = float(ranks) ** (calls - 1)
        expected = (total.to(torch.bfloat16).double() * grown).to(torch.bfloat16)
        exact = ranks & (ranks - 1) == 0 and (ranks == 2 or self.name.startswith("ark"))
        if exact:
            return int((self.whole.view(torch.int16) != expected.view(torch.int16)).sum())
        # Other orders of summation: an error of one rounding a call, of the largest partial sum.
        allowed = ranks * SMALLEST * grown * (2**-6 if ranks & (ranks - 1) == 0 else 2**-6 * calls)
        return int(((self.whole.float() - expected.float()).abs() > allowed).sum())

    def close(self) -> None:
        if self.pool is not None:
            self.rank.barrier()
            self.group._get_backend(self.rank.device).deregister_mem_pool(self.pool)
        self.call = lambda: None
        del self.whole, self.part


def make_groups(rank: Rank, arguments: argparse.Namespace) -> dict[str, Any]:
    """A group for each contender that is asked for and can be here; all ranks get the same."""
    rival = "nccl" if rank.device.type == "cuda" else "gloo"
    makers: dict[str, Callable[[], Any]] = {rival: lambda: on_gpus.rival_group(rank)}
    makers["ark"] = lambda: on_gpus.ark_group(rank)
    for name, variables in arguments.ark:
        makers[f"ark_{name}"] = lambda variables=variables: on_gpus.ark_group(rank, variables)
    if rival == "nccl":
        makers["ark_registered"] = lambda: registering_group(groups)
        makers["nccl_registered"] = lambda: groups["nccl"]
        makers["nccl_efficiency"] = lambda: on_gpus.rival_group(rank, on_gpus.EFFICIENCY)
        makers["nccl_zero"] = lambda: on_gpus.rival_group(rank, on_gpus.ZERO)
        makers["symm"] = lambda: groups["nccl"]
    groups: dict[str, Any] = {}
    for name, make in makers.items():
        if arguments.contenders and name not in (*arguments.contenders, rival):
            continue
        try:
            groups[name] = make()
        except (RuntimeError, AttributeError, ImportError) as error:  # this version has it not: on all ranks alike
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


# --- measuring -----------------------------------------------------------------------------------------------------


class Run:
    """Times, in microseconds after the start, at which products and collectives of one run were done."""

    def __init__(self, products: list[float], collectives: list[float]) -> None:
        self.products, self.collectives = products, collectives
        self.total = max(products + collectives)

    def each(self, ends: list[float]) -> float:
        """Of one, in the time in which both streams were busy (or the only one that there was)."""
        until = min(lane[-1] for lane in (self.products, self.collectives) if lane)
        done = bisect.bisect_right(ends, until)
        before = ends[done - 1] if done else 0.0
        part = (until - before) / (ends[done] - before) if done < len(ends) else 0.0
        return until / max(done + part, 1e-9)


class Bench:
    def __init__(self, rank: Rank, size: int) -> None:
        self.rank, self.machine = rank, Machine(rank.device)
        self.left, self.right = rank.random(size, size), rank.random(size, size, source=99)
        self.result = torch.empty_like(self.left)

    def product(self) -> None:
        torch.mm(self.left, self.right, out=self.result)

    def run(self, products: int, contender: Contender | None, collectives: int) -> Run:
        """`collectives` calls after a first one, at the end of which both streams start."""
        machine = self.machine
        start = machine.event()
        product_events = [machine.event() for _ in range(products)]
        collective_events = [machine.event() for _ in range(collectives)]
        lanes: list[tuple[Any, Callable[[], Any], list[Any]]] = [(machine.products, self.product, product_events)]
        if contender is not None:
            contender.renew()
            lanes.append((machine.collectives, contender.call, collective_events))
        order = sorted(
            ((i + 0.5) / len(events), lane, i) for lane, (_, _, events) in enumerate(lanes) for i in range(len(events))
        )
        machine.synchronize()
        self.rank.barrier()
        with machine.on(machine.collectives):
            machine.close_gate()
            if contender is not None:
                contender.call()
            start.record(machine.collectives)
        machine.products.wait_event(start)
        for _, lane, i in order:
            stream, call, events = lanes[lane]
            with machine.on(stream):
                call()
                events[i].record(stream)
        machine.synchronize()
        times = [[start.elapsed_time(event) * 1e3 for event in events] for _, _, events in lanes]
        return Run(times[0], times[1] if contender is not None else [])


def most_calls(ranks: int) -> int:
    """How often values of SMALLEST may be added up before they overflow."""
    return int(200 / math.log2(ranks)) - 1 if ranks > 1 else 100


def amounts(bench: Bench, rival: Contender, window_us: float) -> tuple[int, int]:
    """Products and collectives that alone take the window each, the rival's; equal on all ranks."""
    rank = bench.rank
    alone = bench.run(20, None, 0)
    calibration = bench.run(0, rival, 8)
    one_product = max(rank.share(alone.each(alone.products)))
    one_collective = max(rank.share(calibration.each(calibration.collectives)))
    collectives = max(6, min(round(window_us / one_collective), most_calls(rank.ranks), 200))
    return max(6, min(round(collectives * one_collective / one_product), 500)), collectives


def compare(bench: Bench, contenders: list[Contender], arguments: argparse.Namespace) -> list[Row]:
    """All contenders for one operation and size, in turns."""
    rank = bench.rank
    for contender in contenders:  # whatever a first call does
        bench.run(2, contender, 2)
    rival = next(contender for contender in contenders if contender.name in RIVALS)
    products, collectives = amounts(bench, rival, arguments.window_ms * 1e3)
    keys = ("alone_us", "product_us", "collective_us", "together_ms")
    taken: dict[str, dict[str, list[float]]] = {c.name: {key: [] for key in keys} for c in contenders}
    wrong = {c.name: 0 for c in contenders}
    products_alone: list[float] = []
    for turn in range(arguments.rounds + 1):  # the first one warms up
        alone = bench.run(products, None, 0)
        if turn:
            products_alone.append(alone.each(alone.products))
        for contender in contenders:
            quiet = bench.run(0, contender, collectives)
            both = bench.run(products, contender, collectives)
            wrong[contender.name] = max(wrong[contender.name], contender.wrong(collectives + 1))
            if turn:
                times = quiet.each(quiet.collectives), both.each(both.products), both.each(both.collectives)
                for key, value in zip(keys, (*times, both.total / 1e3), strict=True):
                    taken[contender.name][key].append(value)
    product_alone = rank.slowest(products_alone)
    rows = []
    for contender in contenders:
        row = {"operation": contender.operation, "ranks": rank.ranks, "bytes": contender.count * 2}
        row |= {"contender": contender.name, "products": products, "collectives": collectives}
        row |= {"product_alone_us": product_alone}
        row |= {key: rank.slowest(rounds) for key, rounds in taken[contender.name].items()}
        row |= {"wrong": max(rank.share(wrong[contender.name])), "rounds_of_rank_0": taken[contender.name]}
        rows.append(row)
    of_rival = next(row for row in rows if row["contender"] in RIVALS)
    for row in rows:
        row["product_slowdown"] = row["product_us"] / row["product_alone_us"]
        row["collective_slowdown"] = row["collective_us"] / row["alone_us"]
        row["sooner"] = of_rival["together_ms"] / row["together_ms"]
    return rows


def measure(rank: Rank, arguments: argparse.Namespace) -> None:
    groups = make_groups(rank, arguments)
    bench = Bench(rank, arguments.product)
    bench.run(10, None, 0)
    estimate = 1.0
    rank.say(HEADING)
    for operation in arguments.operations:
        for megabytes in arguments.megabytes:
            if not rank.time_for(estimate):
                continue
            began = time.monotonic()
            each = 8 * rank.ranks
            count = max(int(megabytes * MB) // 2 // each, 1) * each
            contenders = make_contenders(rank, groups, operation, count)
            for row in compare(bench, contenders, arguments):
                rank.write(row)
                rank.say(line(row))
            for contender in contenders:
                contender.close()
            del contenders
            if rank.device.type == "cuda":
                torch.cuda.empty_cache()
            estimate = max(rank.share(time.monotonic() - began)) * 1.5  # the next size may be larger


# --- showing -------------------------------------------------------------------------------------------------------

HEADING = (
    f"{'operation':11} {'ranks':>5} {'MB':>5} {'contender':16} {'alone us':>9} {'GB/s':>5} {'product us':>10} "
    f"{'product':>8} {'collective':>10} {'together ms':>11} {'sooner':>6} {'wrong':>5}"
)


def bus(row: Row) -> float:
    """nccl-tests' bus bandwidth, alone."""
    share = (row["ranks"] - 1) / row["ranks"] * (2 if row["operation"] == "all_reduce" else 1)
    return float(row["bytes"] / row["alone_us"] * 1e-3 * share)


def line(row: Row) -> str:
    return (
        f"{row['operation']:11} {row['ranks']:>5} {row['bytes'] / MB:>5.0f} {row['contender']:16} "
        f"{row['alone_us']:>9.1f} {bus(row):>5.0f} {row['product_alone_us']:>10.1f} x{row['product_slowdown']:>7.3f} "
        f"x{row['collective_slowdown']:>9.2f} {row['together_ms']:>11.2f} {row['sooner']:>6.2f} {row['wrong']:>5}"
    )


def table(about: dict[str, Any]) -> str:
    """The README's."""
    lines = [
        on_gpus.origin(about),
        "",
        "| | ranks | MB | | alone, us | products slow down by | collective by | both done sooner than with NCCL |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in about["rows"]:
        lines.append(
            f"| {row['operation']} | {row['ranks']} | {row['bytes'] / MB:.0f} | {row['contender']} "
            f"| {row['alone_us']:.0f} | {row['product_slowdown'] - 1:.1%} | {row['collective_slowdown'] - 1:.0%} "
            f"| {row['sooner']:.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = on_gpus.parser(__doc__, "interference.json", 75)
    parser.add_argument("--operations", nargs="+", default=OPERATIONS, choices=OPERATIONS)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[25, 64, 256])
    parser.add_argument("--contenders", nargs="+", default=[], help="default: all; NCCL is always one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window-ms", type=float, default=15.0, help="how long one run is (default: 15)")
    parser.add_argument("--product", type=int, default=4096, help="rows and columns of the matrices (default: 4096)")
    arguments = parser.parse_args()
    if arguments.readme:
        on_gpus.renew_readme("interference", arguments.output, table)
        return 0
    _, rows, problem = on_gpus.measure(measure, arguments)
    wrong = sorted({row["contender"] for row in rows if row["wrong"]})
    if wrong:
        print(f"# WRONG RESULTS: {', '.join(wrong)}", file=sys.stderr)
    return 1 if problem or wrong or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
