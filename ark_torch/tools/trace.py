"""`ark trace`: analyzes, merges, cuts and draws the timelines of ARK_TRACE."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from ark_torch.tools._trace_files import Step, merge, read, steps_of, timeline_of, write
from ark_torch.tools._trace_picture import draw

DESCRIPTION = """\
Print, for every compiled region, how long its steps took and what its workers did meanwhile. --output and --timeline
write files for Perfetto (https://ui.perfetto.dev), packed where the name ends in .gz.

exit code: 0, or 2 when a file is no timeline or holds no step
"""
EXAMPLES = """\
examples:
  ARK_TRACE=trace.json python decode.py     write a timeline
  ark trace trace.json                      summarise it
  ark trace trace.rank*.json --output all.json --picture step.svg
"""


def summary(region: str, steps: Sequence[Step]) -> Iterator[str]:
    """Times are a step's mean, in microseconds summed over workers; shares are of the workers' time in steps."""
    lengths = sorted(step.length for step in steps)
    ranks = len({step.rank for step in steps})
    yield (
        f"{region}: {len(steps)} steps on {ranks} rank(s), {max(step.workers for step in steps)} workers; a step takes "
        f"{lengths[0]:.1f} us at least, {statistics.median(lengths):.1f} in the middle, {lengths[-1]:.1f} at most"
    )
    whole = sum(step.length * step.workers for step in steps) / len(steps)
    by_kind: dict[str, list[float]] = defaultdict(list)
    waited: dict[str, float] = defaultdict(float)
    estimated: dict[str, float] = defaultdict(float)
    for step in steps:
        for one in step.slices:
            by_kind[one.kind].append(one.length)
            estimated[one.kind] += one.arguments.get("estimated_us", 0.0)
            if one.kind == "wait":
                waited[one.name] += one.length
    waiting = sum(by_kind.pop("wait", [])) / len(steps)
    busy = sum(map(sum, by_kind.values())) / len(steps)
    yield f"  busy {busy / whole:.1%}, waiting {waiting / whole:.1%}, between tasks {1 - (busy + waiting) / whole:.1%}"
    yield f"  {'kind':<14} {'tasks':>7} {'us':>10} {'share':>7} {'estimated us':>13}"
    for kind, times in sorted(by_kind.items(), key=lambda item: -sum(item[1])):
        each = sum(times) / len(steps)
        shown = (
            f"{len(times) / len(steps):>7.0f} {each:>10.1f} {each / whole:>7.1%} {estimated[kind] / len(steps):>13.1f}"
        )
        yield f"  {kind:<14} {shown}"
    for name, total in sorted(waited.items(), key=lambda item: -item[1])[:5]:
        yield f"  {name}: {total / len(steps):.1f} us"


def beside(one: Step, steps: Sequence[Step]) -> list[Step]:
    """A step and the other ranks' steps at the same time, in rank order."""
    found = {one.rank: one}
    for step in steps:
        if step.region == one.region and step.begin < one.end and one.begin < step.end:
            found.setdefault(step.rank, step)
    return [found[rank] for rank in sorted(found)]


def choose(steps: Sequence[Step], number: int | None) -> list[Step]:
    """The steps to draw, of all ranks: the requested one, or the median one of the region with the most time."""
    by_region: dict[str, list[Step]] = defaultdict(list)
    for step in steps:
        by_region[step.region].append(step)
    most = max(by_region.values(), key=lambda some: sum(step.length for step in some))
    mine = [step for step in most if step.rank == most[0].rank]
    if number is None:
        later = mine[len(mine) // 4 :]  # skips the warm-up steps
        one = sorted(later, key=lambda step: step.length)[len(later) // 2]
    else:
        one = mine[number]
    return beside(one, most)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="ark trace", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("files", metavar="FILE", type=Path, nargs="+", help="timelines, one for each rank; .gz is unpacked")
    add("--output", type=Path, metavar="FILE", help="write all ranks to one file, on one clock")
    add("--timeline", type=Path, metavar="FILE", help="write one step of all ranks")
    add("--picture", type=Path, metavar="FILE", help="draw that step (SVG)")
    add("--step", type=int, metavar="N", help="which step, from 0 (default: a typical one)")
    add("--microseconds", type=float, default=float("inf"), metavar="US", help="draw so much of it (default: all)")
    chosen = parser.parse_args(argv)
    try:
        merged = merge([read(path) for path in chosen.files])
        steps = steps_of(merged)
        if not steps:
            raise ValueError("there is no step in it; did the program end before its first call?")
        one = choose(steps, chosen.step)
    except (OSError, ValueError, IndexError) as error:
        print(f"trace: {error}", file=sys.stderr)
        return 2
    for region in dict.fromkeys(step.region for step in steps):
        print("\n".join(summary(region, [step for step in steps if step.region == region])))
    if chosen.output is not None:
        write(chosen.output, merged)
    if chosen.timeline is not None:
        write(chosen.timeline, timeline_of(one))
    if chosen.picture is not None:
        chosen.picture.write_text(draw(one, chosen.microseconds), encoding="utf-8")
    return 0
