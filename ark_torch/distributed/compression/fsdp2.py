"""Compression for fully_shard (FSDP2): gathers parameters in 8 bits, scatters gradients in 4 with error feedback.

The scheme is QSDP's (Markov et al., 2302.02390). FSDP passes a group of parameters as one flat tensor; the position of
each parameter comes from FSDP's own list, so that rules and exact layers apply here too. Compression covers the shard
group's exchange, inside a machine and between machines, or with where="between" between them alone; HSDP's reduction
between replicas is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ark_torch.distributed.compression import exchange
from ark_torch.distributed.compression.layers import Layer
from ark_torch.distributed.compression.plan import plan_of, segments_of
from ark_torch.distributed.compression.rules import check_bits
from ark_torch.distributed.compression.state import COMPRESSED_DTYPES, State

try:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
except ImportError:  # fsdp() reports it
    AllGather = ReduceScatter = object  # type: ignore[assignment,misc]


def fsdp(module: nn.Module, state: State | None = None, *, parameters: int | None = 8) -> State:
    """Compresses the exchanges of fully_shard for `module` and the FSDP modules below it. All ranks call it.

    Call it after the last fully_shard and before the first forward pass. Master weights stay exact. Forward and
    backward see the gathered, quantized parameters: the same bits on all ranks and in both passes.

    Args:
        module: a module to which, or below which, fully_shard was applied.
        state: bits, bucket, rules and error feedback of gradients; None: State(bits=4). `bits` must be a number, and
            `when` must be "always". Error feedback keeps a float32 for every element of the *unsharded* gradients on
            each rank: disable it (error_feedback=False) if you shard to save memory.
        parameters: bits of gathered parameters, 1 to 8; layers that are exact in the state are exact here, too. None:
            exact.

    Returns:
        The state. Its `bytes_sent` counts parameters and gradients; save its `state_dict()` with a checkpoint.

    Raises:
        TypeError: `module` contains no FSDP module, or an argument has the wrong type.
        ValueError: an argument is out of range, or a shard group is not ark's (raised by the first forward pass).
        RuntimeError: this PyTorch has no set_custom_all_gather.

    Example:
        >>> for layer in model.layers:
        ...     fully_shard(layer)
        >>> fully_shard(model)
        >>> state = ark_torch.distributed.compression.fsdp(model)
    """
    if parameters is not None:
        check_bits("parameters", parameters)
    found = [one for one in module.modules() if isinstance(one, FSDPModule)]
    if not found:
        raise TypeError("ark: fsdp: the module and those below it are not sharded: call fully_shard first.")
    if AllGather is object or not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise RuntimeError(
            f"ark: fsdp: PyTorch {torch.__version__} has no FSDPModule.set_custom_all_gather: use 2.11 or newer."
        )
    state = State(module=module) if state is None else state
    if state.auto is not None or state.when != "always":
        raise ValueError("ark: fsdp: State(bits=Auto(...)) and State(when='faster') are for DistributedDataParallel.")
    if parameters is not None and state.format == "fp8" and parameters != 8:
        raise ValueError(f"ark: fsdp: parameters is {parameters}: format='fp8' has 8 bits. Pass parameters=8.")
    names = {
        (id(owner), name): f"{prefix}.{name}" if prefix else name
        for prefix, owner in module.named_modules()
        for name, _ in owner.named_parameters(recurse=False)
    }
    for one in found:
        groups = parameter_groups(one)
        if len(groups) > 1:
            raise ValueError("ark: fsdp: a module has parameters on several meshes: its exchanges cannot be replaced.")
        for group in groups:
            state.group = group._reduce_scatter_process_group
            flat = _Flat(state, group, names)
            one.set_custom_reduce_scatter(_ReduceScatter(flat, group._reduce_scatter_comm))
            if parameters is not None:
                one.set_custom_all_gather(_AllGather(flat, group._all_gather_comm, parameters))
    return state


def states_of(module: FSDPModule) -> list[State]:
    """The states that fsdp() gave this module's exchanges."""
    comms = [getattr(group, "_reduce_scatter_comm", None) for group in parameter_groups(module)]
    return [comm._flat.state for comm in comms if isinstance(comm, _ReduceScatter)]


def parameter_groups(module: FSDPModule) -> list[Any]:
    held: Any = module._get_fsdp_state()
    several = getattr(held, "_fsdp_param_groups", None)  # 2.12 and later
    if several is not None:
        return list(several)
    return [held._fsdp_param_group] if held._fsdp_param_group is not None else []


