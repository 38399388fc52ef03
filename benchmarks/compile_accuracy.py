"""Compares the rounding errors of operators compiled by torch.compile(backend="ark") and by Inductor on CPU.

    python benchmarks/compile_accuracy.py [--types float32 bfloat16 float16] [--output FOLDER]

Every operator with a lowering (ark_torch.compile.lowering.RULES) has cases in tests/compile/accuracy_cases.py. The
program fails if an operator has none or its cases do not reach it. Errors are relative to float64, in units of the
result type's rounding (tests/compile/accuracy.py). All cases of a type form one graph, which each side compiles once.
Operators that AOTAutograd decomposes are compiled by ark a second time without decomposition.

The rule: ark's root mean square is at most 1.5 times Inductor's plus a quarter of a unit. The quarter is the cost of
rounding a correct result once (a uniform error has 1 / sqrt(12) = 0.29 units, and 0.2 relative to the mean of numbers
within a power of two). Without it the bound would be zero where Inductor happens to round once less.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ark_torch.compile import backend, decompositions, lowering, operators, options
from ark_torch.compile.report import Report
from ark_torch.tools.bench import report as bench

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent / "tests" / "compile"))

import accuracy  # noqa: E402
import accuracy_cases  # noqa: E402
import accuracy_inputs  # noqa: E402

del operators  # only imported to register its rules
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Given = list[list[torch.Tensor]]


def by_ark(cases: Sequence[accuracy_inputs.Case], given: Given, seen: set[Any]) -> list[Any]:
    """Runs the cases as one region and returns their results. Adds the operators whose lowerings ran to `seen`."""

    def noting(operator: Any, rule: lowering.Rule) -> lowering.Rule:
        def noted(low: lowering.Lowering, node: torch.fx.Node) -> Any:
            result = rule(low, node)
            seen.add(operator)
            return result

        return noted

    report, chosen = Report(), options.parse(None, {"choose": "ark", "minimum": 1, "fallback": False})
    rules = {operator: noting(operator, rule) for operator, rule in lowering.RULES.items()}
    with mock.patch.dict(lowering.RULES, rules):
        results = torch.compile(
            accuracy.together(cases), backend=lambda g, x: backend.compile_graph(g, x, chosen, report), dynamic=False
        )(accuracy.copied(given))
    assert [piece.runs_on for graph in report.graphs for piece in graph.pieces] == ["ark"], report
    return list(results)


@torch.no_grad()
def part(dtype: str, side: str) -> dict[str, Any]:
    """Measures all cases of a type: "ark", "whole" (operators that AOTAutograd would decompose) or "inductor"."""
    cases, given = accuracy.drawn(TYPES[dtype])
    wanted = accuracy.exact(cases, given)
    seen: set[Any] = set()
    if side == "inductor":
        got = torch.compile(accuracy.together(cases), dynamic=False)(accuracy.copied(given))
    elif side == "ark":
        got = by_ark(cases, given, seen)
    else:
        table = {o: d for o, d in decompositions.table().items() if o not in lowering.RULES}
        chosen = [i for i, case in enumerate(cases) if case.operator in decompositions.table()]
        cases, given, wanted = ([of[i] for i in chosen] for of in (cases, given, wanted))
        with mock.patch.object(decompositions, "table", lambda: table):
            got = by_ark(cases, given, seen)
    figures = [accuracy.figures(*one) for one in zip(cases, map(accuracy.tensors, got), wanted, strict=True)]
    return {
        "figures": {case.name: found for case, found in zip(cases, figures, strict=True)},
        "seen": sorted(map(str, seen)),
    }


def measured(dtype: str, side: str, folder: Path) -> dict[str, Any]:
    """Measures in a separate process, because each compiler's Python code uses only one core."""
    out = folder / f"{dtype}-{side}.json"
    environment = {**os.environ, "ARK_CACHE": f"{folder}/ark", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
    command = [sys.executable, __file__, "--types", dtype, "--part", side, str(out)]
    subprocess.run(command, env=environment, check=True)
    return dict(json.loads(out.read_text(encoding="utf-8")))


def shown(rows: list[bench.Row], dtype: str) -> None:
    mine = [row for row in rows if row["type"] == dtype]
    print(f"{dtype}: {len(mine)} cases of {len({row['operator'] for row in mine})} operators; nearest to the rule:")
    for row in sorted(mine, key=lambda row: -row["nearness"])[:8]:
        kind = "element" if "element" in row["ark"] else "scale"
        print(
            f"  {row['nearness']:5.2f} of it: {row['operator']} {row['layout']}{row['form']}: {kind} "
            f"{row['ark'][kind]:.3f}, Inductor {row['inductor'][kind]:.3f} units"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", default=list(TYPES), choices=TYPES)
    parser.add_argument("--output", type=Path, default=FOLDER / "results")
    parser.add_argument("--part", nargs=2, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part is not None:
        side, out = arguments.part
        Path(out).write_text(json.dumps(part(arguments.types[0], side)), encoding="utf-8")
        return 0
    about = bench.surroundings(bench.shown_command("benchmarks/compile_accuracy.py"))
    rows: list[bench.Row] = []
    seen: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="ark-bench-") as folder:
        wanted = [(dtype, side) for dtype in arguments.types for side in ("inductor", "ark", "whole")]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            parts = dict(zip(wanted, pool.map(lambda one: measured(*one, Path(folder)), wanted), strict=True))
    for dtype in arguments.types:
        inductor = parts[dtype, "inductor"]["figures"]
        layouts = {case.name: case for case in accuracy_cases.cases(TYPES[dtype])}
        for side in ("ark", "whole"):
            seen.update(parts[dtype, side]["seen"])
            for name, ark in parts[dtype, side]["figures"].items():
                case = layouts[name]
                row = {"operator": str(case.operator), "layout": case.layout, "type": dtype}
                row |= {"form": "" if side == "ark" else ", whole", "ark": ark, "inductor": inductor[name]}
                rows.append(row | {"nearness": accuracy.nearness(ark, inductor[name])})
        shown(rows, dtype)
    bench.write_json(arguments.output / "compile_accuracy.json", about, rows)
    missing = {str(o) for o in lowering.RULES} - seen - {str(o) for o in accuracy_cases.WITHOUT_ROUNDING}
    broken = [row for row in rows if row["nearness"] > 1]
    for row in broken:
        print(f"breaks the rule: {row['type']} {row['operator']} {row['layout']}{row['form']}", file=sys.stderr)
    if missing:
        print(f"no case has reached the lowering of: {', '.join(sorted(missing))}", file=sys.stderr)
    return 1 if broken or missing else 0


if __name__ == "__main__":
    sys.exit(main())
