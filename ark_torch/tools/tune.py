"""`ark tune`: measures which algorithms suit this machine and writes them as a dispatch table.

ARK_DISPATCH=FILE selects the table; every rank of a group uses rank 0's. _tune_cpu.py measures for CPU tensors,
_tune_cuda.py for CUDA tensors; each keeps the other's rules in the same file.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

DESCRIPTION = """\
Measure which algorithm and chunk size are fastest on this machine, for every collective and size, and write a dispatch
table. Run it on an idle machine, with as many ranks as the jobs will have, then set ARK_DISPATCH to the file.
"""
EXAMPLES = """\
examples:
  ark tune                                  collectives on CPU tensors, 2 ranks
  ark tune --ranks 8 --output node.json     the same, 8 ranks
  ark tune --cuda                           collectives on CUDA tensors, one rank for each GPU
  ARK_DISPATCH=node.json torchrun ...       use the table
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ark tune", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cuda", action="store_true", help="tune for CUDA tensors, one rank for each GPU (default: CPU tensors)")
    add("--ranks", type=int, metavar="N", help="number of processes (default: 2; with --cuda: one for each GPU)")
    add("--rounds", type=int, default=7, metavar="N", help="measurements of each candidate (default: %(default)s)")
    add("--only", nargs="+", default=[], metavar="FIELD", help="with --cuda: measure these fields of the table only")
    add("--output", default="ark-dispatch.json", metavar="FILE", help="file to write (default: %(default)s)")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs `ark tune`; returns the exit code."""
    parser = make_parser()
    options = parser.parse_args(arguments)

    from ark_torch import _autoload, _suggest

    _autoload.ready()
    import torch
    import torch.multiprocessing as mp

    from ark_torch.tools import _tune_cpu, _tune_cuda

    gpus = torch.cuda.device_count() if options.cuda else 0
    if options.ranks is None:
        options.ranks = min(8, gpus) if options.cuda else 2
    if options.cuda and not 2 <= options.ranks <= gpus:
        parser.error(f"--cuda needs a GPU for each of 2 ranks or more, and this machine has {gpus}")
    if options.ranks < 2 or options.rounds < 1:
        parser.error("--ranks must be 2 or more and --rounds 1 or more")
    known = sorted(field.name for field in _tune_cuda.FIELDS)
    if options.only and not options.cuda:
        parser.error("--only goes with --cuda")
    for name in options.only:
        if name not in known:
            meant = _suggest.did_you_mean(name, known)
            parser.error(f"--only: there is no field {name!r}{meant}; fields are {', '.join(known)}")
    with tempfile.TemporaryDirectory() as folder:
        spawned: tuple[Any, ...] = (options.ranks, f"{folder}/store", options.rounds, options.output)
        if options.cuda:
            spawned += (options.only,)
        mp.spawn(_tune_cuda.tune if options.cuda else _tune_cpu.tune, spawned, options.ranks)  # type: ignore[no-untyped-call]
    return 0
