"""Compares the cache policies of loop kernels: torch.compile(backend="ark", options={"cache": ...}).

    python benchmarks/cache_policy.py                          one GPU: all applications (cache_policy_apps.py)
    python benchmarks/cache_policy.py --only bert-large dlrm   only these; the JSON keeps its other rows
    python benchmarks/cache_policy.py --again                  also those that the JSON has from this kind of machine
    python benchmarks/cache_policy.py --variants               also what other constants of the cost model would choose
    python benchmarks/cache_policy.py --ncu "llama-1b decode"  L2 hit rates of one application, by Nsight Compute
    python benchmarks/cache_policy.py --device cpu             small models on the CPU
    python benchmarks/cache_policy.py --plot                   measures nothing: table and picture from the JSON

On a GPU, one process per application and policy first compiles the kernels into the cache folder, several at once, so
that nothing compiles during timing. Then each application is captured and lowered once, and runs under all policies in
one process with the same weights and inputs. The policies take turns of a few replays of a CUDA graph, so that drift of
the machine affects all equally. Their results must be bit-identical. `ratio` is the time with cache="none" over the
time with the policy.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cache_policy_apps
import gpu_models
import ncu
import torch

from ark_torch.compile import backend, build, costs, options
from ark_torch.compile.report import Report
from ark_torch.tools.bench import report as bench

FOLDER = Path(__file__).resolve().parent
POLICIES = ("auto", "none", "all-first", "all-last")
# Variants of CacheCosts (csrc/compiler/schedule/plan.hpp), each with one constant changed.
VARIANTS: dict[str, dict[str, Any]] = {
    "auto, 10 MB kept": {"kept_bytes": 10 << 20},
    "auto, 25 MB kept": {"kept_bytes": 25 << 20},
    "auto, plain where near": {"plain_where_near": True},
    "auto, states first": {"states_first": True},
    "auto, reused last": {"reused_last": True},
}
COMPILE_SECONDS = 240  # per process, at most
METRICS = ("lts__t_sector_hit_rate.pct", "dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum")
Row = dict[str, Any]


def arguments_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=cache_policy_apps.APPLICATIONS, default=[])
    parser.add_argument("--variants", action="store_true", help="also each constant of the cost model by itself")
    parser.add_argument("--turns", type=int, default=30, help="of each policy, ten replays each")
    parser.add_argument("--seconds", type=float, default=330, help="of measuring: after so many nothing is begun")
    parser.add_argument("--again", action="store_true", help="measure what the JSON has, too")
    parser.add_argument("--processes", type=int, default=min(14, os.cpu_count() or 1), help="that compile ahead")
    parser.add_argument("--output", type=Path, default=FOLDER / "results" / "cache_policy.json")
    parser.add_argument("--plot", action="store_true", help="measure nothing: table and picture from the JSON")
    parser.add_argument("--ncu", metavar="APPLICATION", choices=cache_policy_apps.APPLICATIONS, default="")
    parser.add_argument("--compile", default="", help=argparse.SUPPRESS)
    parser.add_argument("--under", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def ways(arguments: argparse.Namespace) -> tuple[str, ...]:
    return (*POLICIES, *VARIANTS) if arguments.variants and arguments.device == "cuda" else POLICIES


class Alternatives:
    """Regions compiled from the same part of a graph, one per policy. `under` selects the one that runs."""

    under = POLICIES[0]

    def __init__(self, regions: dict[str, Any]) -> None:
        self.regions = regions

    def __call__(self, inputs: list[Any]) -> Any:
        return self.regions[Alternatives.under](inputs)


class Calls:
    """An application under every policy: one graph, with one region per policy."""

    def __init__(self, name: str, arguments: argparse.Namespace, under: tuple[str, ...]) -> None:
        self.device = torch.device(arguments.device)
        self.under, self.alternatives = under, list[Alternatives]()
        Alternatives.under = under[0]
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model, self.inputs = cache_policy_apps.APPLICATIONS[name](self.device, arguments.device == "cpu")
        chosen, self.report = options.parse(None, {"choose": "ark"}), Report()
        self.call = torch.compile(
            self.model, backend=lambda g, x: backend.compile_graph(g, x, chosen, self.report), dynamic=False
        )
        usual = build.make_region, costs.of_caches
        build.make_region, costs.of_caches = self._make, self._costs  # type: ignore[assignment]
        try:
            self.call(*self.inputs)
            gpu_models.finish(self.device)
        finally:
            build.make_region, costs.of_caches = usual
        self.steps = {way: self._step(way) for way in under}

    _usual, _measured, _way = staticmethod(build.make_region), staticmethod(costs.of_caches), POLICIES[0]

    def _costs(self, record: Any) -> dict[str, Any]:
        return VARIANTS[self._way] if self._way in VARIANTS else self._measured(record)

    def _make(self, lowering: Any, name: str, threads: int, otherwise: Any, multi_step: bool, _: str) -> Alternatives:
        regions = {}
        for way in self.under:
            self._way = way
            cache = way if way in POLICIES else "auto"
            regions[way] = self._usual(lowering, name, threads, otherwise, multi_step, cache)
        self.alternatives.append(Alternatives(regions))
        return self.alternatives[-1]

    def _step(self, way: str) -> gpu_models.Step:
        def step() -> Any:
            Alternatives.under = way
            return self.call(*self.inputs)

        return step

    def policies(self, way: str) -> dict[str, int]:
        """Returns how many accesses use each policy."""
        plans = [json.loads(one.regions[way].json()) for one in self.alternatives]
        stages = [stage for plan in plans for stage in plan["stages"]]
        return dict(Counter(access["cache"] for stage in stages for access in stage["accesses"]))


def flat(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else [one for part in result for one in flat(part)]


def same_bits(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)) for x, y in pairs)


@torch.no_grad()
def measured(name: str, arguments: argparse.Namespace) -> Row:
    calls = Calls(name, arguments, ways(arguments))
    results = {way: [x.clone() for x in flat(step())] for way, step in calls.steps.items()}
    steps = dict(calls.steps)
    if calls.device.type == "cuda":
        steps = {way: gpu_models.captured(step) for way, step in steps.items()}
    row: Row = {"application": name, "device": calls.device.type}
    row["microseconds"] = times = gpu_models.in_turns(steps, arguments.turns, calls.device)
    row["ratio"] = {way: times["none"]["median"] / of["median"] for way, of in times.items()}
    row["same_bits"] = all(same_bits(results["none"], one) for one in results.values())
    row["regions"] = len(calls.alternatives)
    row["fallbacks"] = [str(one) for one in calls.report.fallbacks]
    row["policies"] = {way: calls.policies(way) for way in calls.under}
    return row


def compile_all(names: list[str], arguments: argparse.Namespace) -> None:
    """Compiles the kernels into the cache folder, with a process for each application and policy, several at once."""

    def one(name: str, way: str) -> None:
        command = [sys.executable, str(FOLDER / "cache_policy.py"), "--device", arguments.device]
        command += ["--compile", name, "--under", way]
        try:
            subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=True)
        except subprocess.CalledProcessError as error:
            print(f"# {name}, {way}: not compiled ahead: {error.stderr.strip().splitlines()[-1:]}", flush=True)
        except subprocess.TimeoutExpired:
            print(f"# {name}, {way}: not compiled ahead within {COMPILE_SECONDS} s", flush=True)

    with ThreadPoolExecutor(arguments.processes) as pool:
        list(pool.map(one, *zip(*itertools.product(names, ways(arguments)), strict=True)))


def kept_rows(arguments: argparse.Namespace, about: Row) -> list[Row]:
    """Returns the JSON's rows of the same policies, device and versions. Other rows must not be mixed with new ones."""
    if arguments.again or not arguments.output.exists():
        return []
    before = json.loads(arguments.output.read_text(encoding="utf-8"))
    for key in ("gpus", "versions"):
        if before.get(key) != about.get(key):
            print(f"# {arguments.output} is measured anew: it has {key} {before.get(key)}, here {about.get(key)}")
            return []
    wanted = set(ways(arguments))
    return [row for row in before["rows"] if set(row["ratio"]) >= wanted and row["device"] == arguments.device]