def _compresses(state: State, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Collective in a group's first call."""
    if not state.begin(group, device):
        return False
    nodes = state.nodes_in(group, device)
    if nodes is not None and not nodes.even:
        state.say("uneven", "where='between', and nodes have unequal numbers of ranks: fsdp's exchanges are exact")
        return False
    return True


class _Flat:
    """The position of each parameter in the flat tensors of one FSDP module."""

    def __init__(self, state: State, group: Any, names: dict[tuple[int, str], str]) -> None:
        self.state, self._group, self._names = state, group, names

    def layer(self, parameter: Any) -> Layer:
        info = parameter._module_info
        name = self._names.get((id(info.module), info.param_name), info.param_name)
        layer = self.state.layers.named((id(self._group), name), name, parameter._orig_size)
        layer.movable = parameter.fsdp_placement.dim == 0
        return layer

    def gathered(self, numel: int) -> tuple[list[Layer], list[int]] | None:
        """Layers and element counts of an all-gather's input; None for another layout (extensions)."""
        parameters = self._group.fsdp_params
        sharded = [getattr(one, "_sharded_post_forward_param_data", None) for one in parameters]
        for data in ([one._sharded_param_data for one in parameters], sharded):
            numels = [one.numel() for one in data if one is not None]
            if len(numels) == len(parameters) and sum(numels) == numel:
                return [self.layer(one) for one in parameters], numels
        return None

    def scattered(self, numel: int, world: int) -> tuple[list[Layer], list[int]] | None:
        """Layers and element counts of a rank's share of gradients; None if only some parameters have a gradient."""
        parameters = [one for one in self._group.fsdp_params if one.sharded_param.requires_grad]
        numels = [one.padded_sharded_param_size.numel() for one in parameters]
        if sum(numels) * world != numel:
            return None
        return [self.layer(one) for one in parameters], numels


class _AllGather(AllGather):
    """Gathers parameters. `exact` is FSDP's original object, which also allocates."""

    def __init__(self, flat: _Flat, exact: Any, bits: int) -> None:
        self._flat, self._exact, self._bits = flat, exact, bits

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        allocated: Tensor = self._exact.allocate(size, dtype=dtype, device=device)
        return allocated

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        state = self._flat.state
        layout = self._flat.gathered(input_tensor.numel()) if input_tensor.dtype in COMPRESSED_DTYPES else None
        if layout is None or not _compresses(state, group, input_tensor.device):
            return self._exact(output_tensor, input_tensor, group=group, async_op=async_op)
        layers, numels = layout
        widths = [(self._bits if bits else 0, bucket) for bits, bucket in map(state.width, layers)]
        segments = segments_of(widths, numels, state.bucket)
        if segments.exact:
            times = exchange.times_in(state, group, input_tensor.device)
            exchange.count(state, segments, input_tensor.element_size(), times)
            return self._exact(output_tensor, input_tensor, group=group, async_op=async_op)
        output_tensor.copy_(exchange.all_gather(state, input_tensor, segments, group))
        return None


class _ReduceScatter(ReduceScatter):
    """Scatters gradients. `exact` is FSDP's original object, which also allocates."""

    def __init__(self, flat: _Flat, exact: Any) -> None:
        self._flat, self._exact = flat, exact

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        allocated: Tensor = self._exact.allocate(size, dtype=dtype, device=device)
        return allocated

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        state, world = self._flat.state, group.size()
        name = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "avg"}.get(op)
        layout = self._flat.scattered(input_tensor.numel(), world)
        usable = _compresses(state, group, input_tensor.device) and input_tensor.dtype in COMPRESSED_DTYPES
        times = exchange.times_in(state, group, input_tensor.device)
        if usable and name is None:
            state.say("divide", "gradients with a factor of their own (set_gradient_divide_factor) are sent exact")
        elif usable and layout is None:
            state.say("some", "where only some parameters of an FSDP module have gradients, they are sent exact")
        if not usable or name is None or layout is None:
            exchange.count_exact(state, output_tensor, times)
            return self._exact(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        layers, shares = layout
        plan = plan_of(state, layers, input_tensor, shares, group)
        if plan.exact:
            exchange.count(state, plan.segments, input_tensor.element_size(), times)
            return self._exact(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        if plan.slot is not None:
            state.watch.look(group.rank(), plan.slot)
        output_tensor.copy_(exchange.reduce_scatter(state, input_tensor, plan, name, group))
        return None
