"""Analyzes a model: who averages its gradients, over which group, and whether a graph can capture it.

A plain module and DistributedDataParallel use our own buckets (buckets.py); FSDP2 and tensor-parallel modules
communicate by themselves. A model with host state that a graph cannot repeat runs eagerly, with the reason.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

if TYPE_CHECKING:
    from ark_torch.distributed.compression import State
    from ark_torch.train.pipeline import Pipeline


@dataclass
class Subject:
    """A model and its properties."""

    module: nn.Module  # passed to loss()
    device: torch.device
    group: Any = None  # its ranks run the same steps; None: this process alone
    averages: bool = False  # whether our buckets average the gradients
    ddp: DistributedDataParallel | None = None  # the wrapper whose reducer the buckets replace
    compression: State | None = None  # of the wrapper's compression hook: the buckets compress by it
    sharded: list[Any] = field(default_factory=list)  # FSDP2 modules
    pipeline: Pipeline | None = None  # the module is then this rank's stages
    reason: str = ""  # why it cannot be captured
    ignored: frozenset[str] = frozenset()  # parameters that are not averaged
    apart: tuple[str, ...] = ()  # prefixes ("name.") of modules that differ by rank

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The trained parameters, by name."""
        return [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]

    def averaged(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.parameters() if name not in self.ignored]

    def copies(self, name: str) -> bool:
        """Whether a parameter or buffer of this name is the same on all ranks: the first rank's is copied to them."""
        return name not in self.ignored and not name.startswith(self.apart)

    def communicates(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Context of a micro-batch: models that communicate by themselves do so only in the last one."""
        for module in self.sharded:
            module.set_requires_gradient_sync(last, recurse=False)
        if not last and isinstance(self.module, DistributedDataParallel):
            return self.module.no_sync()
        return contextlib.nullcontext()

    def before_forward(self) -> None:
        """Like DDP before a step: broadcasts rank 0's buffers, such as running statistics."""
        if self.ddp is not None and self.group is not None and self.ddp.broadcast_buffers and self.ddp.modules_buffers:
            self.ddp._sync_buffers()  # type: ignore[no-untyped-call]


def take_apart(model: Any, group: Any) -> Subject:
    """Raises TypeError or ValueError if the model or the group cannot be trained."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"ark: train.capture: model is a {type(model).__name__}: pass a torch.nn.Module.")
    if isinstance(model, DataParallel):
        raise ValueError("ark: train.capture: model is a DataParallel: use a rank for each GPU and pass model.module.")
    device = device_of(model)
    ddp = model if isinstance(model, DistributedDataParallel) else None
    if ddp is not None:
        if group is not None and group is not ddp.process_group:
            raise ValueError("ark: train.capture: group is not that of the DistributedDataParallel: leave it out.")
        subject = Subject(ddp, device, ddp.process_group, reason=_why_as_it_is(ddp))
        if not subject.reason:
            subject.module, subject.ddp, subject.averages = ddp.module, ddp, True
            subject.compression = _compression_of(ddp)
            _leave_apart(subject, frozenset(ddp.parameters_to_ignore))
        return of_several(subject)
    inner = getattr(model, "_orig_mod", None)
    if isinstance(inner, DistributedDataParallel):
        reason = "a compiled DistributedDataParallel splits its graph for its own buckets: wrap the compiled module"
        return of_several(Subject(model, device, inner.process_group, reason=reason))
    subject = Subject(model, device, _group_of(group), reason=_why_not_fsdp1(model))
    subject.sharded = _sharded(model)
    subject.reason = subject.reason or _why_not_sharded(subject.sharded)
    own = bool(subject.sharded) or any(isinstance(p, DTensor) for p in model.parameters())
    subject.averages = not subject.reason and not subject.sharded and (not own or group is not None)
    _leave_apart(subject, frozenset())
    return of_several(subject)


def _leave_apart(subject: Subject, ignored: frozenset[str]) -> None:
    """Excludes sharded embedding tables: their gradients are already averaged, and their weights differ by rank."""
    from ark_torch.nn import ShardedEmbeddingBags

    modules = subject.module.named_modules()
    subject.apart = tuple(f"{name}." if name else "" for name, one in modules if isinstance(one, ShardedEmbeddingBags))
    names = (name for name, _ in subject.module.named_parameters() if _is_apart(subject, name))
    subject.ignored = ignored.union(names)


def check_apart(subject: Subject, clips: bool, scales: bool) -> None:
    """Raises ValueError if a step would treat such tables differently from their module."""
    trained = [name for name, _ in subject.parameters() if _is_apart(subject, name)]
    several = subject.group is not None
    if clips and trained and several:
        raise ValueError(
            f"ark: train.capture: max_norm is given, and {trained[0]!r} is of a ShardedEmbeddingBags, of which each "
            "rank has other tables: norms would differ by rank. Leave max_norm out, or update tables in place "
            "(optimizer_class=)."
        )
    of_tables = [one for one in subject.module.modules() if getattr(one, "optimizer", None) is not None]
    if scales and subject.apart and of_tables:
        raise ValueError(
            "ark: train.capture: scaler is given, and the model has a ShardedEmbeddingBags that updates tables in the "
            "backward pass, with gradients that are still scaled. Train in bfloat16 without a scaler, or leave "
            "optimizer_class out."
        )


def _is_apart(subject: Subject, name: str) -> bool:
    return any(name.startswith(prefix) for prefix in subject.apart)


def of_several(subject: Subject) -> Subject:
    if subject.group is not None and dist.get_world_size(subject.group) < 2:
        subject.group, subject.averages = None, False
    return subject


def _group_of(group: Any) -> Any:
    if group is None:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if not isinstance(group, dist.ProcessGroup):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("ark: train.capture: this process is not a member of group: call it on its ranks only.")
        raise TypeError(f"ark: train.capture: group is a {type(group).__name__}: pass what dist.new_group() returns.")
    return group


def device_of(model: nn.Module) -> torch.device:
    lazy = [name for name, p in model.named_parameters() if isinstance(p, nn.UninitializedParameter)]
    if lazy:
        raise ValueError(
            f"ark: train.capture: the shape of parameter {lazy[0]!r} is not known before the model's first call: call "
            "it once with a batch, then make the optimizer, then capture()."
        )
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("ark: train.capture: model has no parameter that requires a gradient: nothing to train.")
    devices = sorted({str(p.device) for p in parameters})
    if len(devices) > 1:
        raise ValueError(f"ark: train.capture: model lies on {' and '.join(devices)}: one device for each rank.")
    device = parameters[0].device
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"ark: train.capture: model lies on {device}: move it to a CPU or CUDA device first.")
    return device


def _compression_of(ddp: DistributedDataParallel) -> State | None:
    """The state of ark's compression hook, if that is registered."""
    from ark_torch.distributed import compression

    for hook, state in ddp._comm_hooks:
        if hook is compression.hook:
            assert isinstance(state, compression.State)
            return state
    return None


def _why_not_compressed(state: State) -> str:
    """Why gradients are compressed by the hook itself, in eager steps; "" if a graph can do it."""
    on_host = {
        "rounding='stochastic' draws random numbers, which a graph would repeat": state.rounding == "stochastic",
        "bits=Auto() reads gradients on the host": state.auto is not None,
        "when='faster' measures on the host": state.when != "always",
        "skip_zeros=True reads on the host which layers are zero": bool(state.skip_zeros),
    }
    return next((f"compression.State: {why}" for why, it_does in on_host.items() if it_does), "")


def _why_as_it_is(ddp: DistributedDataParallel) -> str:
    compresses = _compression_of(ddp)
    if compresses is not None and (why := _why_not_compressed(compresses)):
        return why
    if ddp._comm_hooks and compresses is None:
        name = getattr(ddp._comm_hooks[0][0], "__name__", "hook")
        return f"DistributedDataParallel has a communication hook ({name}), which is called by its own buckets"
    if ddp.mixed_precision is not None:
        return "DistributedDataParallel has mixed_precision=, which keeps events on the host"
    if ddp._delay_all_reduce_params:
        return "DistributedDataParallel delays the all_reduce of parameters"
    return ""


def _why_not_fsdp1(model: nn.Module) -> str:
    from torch.distributed.fsdp import FullyShardedDataParallel

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return "FullyShardedDataParallel (the first FSDP) waits on the host: use fully_shard"
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        return "a part of the model is a DistributedDataParallel: wrap the whole model or none of it"
    return ""


def _sharded(model: nn.Module) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _why_not_sharded(modules: list[Any]) -> str:
    from ark_torch.distributed.compression import fsdp2

    states = [state for module in modules for state in fsdp2.states_of(module)]
    return next((why for why in map(_why_not_compressed, states) if why), "")


def check_again(subject: Subject, clips: bool, scales: bool, others: bool) -> None:
    """Raises ValueError if the subject cannot be trained with the modules and parameters of now; `others`: these are
    others than before."""
    device = device_of(subject.module)
    if device != subject.device:
        raise ValueError(
            f"ark: train.capture: the model has moved from {subject.device} to {device}: call capture() again."
        )
    if _sharded(subject.module) != subject.sharded:
        raise ValueError("ark: train.capture: fully_shard was called after capture(): call capture() again.")
    if others and isinstance(getattr(subject.module, "_orig_mod", subject.module), DistributedDataParallel):
        raise ValueError(
            "ark: train.capture: other parameters are trained than at capture(), which the DistributedDataParallel's "
            "own buckets do not notice: wrap the model anew, and call capture() again."
        )
    look_again(subject)
    check_apart(subject, clips, scales)


def look_again(subject: Subject) -> None:
    """Takes what depends on the modules and buffers of now."""
    if subject.ddp is not None:
        subject.ddp._assign_modules_buffers()  # type: ignore[no-untyped-call]
    if subject.pipeline is None:
        _leave_apart(subject, frozenset(subject.ddp.parameters_to_ignore) if subject.ddp is not None else frozenset())


def same_weights(subject: Subject, only: set[str] | None = None) -> None:
    """Copies a plain module's parameters and buffers from the group's first rank, as DDP does; or the parameters of
    these names, of either."""
    if not subject.averages or (subject.ddp is not None and only is None):
        return
    module = subject.module
    named = (*module.named_parameters(), *module.named_buffers())
    if only is not None:
        named = tuple((name, p) for name, p in module.named_parameters() if name in only)
    tensors = [tensor.detach() for name, tensor in named if subject.copies(name)]
    local = [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    if local:
        dist._broadcast_coalesced(subject.group, local, 250 << 20, 0)
