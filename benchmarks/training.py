"""What communication costs a training step: GPT-2 XL and BERT-Large shapes over ark and over NCCL, and without any.

    python benchmarks/training.py --models gpt2-xl --modes graph ddp fsdp2 --ranks 2

Sequence 384, batch 4 (GPT-2 XL) or 10 (BERT-Large) a GPU, bfloat16 autocast, float32 gradients, fused AdamW, blocks
compiled by Inductor (plain modules; Hugging Face's as they are). Modes:
  graph   the whole step in one CUDA graph; gradients in flat buckets of 50 MB, each all-reduced on a stream of high
          priority when its last gradient is there
  eager   the same without the graph
  ddp     DistributedDataParallel, its defaults
  fsdp2   fully_shard of every block, bfloat16 parameters, float32 reduction
A contender `free` does the step without communication (ddp: a hook that leaves buckets alone; fsdp2: PyTorch's fake
backend), so that what communication costs is the difference. All contenders take turns, in --rounds rounds; a figure is
the median over rounds of the slowest rank's. The learning rate is 0: weights stay as they were drawn, gradients of all
contenders and ranks are compared. In `graph` and `eager` mode each bucket's all-reduce is timed too, during training
and alone.

--plot draws both pictures of the paper from --output: all-reduce bandwidth during training beside alone, and the step's
time by contender (--ark NAME:VARIABLE=VALUE adds some: the SM engine, the copy engine).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import on_gpus
import torch
import torch.distributed as dist
from models import IMPLEMENTATIONS, SHAPES, Shape, build
from on_gpus import MB, Rank, Row
from torch import nn

MODES = ("graph", "eager", "ddp", "fsdp2")
FREE = "free"
Groups = dict[str, Any]  # contender -> group; None: no communication at all


@dataclass
class Subject:
    """What is trained: made anew for each mode, since DDP and FSDP2 change a model."""

    rank: Rank
    name: str
    implementation: str
    compiled: bool
    shape: Shape = field(init=False)

    def __post_init__(self) -> None:
        self.shape = SHAPES[self.name]
        generator = torch.Generator(device=self.rank.device).manual_seed(7 + self.rank.rank)
        size = (self.shape.batch, self.shape.sequence)
        device = self.rank.device
        self.tokens = torch.randint(0, self.shape.vocabulary, size, device=device, generator=generator)

    @property
    def gpu(self) -> bool:
        return self.rank.device.type == "cuda"

    def model(self) -> nn.Module:
        return build(self.implementation, self.shape, self.rank.device, self.compiled)

    def optimizer(self, model: nn.Module, capturable: bool = False) -> torch.optim.Optimizer:
        # In a graph the rate must be a tensor or constant; 0 leaves the weights alone.
        options = {"fused": True, "capturable": capturable} if self.gpu else {}
        return torch.optim.AdamW(model.parameters(), lr=0.0, **options)

    def autocast(self) -> Any:
        return torch.autocast(self.rank.device.type, torch.bfloat16, cache_enabled=False)

    def synchronize(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def free_memory(self) -> None:
        gc.collect()
        if self.gpu:
            torch.cuda.empty_cache()


def timed(subject: Subject, step: Callable[[], Any], steps: int) -> float:
    """Milliseconds of a step on this rank; all ranks begin together."""
    subject.synchronize()
    subject.rank.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    subject.synchronize()
    return (time.perf_counter() - began) / steps * 1e3


# --- own buckets, eager and in a graph -----------------------------------------------------------------------------


class Bucketed:
    """A model whose gradients lie in flat buckets, and its step."""

    def __init__(self, subject: Subject, bucket_mb: float) -> None:
        self.subject = subject
        self.model = subject.model()
        self.optimizer = subject.optimizer(self.model, capturable=subject.gpu)
        self.communication = torch.cuda.Stream(priority=-1) if subject.gpu else None
        self.pool = torch.cuda.graph_pool_handle() if subject.gpu else None  # one for all graphs: they take turns
        self.group: Any = None
        self.timers: list[tuple[Any, Any]] | None = None  # where each bucket's all-reduce began and ended
        self.where: dict[nn.Parameter, int] = {}
        self.flat: list[torch.Tensor] = []
        self.members: list[list[nn.Parameter]] = [[]]
        size = 0
        for parameter in reversed([p for p in self.model.parameters() if p.requires_grad]):
            if size > bucket_mb * MB:
                self.members.append([])
                size = 0
            self.members[-1].append(parameter)
            size += parameter.numel() * 4
        self.left = [0] * len(self.members)
        for number, members in enumerate(self.members):
            flat = torch.zeros(sum(p.numel() for p in members), device=subject.rank.device)
            self.flat.append(flat)
            at = 0
            for parameter in members:
                parameter.grad = flat[at : at + parameter.numel()].view_as(parameter)
                at += parameter.numel()
                self.where[parameter] = number
                parameter.register_post_accumulate_grad_hook(self.ready)

    def ready(self, parameter: nn.Parameter) -> None:
        number = self.where[parameter]
        self.left[number] -= 1
        if self.left[number] == 0 and self.group is not None:
            self.all_reduce(number)

    def all_reduce(self, number: int) -> None:
        if self.communication is None:
            dist.all_reduce(self.flat[number], group=self.group)
            return
        self.communication.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.communication):
            if self.timers is not None:
                self.timers[number][0].record()
            dist.all_reduce(self.flat[number], group=self.group)
            if self.timers is not None:
                self.timers[number][1].record()

    def join(self) -> None:
        if self.communication is not None and self.group is not None:
            torch.cuda.current_stream().wait_stream(self.communication)

    def step(self) -> None:
        self.left = [len(members) for members in self.members]
        for flat in self.flat:
            flat.zero_()
        with self.subject.autocast():
            loss = self.model(self.subject.tokens)
        (loss / self.subject.rank.ranks).backward()
        self.join()
        self.optimizer.step()

    def only_communication(self) -> None:
        for flat in self.flat:
            flat.mul_(1.0)  # written shortly before, as in training
        for number in range(len(self.flat)):
            self.all_reduce(number)
        self.join()

    def captured(self, what: Callable[[], None]) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                what()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=side, capture_error_mode="thread_local"):
            what()
        return graph

    @contextlib.contextmanager
    def with_timers(self, in_graph: bool) -> Iterator[list[tuple[Any, Any]]]:
        self.timers = [
            tuple(torch.cuda.Event(enable_timing=True, external=in_graph) for _ in range(2))  # type: ignore[misc]
            for _ in self.flat
        ]
        yield self.timers
        self.timers = None

    def gradients(self) -> torch.Tensor:
        return torch.cat([flat.double().sum().reshape(1) for flat in self.flat]).cpu()


def bandwidth(bucketed: Bucketed, what: Callable[[], None], in_graph: bool, steps: int) -> float:
    """GB/s on the bus (nccl-tests' factor) of all buckets' all-reduces: median over steps."""
    subject = bucketed.subject
    rates = []
    with bucketed.with_timers(in_graph) as timers:
        run = bucketed.captured(what).replay if in_graph else what
        for turn in range(steps + 2):
            subject.synchronize()
            subject.rank.barrier()
            run()
            subject.synchronize()
            # A bucket takes as long as on the rank that came to it last: on others it waited for that one.
            times = subject.rank.share([begin.elapsed_time(end) for begin, end in timers])
            spent = sum(min(of_bucket) for of_bucket in zip(*times, strict=True))
            if turn >= 2:
                ranks = subject.rank.ranks
                bytes_ = sum(flat.numel() * 4 for flat in bucketed.flat)
                rates.append(bytes_ * 2 * (ranks - 1) / ranks / spent / 1e6)
    return statistics.median(rates)


def run_bucketed(subject: Subject, groups: Groups, mode: str, arguments: argparse.Namespace) -> list[Row]:
    rank = subject.rank
    in_graph = mode == "graph" and subject.gpu
    bucketed = Bucketed(subject, arguments.bucket_mb)
    runs: dict[str, Callable[[], Any]] = {}
    sums: dict[str, torch.Tensor] = {}
    for name, group in groups.items():
        bucketed.group = group
        for _ in range(3):  # compiles, meets the peers, shares memory
            bucketed.step()
        sums[name] = bucketed.gradients()
        if in_graph:
            runs[name] = bucketed.captured(bucketed.step).replay
        else:

            def step(group: Any = group) -> None:
                bucketed.group = group
                bucketed.step()

            runs[name] = step
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(arguments.rounds + 1):
        for name, run in runs.items():
            milliseconds = timed(subject, run, arguments.steps)
            if turn:
                taken[name].append(milliseconds)
    rows = []
    for name, rounds in taken.items():
        row: Row = {"contender": name, "step_ms": rank.slowest(rounds)}
        row["gradient_bytes"] = sum(flat.numel() * 4 for flat in bucketed.flat)
        row["buckets"] = len(bucketed.flat)
        rows.append(row | same_gradients(rank, name, sums))
    # The graphs live on: their common pool goes with the last of them.
    for row in rows if subject.gpu and arguments.bandwidth else ():
        name = str(row["contender"])
        if groups[name] is None or not rank.time_for(6):
            continue
        bucketed.group = groups[name]
        row["during_gbps"] = bandwidth(bucketed, bucketed.step, in_graph, arguments.steps)
        row["alone_gbps"] = bandwidth(bucketed, bucketed.only_communication, in_graph, arguments.steps)
    return rows


def same_gradients(rank: Rank, name: str, sums: dict[str, torch.Tensor]) -> Row:
    """Whether all ranks have the same sums of gradients, and how far they are from the rival's."""
    if name == FREE:
        return {}
    own = sums[name]
    alike = all(torch.equal(own, other) for other in rank.share(own))
    rival = next(sums[other] for other in ("nccl", "gloo") if other in sums)
    difference = float((own - rival).abs().max() / (rival.abs().max() + 1e-30))
    return {"ranks_alike": alike, "difference": difference}


# --- DDP and FSDP2 -------------------------------------------------------------------------------------------------


def leave_alone(device, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with types, not text
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[device] if device.type == "cuda" else [])
    done.set_result(bucket.buffer())
    return done


def ddp_step(
    subject: Subject, model: nn.Module, optimizer: torch.optim.Optimizer, group: Any, free: bool
) -> Callable[[], Any]:
    from torch.nn.parallel import DistributedDataParallel

    ids = [subject.rank.rank] if subject.gpu else None
    wrapped = DistributedDataParallel(model, device_ids=ids, process_group=group, gradient_as_bucket_view=True)
    if free:
        wrapped.register_comm_hook(subject.rank.device, leave_alone)

    def step() -> None:
        optimizer.zero_grad()
        with subject.autocast():
            loss = wrapped(subject.tokens)
        loss.backward()
        optimizer.step()

    return step


def fsdp2_step(subject: Subject, model: nn.Module, group: Any) -> Callable[[], Any]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = DeviceMesh.from_group(group, subject.rank.device.type)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = subject.optimizer(model)

    def step() -> None:
        optimizer.zero_grad()
        model(subject.tokens).backward()
        optimizer.step()

    return step


def gradient_sum(model: nn.Module) -> torch.Tensor:
    """Of each tenth parameter, the whole tensor's."""
    sums = []
    for parameter in list(model.parameters())[::10]:
        gradient = parameter.grad
        assert gradient is not None
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        sums.append(whole.double().sum())
    return torch.stack(sums).cpu()


def run_wrapped(subject: Subject, groups: Groups, mode: str, arguments: argparse.Namespace) -> list[Row]:
    """Contenders one after the other, and that again in each round: a wrapped model holds much memory."""
    rank = subject.rank
    taken: dict[str, list[float]] = {name: [] for name in groups}
    sums: dict[str, torch.Tensor] = {}
    model: nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    gradient_bytes = 0
    for turn in range(arguments.rounds):
        for name, group in groups.items():
            if turn and not rank.time_for(3):
                continue
            if mode == "ddp":
                model = model or subject.model()
                optimizer = optimizer or subject.optimizer(model)
                step = ddp_step(subject, model, optimizer, group, name == FREE)
            else:
                model = subject.model()
                step = fsdp2_step(subject, model, group)
            for _ in range(3):
                step()
            taken[name].append(timed(subject, step, arguments.steps))
            if turn == 0 and name != FREE:
                sums[name] = gradient_sum(model)
            gradient_bytes = sum(p.numel() * 4 for p in model.parameters())
            del step
            if mode == "fsdp2":
                model = None
            else:
                model.zero_grad()  # gradients were views of buckets
            subject.free_memory()
    rows = []
    for name, rounds in taken.items():
        row: Row = {"contender": name, "step_ms": rank.slowest(rounds), "gradient_bytes": gradient_bytes}
        rows.append(row | same_gradients(rank, name, sums))
    return rows


# --- all of it -----------------------------------------------------------------------------------------------------


def make_groups(rank: Rank, arguments: argparse.Namespace) -> Groups:
    rival = "nccl" if rank.device.type == "cuda" else "gloo"
    groups: Groups = {rival: on_gpus.rival_group(rank), "ark": on_gpus.ark_group(rank)}
    for name, variables in arguments.ark:
        groups[f"ark_{name}"] = on_gpus.ark_group(rank, variables)
    return groups


def fake_group() -> Any:
    """A group whose collectives do nothing."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers it)

    return dist.new_group(backend="fake")


def measure(rank: Rank, arguments: argparse.Namespace) -> None:
    groups = make_groups(rank, arguments)
    free = {"ddp": next(iter(groups.values())), "fsdp2": fake_group() if "fsdp2" in arguments.modes else None}
    rank.say(HEADING)
    for name in arguments.models:
        for implementation in arguments.implementations:
            compiled = rank.device.type == "cuda" and implementation == "plain" and arguments.compile
            for mode in arguments.modes:
                if not rank.time_for(20 if rank.device.type == "cuda" else 1):
                    continue
                subject = Subject(rank, name, implementation, compiled)
                run = run_wrapped if mode in ("ddp", "fsdp2") else run_bucketed
                began = time.monotonic()
                try:
                    rows = run(subject, groups | {FREE: free.get(mode)}, mode, arguments)
                except (ImportError, RuntimeError) as error:
                    if implementation == "plain":
                        raise
                    # Their library is not installed, or cannot be captured: on all ranks alike.
                    rank.warn(f"left out: {name} {implementation} {mode}: {str(error).splitlines()[0]}")
                    continue
                tell(rank, rows, {"model": name, "implementation": implementation, "mode": mode}, began)
                subject.free_memory()


def tell(rank: Rank, rows: list[Row], about: Row, began: float) -> None:
    step = {row["contender"]: row["step_ms"] for row in rows}
    rival = step.get("nccl", step.get("gloo", 0.0))
    for row in rows:
        row.update(about, ranks=rank.ranks, cost_ms=row["step_ms"] - step[FREE])
        row["cost"] = row["cost_ms"] / step[FREE]
        row["faster"] = rival / row["step_ms"]
        rank.write(row)
        rank.say(line(row))
    rank.say(f"# {about['model']} {about['mode']}: {time.monotonic() - began:.0f} s")


HEADING = (
    f"{'model':11} {'modules':11} {'mode':6} {'ranks':>5} {'contender':14} {'step ms':>8} {'cost ms':>8} {'cost':>6} "
    f"{'faster':>7} {'during':>7} {'alone GB/s':>10} {'alike':>5} {'difference':>10}"
)


def line(row: Row) -> str:
    rates = [f"{row[key]:.0f}" if key in row else "-" for key in ("during_gbps", "alone_gbps")]
    checks = [str(row.get("ranks_alike", "-")), f"{row['difference']:.0e}" if "difference" in row else "-"]
    return (
        f"{row['model']:11} {row['implementation']:11} {row['mode']:6} {row['ranks']:>5} {row['contender']:14} "
        f"{row['step_ms']:>8.2f} {row['cost_ms']:>8.2f} {row['cost']:>6.1%} {row['faster']:>7.3f} {rates[0]:>7} "
        f"{rates[1]:>10} {checks[0]:>5} {checks[1]:>10}"
    )


def table(about: dict[str, Any]) -> str:
    """The README's."""
    lines = [
        on_gpus.origin(about),
        "",
        "| model | modules | mode | ranks | | step, ms | communication costs | times as fast as NCCL |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in about["rows"]:
        lines.append(
            f"| {row['model']} | {row['implementation']} | {row['mode']} | {row['ranks']} | {row['contender']} "
            f"| {row['step_ms']:.1f} | {row['cost']:.1%} | {row['faster']:.2f} |"
        )
    return "\n".join(lines)


def draw(about: dict[str, Any], path: Path) -> str:
    """The paper's two pictures; why not, where that is so."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        return f"no picture: {error} (pip install matplotlib)"
    cases: dict[str, list[Row]] = {}
    for row in about["rows"]:
        key = f"{row['model']}\n{row['mode']}, {row['ranks']} GPUs"
        cases.setdefault(key if row["implementation"] == "plain" else f"{key}, HF", []).append(row)
    if not cases:
        return "no picture: nothing was measured"
    contenders = list(dict.fromkeys(row["contender"] for row in about["rows"]))
    figure = Figure(figsize=(max(8.0, 2.4 * len(cases) + 3), 7.5), layout="constrained")
    steps, rates = figure.subplots(2, 1)
    width = 0.8 / len(contenders)
    for index, contender in enumerate(contenders):
        places, times, during, alone = [], [], [], []
        for number, rows in enumerate(cases.values()):
            for row in rows:
                if row["contender"] == contender:
                    places.append(number + (index - (len(contenders) - 1) / 2) * width)
                    times.append(row["step_ms"])
                    during.append(row.get("during_gbps", 0.0))
                    alone.append(row.get("alone_gbps", 0.0))
        color = f"C{index}"
        steps.bar(places, times, width * 0.92, color=color, label=contender)
        if any(alone):
            rates.bar(places, alone, width * 0.92, color=color, alpha=0.3)
            rates.bar(places, during, width * 0.6, color=color, label=contender)
    steps.set(title="A training step, ms (free: without communication)", ylabel="ms")
    rates.set(title="All-reduce during training (full) and alone (pale)", ylabel="GB/s on the bus")
    for axes in (steps, rates):
        axes.set_xticks(range(len(cases)), list(cases), fontsize="small")
        axes.grid(axis="y", alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    figure.suptitle(on_gpus.origin(about), fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    return ""


def main() -> int:
    parser = on_gpus.parser(__doc__, "training.json", 90)
    parser.add_argument("--models", nargs="+", default=["bert-large"], choices=list(SHAPES))
    parser.add_argument("--implementations", nargs="+", default=["plain"], choices=list(IMPLEMENTATIONS))
    parser.add_argument("--modes", nargs="+", default=["graph"], choices=MODES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="a round (default: 6)")
    parser.add_argument("--bucket-mb", type=float, default=50, help="of graph and eager mode (default: 50)")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="plain modules without Inductor")
    parser.add_argument("--no-bandwidth", dest="bandwidth", action="store_false", help="time no single all-reduce")
    parser.add_argument("--plot", action="store_true", help="measure nothing: draw the pictures of --output")
    arguments = parser.parse_args()
    picture = arguments.output.with_suffix(".png")
    if arguments.readme or arguments.plot:
        import json

        if arguments.readme:
            on_gpus.renew_readme("training", arguments.output, table)
        why = draw(json.loads(arguments.output.read_text(encoding="utf-8")), picture)
        return why_not(why)
    about, rows, problem = on_gpus.measure(measure, arguments)
    why_not(draw(about | {"rows": rows}, picture))
    unlike = sorted({row["contender"] for row in rows if not row.get("ranks_alike", True)})
    if unlike:
        print(f"# RANKS DIFFER: {', '.join(unlike)}", file=sys.stderr)
    return 1 if problem or unlike or not rows else 0


def why_not(why: str) -> int:
    if why:
        print(f"# {why}", file=sys.stderr)
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main())
