"""What the benchmarks on GPUs share: ranks that end in time, groups to compare, a report, the README's tables.

A benchmark runs on borrowed machines, so it is bounded: ranks ask `Rank.time_for()` before each measurement, the
process that started them ends those that are late, and what was measured until then is written all the same. One
process a GPU; ranks meet and compare notes over Gloo (the group `control`), which leaves the GPUs alone.

`--device cpu` runs the same code on CPU tensors, ark against Gloo, with sizes for nobody's figures: that is how the
tests see that it works where there is no GPU. NVLink multicast is off for all.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))  # the package of this tree, installed or not

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

import ark_torch  # noqa: E402, F401  (registers the backend)
from ark_torch.tools.bench import report  # noqa: E402

KB, MB = 1 << 10, 1 << 20
GRACE_S = 8.0  # beyond the limit, for what a rank has begun

Row = dict[str, Any]


# --- what a command line has in common ---------------------------------------------------------------------------


def parser(doc: str | None, output: str, seconds: float) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--ranks", type=int, nargs="+", default=[2], help="numbers of GPUs (default: 2)")
    made.add_argument("--seconds", type=float, default=seconds, help="limit of it all (default: %(default)g)")
    made.add_argument("--output", type=Path, default=FOLDER / "results" / output, help="JSON (default: %(default)s)")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to see that the script works")
    made.add_argument("--readme", action="store_true", help="measure nothing: renew the README's table from --output")
    made.add_argument(
        "--ark", type=variant, action="append", default=[], metavar="NAME:VARIABLE=VALUE[,...]",
        help="one more ark group, made with these environment variables, or (in lower case) with this rule of a CUDA "
        "dispatch table, such as engine:copy_engine_from=1048576",
    )  # fmt: skip
    return made


def variant(text: str) -> tuple[str, dict[str, str]]:
    """NAME:ARK_X=1,ARK_Y=2"""
    name, _, rest = text.partition(":")
    pairs = dict(item.partition("=")[::2] for item in rest.split(",") if item)
    if not name or not all(pairs) or not all(pairs.values()):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME:VARIABLE=VALUE[,VARIABLE=VALUE]")
    return name, pairs


def check_machine(arguments: argparse.Namespace) -> None:
    """Ends the program with one sentence where it cannot run."""
    if arguments.device == "cpu":
        return
    if not torch.cuda.is_available():
        sys.exit(f"{Path(sys.argv[0]).name}: this PyTorch sees no GPU")
    most = max(arguments.ranks)
    if most > torch.cuda.device_count():
        sys.exit(f"{Path(sys.argv[0]).name}: --ranks {most}, and this machine has {torch.cuda.device_count()} GPUs")


# --- ranks -------------------------------------------------------------------------------------------------------


@dataclass
class Rank:
    """One process of the benchmark."""

    rank: int
    ranks: int
    device: torch.device
    ends: float  # by time.time()
    rows: Path
    control: Any = None
    skipped: int = 0

    def time_for(self, seconds: float) -> bool:
        """Whether so much time is left; all ranks get rank 0's answer."""
        answer = [time.time() + seconds < self.ends]
        dist.broadcast_object_list(answer, 0, group=self.control)
        self.skipped += not answer[0]
        return bool(answer[0])

    def barrier(self) -> None:
        dist.barrier(group=self.control)

    def share(self, value: Any) -> list[Any]:
        """Every rank's value."""
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value, group=self.control)
        return values

    def slowest(self, rounds: list[float]) -> float:
        """Median over rounds of the slowest rank."""
        return statistics.median(max(times) for times in zip(*self.share(rounds), strict=True))

    def write(self, row: Row) -> None:
        if self.rank == 0:
            with self.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def random(self, *shape: int, source: int | None = None, scale: float = 1.0) -> torch.Tensor:
        """bfloat16 values that any rank can draw again: `source` says whose they are."""
        seed = 1 + (self.rank if source is None else source)
        generator = torch.Generator(device=self.device).manual_seed(seed)
        return (torch.randn(*shape, generator=generator, device=self.device) * scale).to(torch.bfloat16)

    def warn(self, text: str) -> None:
        if self.rank == 0:
            print(f"# {text}", file=sys.stderr, flush=True)


Body = Callable[[Rank, argparse.Namespace], None]


