"""What the ranks of a group train, in words: before the first step all ranks compare it.

Ranks with other rates or options would train other weights without a word; with other parameters, wait for each other.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ark_torch.train import optimizers
from ark_torch.train.models import Subject
from ark_torch.train.reasons import is_plain
from ark_torch.train.step import Step


def facts_of(step: Step, options: dict[str, str]) -> dict[str, str]:
    """Facts that must be equal on all ranks, by their names in a message; `options`: those of capture()."""
    subject = step.subject
    facts = {"the device type": subject.device.type}
    optimizer = {"optimizer": type(step.optimizer).__name__}
    if subject.pipeline is not None:  # each rank has different parameters, which may have rates of their own
        facts |= subject.pipeline.facts() | optimizer
    else:
        facts["the number of trained parameters"] = str(len(subject.averaged()))
        for name, p in subject.averaged():
            facts[f"parameter {name!r}"] = _form(p)
        if subject.averages:
            frozen = {name: p for name, p in subject.module.named_parameters() if not p.requires_grad}
            facts |= {f"frozen parameter {name!r}": _form(p) for name, p in frozen.items() if subject.copies(name)}
        facts |= optimizer | _groups(subject, step.optimizer)
    scaler = step.scaler
    facts["scaler"] = "none" if scaler is None else "given" if step.scales else "given, with enabled=False"
    if step.scales:
        facts["the scaler's scale"] = repr(scaler.get_scale())
        facts |= {f"the {name}": repr(value) for name, value in optimizers.of_scaler(scaler)}
    return facts | {"max_norm": str(step.max_norm)} | options


def of_buffers(subject: Subject) -> dict[str, str]:
    """Facts about the buffers that capture() copies from the first rank."""
    if not subject.averages or subject.ddp is not None:
        return {}
    return {f"buffer {name!r}": _form(b) for name, b in subject.module.named_buffers() if subject.copies(name)}


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _groups(subject: Subject, optimizer: Any) -> dict[str, str]:
    averaged = {id(p) for _, p in subject.averaged()}  # others may differ by rank
    facts = {"the number of the optimizer's param_groups": str(len(optimizer.param_groups))}
    for number, group in enumerate(optimizer.param_groups):
        where = f"param_groups[{number}]"
        facts[f"the number of parameters in {where}"] = str(sum(id(p) in averaged for p in group["params"]))
        for name in optimizer.defaults:
            value = group.get(name)
            if isinstance(value, Tensor) and value.numel() == 1:
                value = value.item()
            if name != "params" and (value is None or is_plain(value)):
                facts[f"{where}[{name!r}]"] = repr(value)
    return facts
