"""Functional collectives on ark groups: tasks of the loop kernel.

On the CPU a task is the group's own synchronous call; on a GPU its tiles exchange packets with other ranks' kernels. In
both cases the result is available when the next task reads it, so wait_tensor does nothing. In a group over several
nodes with RDMA between them, tiles of an all_reduce also ask for a NIC's writes. Collectives of other backends' groups
fall back.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import Node

from ark_torch.compile import analysis
from ark_torch.compile.ir import Operand, Strided, Unsupported, scalar_type
from ark_torch.compile.lowering import Lowering, contiguous_strides, lowers

functional = torch.ops._c10d_functional


def resolved(name: Any, device: torch.device, over_nodes: bool = False) -> dist.ProcessGroup:
    """A process group whose tensors on the device are carried by an ark group. Regions look it up by name at run time,
    so that a group that was destroyed and made again is found. `over_nodes`: GPU tensors may have to go to other nodes,
    if regions reach them."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    from ark_torch import _C

    group = _resolve_process_group(name) if isinstance(name, str) else name  # type: ignore[arg-type]
    if not isinstance(group, dist.ProcessGroup):
        raise Unsupported(f"a collective on {name!r}, which is no process group")
    backend = group._get_backend(torch.device(device.type))
    if not isinstance(backend, _C.ProcessGroupArk):
        kind = backend.name() if hasattr(backend, "name") else type(backend).__name__
        raise Unsupported(f"a collective on a group of backend {kind}, not ark")
    if device.type != "cpu" and backend.cuda_carrier not in ("", "ark"):
        raise Unsupported(f"a collective on a group whose GPU tensors are carried by {backend.cuda_carrier}")
    if device.type != "cpu" and not backend.shares_memory:
        nodes, why = backend.regions_over_nodes() if over_nodes else (0, "fused operators take groups on one")
        if nodes == 0:
            raise _unreached(why)
    return group


def _unreached(why: str) -> Unsupported:
    return Unsupported(f"a collective on a group over several nodes, which a loop kernel's tasks do not reach: {why}")


def _collective(low: Lowering, node: Node, op: str, group: Any, **attributes: Any) -> Operand:
    return _run(low, op, group, low.operand(node.args[0]), low.result(node), **attributes)


def _coalesced(low: Lowering, node: Node, op: str, group: Any, **attributes: Any) -> tuple[Operand, ...]:
    """Lowers a coalesced collective one by one: within a kernel none of them costs a launch."""
    sources: Any = node.args[0]
    return tuple(
        _run(low, op, group, low.operand(source), low.result(node, i), **attributes) for i, source in enumerate(sources)
    )


def _run(low: Lowering, op: str, group: Any, given: Operand, out: Strided, **attributes: Any) -> Operand:
    known = resolved(group, low.device, over_nodes=True)
    index = low.group(known.group_name)
    source = low.stored(given)
    if not source.same_place(source._replace(strides=contiguous_strides(source.shape))):
        source = low.copy(source, low.fresh(source.dtype, source.shape))
    if out.strides != contiguous_strides(out.shape):
        raise Unsupported("a collective whose result is not contiguous")
    if low.device.type != "cpu":
        from ark_torch import _C

        backend: Any = known._get_backend(torch.device(low.device.type))
        nodes, _ = backend.regions_over_nodes()
        if nodes > 1:
            name, size = scalar_type(source.dtype)
            how = (op, attributes.get("reduce_op", ""), name, math.prod(source.shape) * size)
            if why := _C.plan.why_not_over_nodes(*how, nodes, known.size() // nodes):
                raise _unreached(why)
            attributes["nodes"] = nodes
    return low.node(op, [source], out, group=index, ranks=known.size(), **attributes)


@lowers(functional.all_reduce.default)
def all_reduce(low: Lowering, node: Node) -> Operand:
    return _collective(low, node, "all_reduce", node.args[2], reduce_op=str(node.args[1]))


@lowers(functional.all_gather_into_tensor.default)
def all_gather(low: Lowering, node: Node) -> Operand:
    return _collective(low, node, "all_gather", node.args[2])


@lowers(functional.reduce_scatter_tensor.default)
def reduce_scatter(low: Lowering, node: Node) -> Operand:
    return _collective(low, node, "reduce_scatter", node.args[3], reduce_op=str(node.args[1]))


@lowers(functional.all_to_all_single.default)
def all_to_all(low: Lowering, node: Node) -> Operand:
    output_splits, input_splits = (list(node.args[i]) for i in (1, 2))  # type: ignore[arg-type]
    if any(not isinstance(n, int) for n in (*output_splits, *input_splits)):
        raise Unsupported("an all_to_all of sizes that are computed in the graph")
    return _collective(low, node, "all_to_all", node.args[3], output_splits=output_splits, input_splits=input_splits)


@lowers(functional.all_reduce_coalesced.default)
def all_reduce_coalesced(low: Lowering, node: Node) -> tuple[Operand, ...]:
    return _coalesced(low, node, "all_reduce", node.args[2], reduce_op=str(node.args[1]))


@lowers(functional.all_gather_into_tensor_coalesced.default)
def all_gather_coalesced(low: Lowering, node: Node) -> tuple[Operand, ...]:
    return _coalesced(low, node, "all_gather", node.args[2])


@lowers(functional.reduce_scatter_tensor_coalesced.default)
def reduce_scatter_coalesced(low: Lowering, node: Node) -> tuple[Operand, ...]:
    return _coalesced(low, node, "reduce_scatter", node.args[3], reduce_op=str(node.args[1]))


@lowers(functional.wait_tensor.default)
def wait_tensor(low: Lowering, node: Node) -> Operand:
    source = node.args[0]
    assert isinstance(source, Node)
    started = analysis.producer_of(analysis.root_of(source))
    if started.target not in COLLECTIVES:
        raise Unsupported("a wait for what no collective of the graph has made")
    resolved(started.args[COLLECTIVES[started.target]], low.device, over_nodes=True)
    return low.operand(source)


# The position of the group among the arguments.
COLLECTIVES = {
    functional.all_reduce.default: 2,
    functional.all_gather_into_tensor.default: 2,
    functional.reduce_scatter_tensor.default: 3,
    functional.all_to_all_single.default: 3,
    functional.all_reduce_coalesced.default: 2,
    functional.all_gather_into_tensor_coalesced.default: 2,
    functional.reduce_scatter_tensor_coalesced.default: 3,
}