def _run_rank(body: Body, rank: Rank, arguments: argparse.Namespace, port: int) -> None:
    try:
        if rank.device.type == "cuda":
            torch.cuda.set_device(rank.device)
        else:
            torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, rank.ranks, False, timedelta(seconds=60))
        dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.ranks)
        rank.control = dist.group.WORLD
        body(rank, arguments)
        rank.barrier()
        if rank.skipped:
            rank.say(f"# {rank.skipped} measurements left out: {arguments.seconds:g} s are over (--seconds)")
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # groups are not taken apart: NCCL's end can take seconds


def run(body: Body, ranks: int, arguments: argparse.Namespace, ends: float) -> tuple[list[Row], str]:
    """The rows that rank 0 wrote, and what went wrong, if anything did."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="ark-bench-") as folder:
        store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
        rows = Path(folder) / "rows"
        rows.touch()
        processes = []
        for number in range(ranks):
            device = torch.device("cuda", number) if arguments.device == "cuda" else torch.device("cpu")
            rank = Rank(number, ranks, device, ends, rows)
            processes.append(context.Process(target=_run_rank, args=(body, rank, arguments, store.port), daemon=True))
            processes[-1].start()
        problem = ""
        while any(process.is_alive() for process in processes):
            time.sleep(0.05)
            failed = [number for number, process in enumerate(processes) if process.exitcode not in (None, 0)]
            if failed and not problem:
                problem = f"rank {failed[0]} of {ranks} failed with exit code {processes[failed[0]].exitcode}"
                ends = min(ends, time.time() + 3 - GRACE_S)  # the others may say why
            if time.time() > ends + GRACE_S:
                problem = problem or f"{ranks} ranks were not done after {arguments.seconds:g} s and were ended"
                for process in processes:
                    process.kill()
                for process in processes:
                    process.join(10)
                break
        return [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()], problem


def measure(body: Body, arguments: argparse.Namespace) -> tuple[dict[str, Any], list[Row], str]:
    """Runs the body for each number of ranks and writes the JSON; its parts, and what went wrong."""
    check_machine(arguments)
    about = surroundings(arguments.device)
    rows: list[Row] = []
    problem = ""
    ends = time.time() + arguments.seconds
    for ranks in arguments.ranks:
        more, problem = run(body, ranks, arguments, ends)
        rows += more
        if problem:
            about["problem"] = problem
            print(f"# {problem}", file=sys.stderr, flush=True)
            break
    about["seconds"] = round(time.time() - ends + arguments.seconds, 1)
    report.write_json(arguments.output, about, rows)
    return about, rows, problem


def surroundings(device: str) -> dict[str, Any]:
    about = report.surroundings(report.shown_command(f"benchmarks/{Path(sys.argv[0]).name}"))
    about["multicast"] = "off"
    if device == "cuda":
        about["gpus"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
        about["versions"]["cuda"] = torch.version.cuda
        about["versions"]["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        with contextlib.suppress(OSError, IndexError):
            text = Path("/proc/driver/nvidia/version").read_text()
            about["versions"]["driver"] = text.splitlines()[0].split("  ")[1]
    return about


# --- groups ------------------------------------------------------------------------------------------------------

EFFICIENCY, ZERO = 1, 2  # NCCL_CTA_POLICY_*: fewer SMs; none where copy engines can do it


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
    """Ranks of a group meet, and memory is shared, at the first call."""
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
    """NCCL, or Gloo on CPU tensors."""
    if rank.device.type == "cpu":
        return first_call(rank, dist.new_group(backend="gloo"))
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if policy is not None:
        options.config.cta_policy = policy
    return first_call(rank, dist.new_group(backend="nccl", pg_options=options, timeout=timedelta(seconds=60)))


# --- the README --------------------------------------------------------------------------------------------------


def origin(about: dict[str, Any]) -> str:
    versions = about["versions"]
    return (
        f"{about.get('gpus', about['machine']['cpu'])}, PyTorch {versions['torch']}, NCCL {versions.get('nccl', '-')}, "
        f"NVLink multicast off; {about['date']}."
    )


def renew_readme(name: str, output: Path, table: Callable[[dict[str, Any]], str]) -> None:
    """Puts the table between <!-- NAME: begin --> and <!-- NAME: end -->."""
    readme = FOLDER.parent / "README.md"
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    head, found, rest = readme.read_text(encoding="utf-8").partition(begin)
    if not found or end not in rest:
        sys.exit(f"README.md has no part {begin.strip()} ... {end}")
    about = json.loads(output.read_text(encoding="utf-8"))
    readme.write_text(head + begin + table(about) + "\n" + end + rest.partition(end)[2], encoding="utf-8")
