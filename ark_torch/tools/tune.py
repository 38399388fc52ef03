"""`ark tune`: measures which algorithms suit this machine and writes them as a dispatch table.

ARK_DISPATCH=FILE selects the table; every rank of a group uses rank 0's. _tune_cpu.py measures for CPU tensors,
_tune_cuda.py for CUDA tensors; each keeps the other's rules in the same file. With --costs it measures instead what
work costs in compiled regions on a GPU (_tune_costs.py), which is kept in the cache folder.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

DESCRIPTION = """\
Measure which algorithm and chunk size are fastest on this machine, for every collective and size, and write a dispatch
table. Run it on an idle machine, with as many ranks as the jobs will have, then set ARK_DISPATCH to the file.
With --costs: measure what work costs in the loop kernels of torch.compile(backend="ark") on this machine's first GPU,
and keep that in the cache folder, where plans find it. (A CPU's costs are measured at the first compilation.)
"""
EXAMPLES = """\
examples:
  ark tune                                  collectives on CPU tensors, 2 ranks
  ark tune --ranks 8 --output node.json     the same, 8 ranks
  ark tune --cuda                           collectives on CUDA tensors, one rank for each GPU
  ARK_DISPATCH=node.json torchrun ...       use the table
  ark tune --costs                          compiled regions on a GPU, 2 minutes
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
    add("--costs", action="store_true", help="measure what work costs in compiled regions on one GPU")
    add("--no-caches", action="store_true", help="with --costs: leave out cache policies, which take most of the time")
    add("--samples", default="", metavar="FILE", help="with --costs: also write what the figures are made of")
    add(
        "--output",
        metavar="FILE",
        help="file to write (default: ark-dispatch.json; with --costs: in the cache folder, the only place where plans "
        "look)",
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs `ark tune`; returns the exit code."""
    parser = make_parser()
    options = parser.parse_args(arguments)

    from ark_torch import _autoload, _suggest

    _autoload.ready()
    import torch
    import torch.multiprocessing as mp

    from ark_torch.tools import _tune_costs, _tune_cpu, _tune_cuda

    if not options.costs and (options.no_caches or options.samples):
        parser.error("--no-caches and --samples go with --costs")
    if options.costs:
        if options.cuda or options.ranks is not None or options.only:
            parser.error("--costs takes neither --cuda nor --ranks nor --only")
        if not torch.cuda.is_available():
            parser.error("--costs needs a GPU, and PyTorch sees none; a CPU is measured at the first compilation")
        device = torch.device("cuda", torch.cuda.current_device())
        return _tune_costs.tune(device, not options.no_caches, options.samples, options.output or "")
    options.output = options.output or "ark-dispatch.json"
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
