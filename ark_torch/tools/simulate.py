"""`ark simulate`: predicts a collective's time on 2 to 4,096 ranks by simulation, fitted to measurements."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

DESCRIPTION = """\
Simulate a collective on machines that need not be here: links, engines and chunks as the dispatch tables choose them,
with costs fitted to measurements of this project. Beyond 4 GPUs nothing was ever measured, and the rails between nodes
are assumed: what it says of them is arithmetic, not a promise. SIZE is the whole tensor's, as nccl-tests count.
"""
EXAMPLES = """\
examples:
  ark simulate all_reduce 64M                     two H200, with what carried it
  ark simulate all_reduce 1K 1M 1G --ranks 2 64   each size on each number of GPUs
  ark simulate all_to_all 16M --ranks 1024 --rail 800 --json
  ark simulate all_reduce 64M --ranks 16 --net rdma
                                                  two nodes of eight as ARK_NET=rdma carries them
  ark simulate --list                             the machines that are known
  ark simulate all_reduce 1M --machine mine.json  a machine of your own: print one with --show, change it

needs simpy: pip install 'ark_torch[simulate]'
exit code: 0, 2 when the machine or the collective cannot be
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ark simulate",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("operation", nargs="?", help="all_reduce, all_gather, reduce_scatter, all_to_all or broadcast")
    add("sizes", nargs="*", metavar="SIZE", help="bytes, or with a suffix: 8K, 16M, 1G")
    add("--ranks", type=int, nargs="+", default=[2], metavar="N", help="GPUs, or processes (default: 2)")
    add("--machine", default="h200", metavar="NAME", help="a machine's name or JSON file (default: %(default)s)")
    add("--node-ranks", type=int, metavar="N", help="ranks of a node, instead of the machine's")
    add("--rail", type=float, metavar="GBIT", help="Gbit/s of a rank's rail to other nodes, instead of the machine's")
    add("--rail-latency", type=float, metavar="US", help="of a message between nodes, instead of the machine's")
    add("--engine", help="this one within a node, whatever the tables say: packets, lines, chunks, bulk, copy_engine")
    add("--net", default="nccl", help="what carries GPUs' tensors between nodes: nccl or rdma (default: %(default)s)")
    add("--json", action="store_true", help="print a JSON list")
    add("--list", action="store_true", help="print the known machines and what they were fitted to")
    add("--show", action="store_true", help="print the machine as JSON")
    return parser


def changed(machine: Any, options: argparse.Namespace) -> Any:
    from dataclasses import replace

    given = {"node_ranks": options.node_ranks, "rail_gbit": options.rail, "rail_latency_us": options.rail_latency}
    return replace(machine, **{name: value for name, value in given.items() if value is not None})


def main(arguments: list[str] | None = None) -> int:
    """Runs `ark simulate`; returns the exit code."""
    parser = make_parser()
    options = parser.parse_args(arguments)

    from ark_torch.simulation import machine as machines
    from ark_torch.simulation.network import SimpyMissing

    try:
        if options.list:
            for name, one in machines.presets().items():
                print(f"{name:<12} {one.kind}, nodes of {one.node_ranks}; fitted to {one.fitted_from}")
            return 0
        machine = changed(machines.load(options.machine), options)
        if options.show:
            print(json.dumps(machine.to_json(), indent=1))
            return 0
        if options.operation is None or not options.sizes:
            parser.error("an operation and a size are needed, such as: ark simulate all_reduce 64M")
        rows = simulated(machine, options)
    except (machines.BadMachine, SimpyMissing, ValueError) as error:
        print(f"ark simulate: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    print(f"{'operation':<15} {'ranks':>5} {'bytes':>14} {'us':>12} {'GB/s':>8}  algorithm, engine")
    for row in rows:
        print(
            f"{row['operation']:<15} {row['ranks']:>5} {row['bytes']:>14,} {row['us']:>12.1f} {row['gbps']:>8.1f}  "
            f"{row['algorithm']}, {row['engine']}"
        )
    return 0


def simulated(machine: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    from ark_torch.simulation import collective
    from ark_torch.simulation.network import new_environment
    from ark_torch.tools.bench.config import parse_size

    new_environment()  # checks for simpy before slow imports
    if options.engine not in (None, *collective.ENGINES):
        raise collective.BadCall(f"there is no engine {options.engine!r}; engines are {', '.join(collective.ENGINES)}")
    rows = []
    for ranks in options.ranks:
        for size in map(parse_size, options.sizes):
            one = collective.simulate(machine, options.operation, size, ranks, engine=options.engine, net=options.net)
            rows.append({
                "machine": machine.name, "operation": options.operation, "ranks": ranks, "bytes": size,
                "us": one.us, "gbps": size / one.us * 1e-3, "algorithm": one.algorithm, "engine": one.engine,
            })  # fmt: skip
    return rows


if __name__ == "__main__":
    sys.exit(main())