def summary(rows: list[Row]) -> Row:
    """Returns the geometric mean of each policy's ratios, and how far auto is from each application's best static
    policy.
    """
    if not rows:
        return {}
    names = rows[0]["ratio"]
    means = {way: math.exp(sum(math.log(row["ratio"][way]) for row in rows) / len(rows)) for way in names}
    static = POLICIES[1:]
    behind = {row["application"]: max(row["ratio"][way] for way in static) / row["ratio"]["auto"] - 1 for row in rows}
    return {"geometric_mean": means, "behind_best_static": behind}


def table(about: Row) -> str:
    rows = about["rows"]
    if not rows:
        return "nothing was measured"
    names = list(rows[0]["ratio"])
    lines = [
        f"{about.get('gpus', about['machine']['cpu'])}, PyTorch {about['versions']['torch']}; {about['date']}.",
        "",
        f"| application | none, us | {' | '.join(f'{way}, times as fast' for way in names if way != 'none')} | bits |",
        f"| --- | --- | {' | '.join('---' for _ in names[1:])} | --- |",
    ]
    for row in rows:
        ratios = " | ".join(f"{row['ratio'][way]:.3f}" for way in names if way != "none")
        bits = "same" if row["same_bits"] else "DIFFER"
        lines.append(f"| {row['application']} | {row['microseconds']['none']['median']:.1f} | {ratios} | {bits} |")
    means = summary(rows)["geometric_mean"]
    lines.append(f"| geometric mean | | {' | '.join(f'{means[way]:.3f}' for way in names if way != 'none')} | |")
    for row in rows:
        if "ncu" in row:
            lines += ["", *by_ncu(row)]
    return "\n".join(lines)


