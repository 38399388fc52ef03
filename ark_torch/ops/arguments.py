"""What the operators' public functions check before C++ does: the group, and what is no tensor.

C++ checks the rest and tells the other ranks of it; they know of an error that is raised here by their timeout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import _resolve_group_name
from torch.distributed.device_mesh import DeviceMesh

Group: TypeAlias = dist.ProcessGroup | DeviceMesh | tuple[DeviceMesh, int] | str | None


def name_of(group: Group, operator: str) -> str:
    """The name of a group in any of PyTorch's forms; None: the default group."""
    given: Any = dist.distributed_c10d._get_default_group() if group is None else group
    if torch.compiler.is_compiling():
        return str(_resolve_group_name(given, ""))
    try:
        name = _resolve_group_name(given, "")
        if isinstance(given, str):
            dist.distributed_c10d._resolve_process_group(name)
    except Exception as error:
        why = str(error).partition("\n")[0]
        raise ValueError(
            f"ark: [rank {dist.get_rank()}] {operator}: group is {given!r} ({why}). Pass a process group, its name, "
            "a device mesh of one dimension, a mesh and the number of a dimension, or None."
        ) from error
    return str(name)


def check_tensors(operator: str, **given: Any) -> None:
    for name, value in given.items():
        if not isinstance(value, Tensor):
            _refuse(operator, name, value, "Pass a tensor")


def tensors_of(operator: str, name: str, given: Sequence[Tensor]) -> list[Tensor]:
    listed = isinstance(given, Sequence)
    if not listed or not all(isinstance(one, Tensor) for one in given):
        wrong = next(one for one in given if not isinstance(one, Tensor)) if listed else given
        _refuse(operator, f"an entry of {name}" if listed else name, wrong, "Pass a list of tensors, one a table")
    return list(given)


def _refuse(operator: str, name: str, value: Any, remedy: str) -> None:
    raise TypeError(f"ark: [rank {dist.get_rank()}] {operator}: {name} is of type {type(value).__name__}. {remedy}.")
