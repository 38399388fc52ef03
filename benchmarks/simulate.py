"""Fits the simulator's machines to benchmarks/results, validates it on other measurements, and extrapolates.

    python benchmarks/simulate.py [--keep-machines]

Writes ark_torch/simulation/machines.json, results/simulate.json and results/simulate.png. It measures nothing. Run it
again when simulate_groups.json (benchmarks/simulate_groups.py), collectives_2_h200.json, collectives_4_h200.json,
dispatch_4_h200.json or the steps' files change. It takes a minute of CPU time.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ark_torch.simulation import fit, measured, steps, validate
from ark_torch.simulation.machine import PRESETS, presets
from ark_torch.tools.bench.config import show_size

RESULTS = Path(__file__).resolve().parent / "results"
STEPS = {
    "ddp": "GPT-2 XL, DDP, ms", "decode": "Llama 1B, a token, us", "dlrm_1": "DLRM, 1 a bag, ms",
    "dlrm_1_fused": "DLRM, 1 a bag, fused, ms", "dlrm_8": "DLRM, 8 a bag, ms",
    "dlrm_8_fused": "DLRM, 8 a bag, fused, ms",
}  # fmt: skip


def table(data: dict[str, Any]) -> str:
    """Formats docs/simulate.md's summary: how close predictions are, and which are furthest off."""
    every = data["rows"]
    lines = [
        f"{len(every)} rows that nothing was fitted to; {sum(abs(r['error']) <= validate.NEAR for r in every)} of them "
        f"are within {validate.NEAR:.0%} of the measured time.",
        "",
        "| machine | ranks | rows | within 15% | of 1 MB and more | median error | furthest away |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in data["summary"]:
        worst = row["worst"]
        what = f"{worst['operation']} of {show_size(worst['bytes'])} by {worst['engine']}"
        link = f", {row['rail_gbit']:g} Gbit/s" if row["rail_gbit"] else ""
        lines.append(
            f"| {row['machine']}{link} | {row['ranks']} | {row['rows']} | {row['near']:.0%} | {row['near_large']:.0%} "
            f"| {row['median']:.0%} "
            f"| {what}: {worst['error']:+.0%} |"
        )
    return "\n".join(lines)


def rows_table(data: dict[str, Any]) -> str:
    """Formats every row of the GPUs and of the namespaces, and the all_reduces of the CPU groups."""
    lines = [
        "| machine | operation | ranks | size | engine | measured, us | predicted, us | error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in data["rows"]:
        if row["machine"] == measured.CPU and row["operation"] != "all_reduce":
            continue
        rail = f", {row['rail_gbit']:g} Gbit/s" if row["rail_gbit"] else ""
        lines.append(
            f"| {row['machine']}{rail} | {row['operation']} | {row['ranks']} | {show_size(row['bytes'])} "
            f"| {row['engine']} | {row['measured_us']:.1f} | {row['predicted_us']:.1f} | {row['error']:+.0%} |"
        )
    return "\n".join(lines)


def steps_table(data: dict[str, Any]) -> str:
    """Formats predicted steps by number of GPUs, with measured times in brackets."""
    lines = [
        f"| GPUs | {' | '.join(STEPS.values())} | fused saves, 1 and 8 a bag |",
        f"| --- |{' --- |' * (len(STEPS) + 1)}",
    ]
    for row in data["steps"]:
        cells = []
        for name, title in STEPS.items():
            scale = 1e3 if title.endswith("ms") else 1
            cell = f"{row['us'][name] / scale:.2f}" if scale > 1 else f"{row['us'][name]:.0f}"
            if name in row["measured_us"]:
                at = row["measured_us"][name] / scale
                cell += f" ({at:.2f})" if scale > 1 else f" ({at:.0f})"
            cells.append(cell)
        saved = " and ".join(f"{1 - row['us'][f'{n}_fused'] / row['us'][n]:.1%}" for n in steps.DLRM_SHAPES)
        lines.append(f"| {row['gpus']} | {' | '.join(cells)} | {saved} |")
    return "\n".join(lines)


def draw(data: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5))
    for machine in dict.fromkeys(row["machine"] for row in data["rows"]):
        of = [row for row in data["rows"] if row["machine"] == machine]
        left.loglog([r["measured_us"] for r in of], [r["predicted_us"] for r in of], ".", label=machine)
    ends = [1, max(row["measured_us"] for row in data["rows"])]
    for factor, style in ((1, "-"), (1 - validate.NEAR, ":"), (1 + validate.NEAR, ":")):
        left.loglog(ends, [factor * end for end in ends], style, color="gray", linewidth=0.8)
    left.set(xlabel="measured, us", ylabel="predicted, us", title="Rows that nothing was fitted to; dotted: 15%")
    left.legend()
    gpus = [row["gpus"] for row in data["steps"]]
    for name, title in STEPS.items():
        first = data["steps"][0]["us"][name]
        right.semilogx(gpus, [row["us"][name] / first for row in data["steps"]], ".-", base=2,
                       label=title.rpartition(",")[0])  # fmt: skip
    right.axvspan(4, max(gpus), color="gray", alpha=0.1)
    right.set(xlabel="GPUs (grey: nothing was measured)", ylabel="a step, over that of 2 GPUs", title="Whole steps")
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep-machines", action="store_true", help="fit nothing: take machines.json as it is")
    arguments = parser.parse_args()
    if not arguments.keep_machines:
        fitted = {name: machine.to_json() for name, machine in fit.fit(RESULTS, print).items()}
        PRESETS.write_text(json.dumps(fitted, indent=1) + "\n", encoding="utf-8")
    machines = presets()
    rows = validate.rows(RESULTS, machines)
    data = {
        "command": "python benchmarks/simulate.py", "near": validate.NEAR, "summary": validate.summary(rows),
        "rows": rows, "steps": steps.rows(RESULTS, machines["h200"]),
    }  # fmt: skip
    (RESULTS / "simulate.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    draw(data, RESULTS / "simulate.png")
    print(table(data), rows_table(data), steps_table(data), sep="\n\n")


if __name__ == "__main__":
    main()
