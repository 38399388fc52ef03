"""Draws the README's picture, docs/images/overview.svg, from benchmarks/results: `python tools/draw_overview.py`.

Left, one layer of a decoding step of Llama 1B on two GPUs, as measured: a line is a multiprocessor, a colour a part of
the layer, white what waits. Right, the time of a step beside Inductor's and eager PyTorch's. The same files
give the same picture.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import headline_tables  # noqa: E402

from ark_torch.tools._trace_files import Step, read, steps_of  # noqa: E402

PARTS = {  # of a layer, by how the names of its tasks end
    "attention.wq": ("query, key, value products", "#4e79a7"),
    "attention": ("attention", "#f28e2b"),
    "attention.wo": ("output product + all_reduce", "#e15759"),
    "mlp.gate": ("gate and up products", "#76b7b2"),
    "mlp.down": ("down product + all_reduce", "#b07aa1"),
    "": ("the layers beside", "#b8b8b8"),
}
LAYER, EVERY = 4, 4  # which layer, and of how many multiprocessors one is drawn


def part_of(name: str) -> str:
    """The key of PARTS; "" for what is of another layer, or of none."""
    return next((part for part in PARTS if part and name.endswith(f" layers.{LAYER}.{part}")), "")


def draw_step(axes: Axes, steps: list[Step]) -> None:
    steps = sorted(steps, key=lambda step: step.rank)
    mine = [one for step in steps for one in step.slices if one.kind != "wait" and part_of(one.name)]
    begin, length = min(one.begin for one in mine), max(one.end for one in mine) - min(one.begin for one in mine)
    top = 0
    for step in steps:
        lanes = 0
        for worker in range(0, step.workers, EVERY):
            spans: dict[str, list[tuple[float, float]]] = {}
            for one in step.slices:
                inside = one.end > begin and one.begin < begin + length
                if one.worker == worker and one.kind != "wait" and inside:
                    colour = PARTS[part_of(one.name)][1]
                    first = max(one.begin - begin, 0.0)
                    spans.setdefault(colour, []).append((first, min(one.end - begin, length) - first))
            for colour, some in spans.items():
                axes.broken_barh(some, (-top - lanes - 1, 0.85), facecolors=colour, linewidth=0)
            lanes += 1
        axes.text(-length / 50, -top - lanes / 2, f"GPU {step.rank}", rotation=90, ha="right", va="center")
        top += lanes + 2
    axes.set(xlim=(0, length), ylim=(-top + 1, 0.5), yticks=[], xlabel="microseconds")
    axes.set_title("One layer of Llama 1B on two H100, one kernel a GPU", fontsize=11)
    for name, colour in PARTS.values():
        axes.bar(0, 0, color=colour, label=name)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False, fontsize=9)


def times(load: headline_tables.Load) -> dict[str, dict[str, float]]:
    """Place -> contender -> milliseconds of a step."""
    alone = headline_tables.medians(headline_tables.only(load("decode_h200"), model="llama-1b"))
    pair = headline_tables.of_ranks(load("decode_ranks_autotune_h100"), 2)
    return {
        place: {
            "ark": headline_tables.best(of, "ark"),
            "Inductor, best mode": headline_tables.best(of, "inductor"),
        }
        for place, of in (("1 H200", alone), ("2 H100", pair))
    }


def draw_times(axes: Axes, found: dict[str, dict[str, float]]) -> None:
    colours = {"ark": "#4e79a7", "Inductor, best mode": "#bbbbbb"}
    for number, (name, colour) in enumerate(colours.items()):
        places = [place + 0.38 * number for place in range(len(found))]
        bars = axes.bar(places, [of[name] for of in found.values()], 0.36, color=colour, label=name)
        axes.bar_label(bars, fmt="%.3f", fontsize=9)
    axes.set_xticks([place + 0.19 for place in range(len(found))], list(found))
    axes.set_ylabel("ms a token")
    axes.set_title("Llama 1B, batch of one", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), frameon=False, fontsize=9)


def main() -> None:
    def load(name: str) -> dict[str, object]:
        return dict(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))

    # Text stays text; no date and no random names, so that the same files give the same picture.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ark_torch", "font.family": "sans-serif"})
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    step, bars = figure.subplots(1, 2, width_ratios=(3, 1))
    draw_step(step, steps_of(read(RESULTS / "loop_step_2_ranks_h100.json.gz")))
    draw_times(bars, times(load))
    path = ROOT / "docs" / "images" / "overview.svg"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None}, facecolor="white")
    print(f"drawn to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
