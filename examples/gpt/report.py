"""What the demo shows at its end: curves, a comparison of the runs, and the speed of writing.

`compare` also decides which promises hold, and the demo's exit code follows it.
"""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import plotille
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from . import page
from .timing import CommunicationTimes
from .training import Place, RunResult, TrainingConfig

# Allowed relative distance of the weights (Euclidean norm). With more than two ranks, two backends may round a sum
# differently (two ranks: a + b is b + a), and training feeds the last bit back into everything after it.
ROUNDING = 1e-2


@dataclass(frozen=True)
class Verdict:
    text: str
    holds: bool


def compare(results: list[RunResult]) -> list[Verdict]:
    """Compares every later run with the first: bit for bit over the same backend, within rounding over another."""
    first = results[0]
    verdicts = []
    for other in results[1:]:
        if other.backend == first.backend:
            differing = int((bits(first.weights) != bits(other.weights)).sum())
            total = first.weights.numel()
            text = f"two runs over {first.backend}: {differing} of {total:,} weights differ in any bit"
            verdicts.append(Verdict(text, differing == 0))
        else:
            distance = float((first.weights - other.weights).norm() / other.weights.norm())
            largest = float((first.weights - other.weights).abs().max())
            text = (
                f"{first.backend} against {other.backend}: weights differ by {distance:.1e} in relative norm, "
                f"{largest:.1e} at most (rounding allows {ROUNDING:.0e})"
            )
            verdicts.append(Verdict(text, distance <= ROUNDING))
    improved = first.held_out[-1][1] < first.held_out[0][1]
    text = f"held-out loss fell from {first.held_out[0][1]:.3f} to {first.held_out[-1][1]:.3f} nats a byte"
    return [*verdicts, Verdict(text, improved)]


def bits(weights: torch.Tensor) -> torch.Tensor:
    return weights.view(torch.int32)


def training_table(results: list[RunResult]) -> Table:
    table = Table(title="The same training over each backend", title_justify="left")
    table.add_column("")
    for number in range(len(results)):
        table.add_column(label(results, number), justify="right")
    table.add_row("seconds", *[f"{r.seconds:.1f}" for r in results])
    table.add_row("held-out loss at the end", *[f"{r.held_out[-1][1]:.4f}" for r in results])
    return table


def communication_table(times: CommunicationTimes) -> Table:
    table = Table(title="Communication, taken in turns; milliseconds a step, medians", title_justify="left")
    table.add_column("")
    for name in times.backends:
        table.add_column(name, justify="right")
    table.add_column("none", justify="right")
    of_all = list(times.backends.values())
    table.add_row("forward + backward", *[f"{t.step_ms:.2f}" for t in of_all], f"{times.local_ms:.2f}")
    table.add_row("longer than without communication", *[f"{t.exposed_ms:+.2f}" for t in of_all], "")
    megabytes = times.gradient_bytes / 1e6
    name = f"all_reduce of the gradients alone, {megabytes:.1f} MB"
    table.add_row(name, *[f"{t.gradient_ms:.2f}" for t in of_all], "")
    return table


def smooth(losses: list[float], window: int = 20) -> list[float]:
    """Returns the running mean over the last `window` steps."""
    sums = torch.tensor([0.0, *losses], dtype=torch.float64).cumsum(0)
    ends = torch.arange(1, len(losses) + 1)
    starts = (ends - window).clamp(min=0)
    return ((sums[ends] - sums[starts]) / (ends - starts)).tolist()


def terminal_curve(result: RunResult, width: int) -> str:
    """Draws the loss curve as text for the terminal."""
    figure = plotille.Figure()
    figure.width, figure.height, figure.with_colors = width, 14, False
    figure.x_label, figure.y_label = "step", "loss, nats a byte"
    figure.set_x_limits(min_=0, max_=len(result.losses))
    figure.y_ticks_fkt = lambda low, high: f"{low:.2f}"
    figure.x_ticks_fkt = lambda low, high: f"{low:.0f}"
    figure.plot(list(range(1, len(result.losses) + 1)), smooth(result.losses), label="training (smoothed)")
    steps, losses = zip(*result.held_out, strict=True)
    figure.scatter(steps, losses, marker="o", label="held out")
    return str(figure.show(legend=True))


