"""The subcommands of `ark` (ark_torch/__main__.py), and compile_kernels for development."""

import sys

from ark_torch import _autoload
from ark_torch.__main__ import COMMANDS

_name = _autoload.program().removeprefix("ark_torch.tools.")
# else `python -m ark_torch.tools.doctor` would silently do nothing
if _name in COMMANDS and _autoload.program() != _name:
    sys.exit(f"ark_torch.tools.{_name} is no program: use `ark {_name}`, or `python -m ark_torch {_name}`.")