def by_ncu(row: Row) -> list[str]:
    """A table of what Nsight Compute counted in a launch of the loop kernel under each policy."""
    units = ("%", 1.0), ("byte", 1e9), ("byte", 1e6), ("ns", 1e3)
    lines = [
        f"| {row['application']}, by Nsight Compute | sectors that hit in the second level, % | read from memory, GB "
        "| written to memory, MB | us |",
        "| --- | --- | --- | --- | --- |",
    ]
    for way, found in row["ncu"].items():
        cells = [f"{found[f'{name} ({unit})'] / by:.4g}" for name, (unit, by) in zip(METRICS, units, strict=True)]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return lines


def draw(about: Row, path: Path) -> str:
    """Draws the ratios of each application side by side. Returns the reason if there is no picture."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        return f"no picture: {error} (pip install matplotlib)"
    rows = about["rows"]
    if not rows:
        return "no picture: nothing was measured"
    names = [way for way in rows[0]["ratio"] if way in POLICIES and way != "none"]
    figure = Figure(figsize=(max(6.0, 0.9 * len(rows)), 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(names)
    for number, way in enumerate(names):
        places = [i + (number - (len(names) - 1) / 2) * width for i in range(len(rows))]
        axes.bar(places, [row["ratio"][way] for row in rows], width, label=way)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(rows)), [row["application"] for row in rows], rotation=30, ha="right", fontsize="small")
    axes.set(ylabel='times as fast as cache="none"')
    lowest = min(row["ratio"][way] for row, way in itertools.product(rows, names))
    axes.set_ylim(bottom=min(0.9, lowest - 0.02))
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=100)
    return ""


def under_ncu(arguments: argparse.Namespace) -> int:
    """Measures one application's hit rates with ncu, one process per policy, and adds them to the JSON's row."""
    found = {}
    for way in POLICIES:
        command = [sys.executable, str(FOLDER / "cache_policy.py"), "--compile", arguments.ncu, "--under", way]
        metrics = ncu.metrics_of(command, METRICS, "loop_kernel", 3, 2)
        if isinstance(metrics, str):
            print(f"# ncu, {way}: no figures: {metrics}")
            continue
        found[way] = metrics
        print(f"ncu, {arguments.ncu}, {way}: {found[way]}", flush=True)
    if arguments.output.exists() and found:
        about = json.loads(arguments.output.read_text(encoding="utf-8"))
        rows = about.pop("rows")
        for row in rows:
            if row["application"] == arguments.ncu:
                row["ncu"] = found
        bench.write_json(arguments.output, about, rows)
    return 0


@torch.no_grad()
def run_under(arguments: argparse.Namespace) -> None:
    """The work of the compiling processes and of the one under ncu: six calls."""
    calls = Calls(arguments.compile, arguments, (arguments.under,))
    for _ in range(5):
        calls.steps[arguments.under]()
    gpu_models.finish(calls.device)


def main() -> int:
    arguments = arguments_of()
    if arguments.under:
        run_under(arguments)
        return 0
    picture = arguments.output.with_suffix(".png")
    if arguments.plot:
        about = json.loads(arguments.output.read_text(encoding="utf-8"))
        print(table(about), draw(about, picture), sep="\n")
        return 0
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("cache_policy.py: this PyTorch sees no GPU")
    if arguments.ncu:
        return under_ncu(arguments)
    if arguments.device == "cpu":
        torch.set_num_threads(2)
    import on_gpus  # not at the top: it sets environment variables that CPU ranks must not have

    about = on_gpus.surroundings(arguments.device)
    rows = kept_rows(arguments, about)
    order = list(cache_policy_apps.APPLICATIONS)
    there = {row["application"] for row in rows}
    names = [name for name in arguments.only or order if name not in there]
    begin = time.time()
    if arguments.device == "cuda":
        if names:
            compile_all(names, arguments)
        about["compile_seconds"] = time.time() - begin
        print(f"# {len(names)} applications compiled ahead in {about['compile_seconds']:.0f} s", flush=True)
    about["left_out"] = []
    ends = time.time() + arguments.seconds
    for name in names:
        begin = time.time()
        if begin > ends:
            about["left_out"].append(name)
            continue
        row = measured(name, arguments)
        rows = sorted([*rows, row], key=lambda one: order.index(one["application"]))
        ratios = ", ".join(f"{way} {ratio:.3f}" for way, ratio in row["ratio"].items())
        print(f"# {name}: {ratios} ({time.time() - begin:.0f} s)", flush=True)
        bench.write_json(arguments.output, about | summary(rows), rows)
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
    told = {**about, **summary(rows), "rows": rows}
    print(table(told), draw(told, picture), sep="\n")
    print(
        f"# written to {arguments.output}" + (f"; left out for time: {about['left_out']}" if about["left_out"] else "")
    )
    return 0 if all(row["same_bits"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