def draw(results: list[RunResult], times: CommunicationTimes, path: Path) -> None:
    """Draws the PNG: loss curves of all runs in one plot, and the communication time of each."""
    figure = Figure(figsize=(12, 5), layout="tight")  # not pyplot: there may be no screen
    curves, bars = figure.subplots(1, 2, width_ratios=(2, 1))
    for number, result in enumerate(results):
        style = dict(color=f"C{number}", linestyle=("-", "--", ":")[number % 3], linewidth=3 - 0.8 * number)
        curves.plot(range(1, len(result.losses) + 1), smooth(result.losses), label=label(results, number), **style)
        steps, losses = zip(*result.held_out, strict=True)
        curves.plot(steps, losses, "o", color=f"C{number}", markersize=7 - 2 * number)
    curves.set(xlabel="step", ylabel="loss, nats a byte", title="Training loss (lines, smoothed), held-out loss (dots)")
    curves.legend()
    curves.grid(alpha=0.3)
    colours = [f"C{number}" for number in range(len(times.backends))]
    drawn = bars.bar(list(times.backends), [t.gradient_ms for t in times.backends.values()], color=colours)
    bars.bar_label(drawn, fmt="%.2f")
    bars.set(ylabel="ms", title=f"all_reduce of {times.gradient_bytes / 1e6:.1f} MB of gradients")
    figure.savefig(path, dpi=120)


def label(results: list[RunResult], number: int) -> str:
    earlier = sum(result.backend == results[number].backend for result in results[:number])
    return results[number].backend + (f" (run {earlier + 1})" if earlier else "")


def write_report(
    results: list[RunResult], times: CommunicationTimes, config: TrainingConfig, place: Place, path: Path
) -> None:
    runs = [{key: value for key, value in asdict(result).items() if key != "weights"} for result in results]
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    verdicts = [asdict(verdict) for verdict in compare(results)]
    report = {"ranks": place.world, "device": place.device.type, "versions": versions, "config": asdict(config)}
    report |= {"verdicts": verdicts, "communication": asdict(times), "runs": runs}
    path.write_text(json.dumps(report, indent=1) + "\n")


def show(console: Console, results: list[RunResult], times: CommunicationTimes) -> bool:
    """Prints the results of the training. Returns whether all verdicts hold."""
    console.print()
    console.print(
        terminal_curve(results[0], min(console.width - 24, 80)), markup=False, highlight=False, soft_wrap=True
    )
    console.print()
    console.print(training_table(results))
    console.print(communication_table(times))
    verdicts = compare(results)
    for verdict in verdicts:
        mark = "[green]holds[/]" if verdict.holds else "[red]FAILS[/]"
        console.print(f"{mark}  {verdict.text}", highlight=False, soft_wrap=True)
    console.print("\nThe trained model writes, compiled by Inductor and by ark.")
    return all(verdict.holds for verdict in verdicts)


def show_writing(console: Console, folder: Path) -> None:
    """Prints the sample, the speed of each way, and the summary, from the folder's files."""
    decoded = json.loads((folder / "decode.json").read_text(encoding="utf-8"))
    console.print("\nA sample from the trained model:\n", style="bold")
    console.print((folder / "sample.txt").read_text(encoding="utf-8"), markup=False, highlight=False)
    console.print()
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    for caption, head, rows in (page.decoding(decoded), page.summary(report, decoded)):
        table = Table(title=caption, title_justify="left")
        for number, cell in enumerate(head):
            table.add_column(cell, justify="left" if number == 0 else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    mark = "[green]holds[/]" if decoded["resident_as_single_launches"] else "[red]FAILS[/]"
    console.print(f"{mark}  resident mode writes the text of single launches", highlight=False)
    files = ", ".join(sorted(path.name for path in folder.iterdir() if path.name != "index.html"))
    console.print(f"\nOpen {folder / 'index.html'}. Beside it: {files}", soft_wrap=True)
