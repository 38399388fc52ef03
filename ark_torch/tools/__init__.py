"""Tools: the subcommands of `ark` (ark_torch/__main__.py), and compile_kernels for work on the package."""

import sys

from ark_torch import _autoload
from ark_torch.__main__ import COMMANDS

_name = _autoload.program().removeprefix("ark_torch.tools.")
if _name in COMMANDS and _autoload.program() != _name:  # or `python -m ark_torch.tools.doctor` would do nothing
    sys.exit(f"ark_torch.tools.{_name} is no program: use `ark {_name}`, or `python -m ark_torch {_name}`.")
