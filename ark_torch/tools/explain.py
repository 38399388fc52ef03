"""What backend="ark" makes of a model: `python -m ark_torch.tools.explain MODULE:FUNCTION [--output FOLDER]`.

FUNCTION takes nothing and returns (model, arguments) or (model, arguments, keywords); MODULE may be a file. Shown are
the regions, what falls back and why, and each region's work by kind. --output writes every region's plan as JSON, its
estimated schedule as a drawing, and the generated source. --target sm_90a plans every region for that GPU as well,
which need not be here: what its loaders fetch ahead, in which order, what travels as packets. Exit code: 0, or 1 when
something falls back, or 2 when the model cannot be had.
"""

from __future__ import annotations

import argparse
import importlib
import json
import runpy
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ark_torch.compile.report import PieceReport, frame_text


def subject(text: str) -> Callable[[], Any]:
    """The function that a text names. ValueError where there is none."""
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


def work_by_kind(plan: dict[str, Any]) -> Iterator[str]:
    """A table: stages, tasks, arithmetic, bytes and the estimated time of all workers together."""
    kinds: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0, 0, 0])
    for stage in plan["stages"]:
        row = kinds[stage["name"]]
        for column, amount in enumerate((1, stage["tasks"], stage["flops"], stage["bytes"], stage["cost_us"])):
            row[column] += amount
    yield f"    {'kind':<24} {'stages':>7} {'tasks':>7} {'MFLOP':>9} {'MB':>9} {'est. us':>9}"
    for name, (stages, tasks, flops, moved, cost) in sorted(kinds.items(), key=lambda item: -item[1][4]):
        shown = f"{stages:>7.0f} {tasks:>7.0f} {flops / 1e6:>9.3f} {moved / 1e6:>9.3f} {cost:>9.1f}"
        yield f"    {name:<24} {shown}"
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
    stem.with_suffix(".json").write_text(piece.plan_json)
    stem.with_suffix(".svg").write_text(piece.region.svg())
    stem.with_suffix(".cpp").write_text(piece.region.source())
    if piece.target_plan is not None:
        plan, drawing = piece.target_plan
        target = json.loads(plan)["target"]["name"]
        stem.with_suffix(f".{target}.json").write_text(plan)
        stem.with_suffix(f".{target}.svg").write_text(drawing)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ark_torch.tools.explain", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("subject", metavar="MODULE:FUNCTION", help="returns (model, arguments[, keywords])")
    parser.add_argument("--output", type=Path, help="folder for plans, drawings and sources")
    parser.add_argument("--target", default="", help="plan for it too, such as sm_90a")
    chosen = parser.parse_args(argv)

    import torch

    import ark_torch

    try:
        model, arguments, *keywords = subject(chosen.subject)()
    except (ValueError, TypeError, ImportError, OSError) as error:
        print(f"explain: {error}", file=sys.stderr)
        return 2
    try:
        with torch.no_grad():
            report = ark_torch.explain(model, *arguments, target=chosen.target, **(keywords[0] if keywords else {}))
    except ValueError as error:
        if "target=" not in str(error):
            raise
        print(f"explain: {error}", file=sys.stderr)
        return 2
    print(report)
    for number, graph in enumerate(report.graphs):
        for piece in (piece for piece in graph.pieces if piece.region is not None):
            print(f"  graph {number}, {piece.name}:")
            print("\n".join(work_by_kind(json.loads(piece.plan_json))))
            if piece.target_plan is not None:
                print("  planned " + frame_text(piece.target_plan[0]) + ":")
                print("\n".join(work_by_kind(json.loads(piece.target_plan[0]))))
            if chosen.output is not None:
                chosen.output.mkdir(parents=True, exist_ok=True)
                write(piece, chosen.output / f"graph{number}-{piece.name.replace(' ', '')}")
    return 1 if report.fallbacks or any(graph.whole for graph in report.graphs) else 0


if __name__ == "__main__":
    sys.exit(main())
