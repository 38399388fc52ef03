"""`ark explain`: what backend="ark" makes of a model, as text, as an HTML page, and as files per region."""

from __future__ import annotations

import argparse
import importlib
import json
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ark_torch.tools._trace_picture import draw, estimated

if TYPE_CHECKING:
    from ark_torch.compile.report import PieceReport

DESCRIPTION = """\
Show what torch.compile(backend="ark") makes of a model: its regions, what falls back and why, and each region's work by
kind. FUNCTION takes nothing and returns (model, arguments) or (model, arguments, keywords); MODULE is the name of a
module, or a file. The model is called once, as for inference.

exit code: 0, 1 when something falls back, 2 when the model cannot be had
"""
EXAMPLES = """\
examples:
  ark explain mymodel.py:example                         print the report
  ark explain mymodel.py:example --html report.html      the same as a page, with schedules to zoom into
  ark explain mymodel:example --target sm_90a            also plan it for a GPU that need not be here
"""


def subject(text: str) -> Callable[[], Any]:
    """The function that `text` names. Raises ValueError if there is none."""
    module, _, name = text.rpartition(":")
    if not module or not name:
        raise ValueError(f"{text!r} is not MODULE:FUNCTION, such as mymodel:example or mymodel.py:example")
    if module.endswith(".py"):
        names = runpy.run_path(module)
    else:
        sys.path.insert(0, "")
        names = vars(importlib.import_module(module))
    if not callable(names.get(name)):
        raise ValueError(f"{module} has no function {name!r}")
    return names[name]  # type: ignore[no-any-return]


def work(plan: dict[str, Any]) -> Iterator[str]:
    """A table of stages, tasks, arithmetic, bytes and estimated total worker time."""
    from ark_torch.compile.report_html import work_by_kind

    yield f"    {'kind':<24} {'stages':>7} {'tasks':>7} {'MFLOP':>9} {'MB':>9} {'est. us':>9}"
    for name, stages, tasks, mflop, megabytes, cost in work_by_kind(plan):
        yield f"    {name:<24} {stages:>7} {tasks:>7} {mflop:>9.3f} {megabytes:>9.3f} {cost:>9.1f}"
    arena, eager = plan["arena_bytes"], plan["eager_peak_bytes"]
    yield f"    temporaries: {arena / 1024:.1f} KB, eager {eager / 1024:.1f} KB; {len(plan['events'])} events"
    target = plan["target"]
    yield (
        f"    costs, {target['costs']}: of one worker {target['flops_per_us'] / 1e3:.1f} GFLOP/s in products, "
        f"{target['pointwise_per_us'] / 1e3:.1f} elsewhere, {target['bytes_per_us'] / 1e3:.1f} GB/s, in caches "
        f"{target['cached_bytes_per_us'] / 1e3:.1f} GB/s; a task {target['task_us']:.2f} us, "
        f"a wait {target['wait_us']:.2f} us"
    )


def write(piece: PieceReport, stem: Path) -> None:
    _write_plan(piece.plan_json, stem)
    stem.with_suffix(".cpp").write_text(piece.region.source())
    if piece.target_plan is not None:
        target = json.loads(piece.target_plan)["target"]["name"]
        _write_plan(piece.target_plan, stem.with_name(f"{stem.name}.{target}"))


def _write_plan(text: str, stem: Path) -> None:
    """As JSON, and as a drawing of its estimated schedule."""
    stem.with_name(f"{stem.name}.json").write_text(text)
    stem.with_name(f"{stem.name}.svg").write_text(draw([estimated(json.loads(text))]))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="ark explain",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("subject", metavar="MODULE:FUNCTION", help="returns (model, arguments[, keywords])")
    add("--html", type=Path, metavar="FILE", help="write the report as one self-contained page")
    add("--output", type=Path, metavar="DIR", help="write each region's plan (JSON), schedule (SVG) and source")
    add("--target", default="", metavar="NAME", help="also plan the regions for this target, such as sm_90a")
    add("--training", action="store_true", help="explain a call with gradients (default: inference)")
    chosen = parser.parse_args(argv)

    from ark_torch import _autoload

    _autoload.ready()
    import ark_torch
    from ark_torch.compile.report import frame_text

    try:
        model, arguments, *keywords = subject(chosen.subject)()
    except (ValueError, TypeError, ImportError, OSError) as error:
        print(f"explain: {error}", file=sys.stderr)
        return 2
    try:
        given = {"target": chosen.target, "training": chosen.training, **(keywords[0] if keywords else {})}
        report = ark_torch.explain(model, *arguments, **given)
    except ValueError as error:
        if "target=" not in str(error):
            raise
        print(f"explain: {error}", file=sys.stderr)
        return 2
    print(report)
    if chosen.html is not None:
        report.save(chosen.html)
    for number, graph in enumerate(report.graphs):
        for piece in (piece for piece in graph.pieces if piece.region is not None):
            print(f"  graph {number}, {piece.name}:")
            print("\n".join(work(json.loads(piece.plan_json))))
            if piece.target_plan is not None:
                print("  planned " + frame_text(piece.target_plan) + ":")
                print("\n".join(work(json.loads(piece.target_plan))))
            if chosen.output is not None:
                chosen.output.mkdir(parents=True, exist_ok=True)
                write(piece, chosen.output / f"graph{number}-{piece.name.replace(' ', '')}")
    return 1 if report.fallbacks or any(graph.whole for graph in report.graphs) else 0
