"""The command `ark`, also `python -m ark_torch`: one subcommand per tool, each with its own --help.

Neither this module nor the subcommands' argument parsers import torch, so that help appears at once and `ark doctor`
runs where PyTorch does not.
"""

from __future__ import annotations

import argparse
import importlib
import sys

from ark_torch import _suggest
from ark_torch._version import __version__
from ark_torch.errors import IncompatibleTorch

# name: (module with main(arguments) -> exit code, what it does)
COMMANDS = {
    "doctor": ("ark_torch.tools.doctor", "check what works on this machine, what does not, and why"),
    "bench": ("ark_torch.tools.bench.cli", "measure collectives beside Gloo and MPI, in the columns of nccl-tests"),
    "tune": ("ark_torch.tools.tune", "measure which algorithm suits this machine; writes the table for ARK_DISPATCH"),
    "simulate": (
        "ark_torch.tools.simulate",
        "estimate collectives on up to 4,096 ranks, by a model fitted to measurements",
    ),
    "explain": ("ark_torch.tools.explain", 'show what torch.compile(backend="ark") makes of a model, as text or HTML'),
    "trace": ("ark_torch.tools.trace", "summarise, merge and draw the timelines that ARK_TRACE writes"),
    "flight": ("ark_torch.tools.flight", "find the rank that is behind, from the records that ARK_FLIGHT_DUMP writes"),
}


def make_parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {does}" for name, (_, does) in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="ark",
        usage="ark [--help] [--version] COMMAND ...",
        description='Tools for the PyTorch backend "ark".\n\ncommands:\n' + "\n".join(lines),
        epilog="`ark COMMAND --help` lists the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ark_torch {__version__}")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code; 2 means a usage error."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = make_parser()
    if not arguments or arguments[0].startswith("-"):
        parser.parse_args(arguments)  # exits on --help, --version and unknown options
        parser.print_help(sys.stderr)
        return 2
    name, *rest = arguments
    if name not in COMMANDS:
        parser.error(f"there is no command {name!r}{_suggest.did_you_mean(name, COMMANDS)}; see ark --help")
    tool = importlib.import_module(COMMANDS[name][0])
    try:
        code: int = tool.main(rest)
    except IncompatibleTorch as error:
        print(f"ark {name}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print(f"ark {name}: PyTorch is not installed for {sys.executable}; `ark doctor` says more.", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
