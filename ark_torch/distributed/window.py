"""One-sided windows: memory of every rank that the others write to, without a receive.

PyTorch has them since 2.14 (`torch.distributed._new_window`); here they serve every version that ark_torch does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

__all__ = ["new_window", "supports_window"]


def supports_window(group: dist.ProcessGroup | None = None) -> bool:
    """Whether a group has one-sided windows: its ranks share memory, or RDMA connects its nodes (docs/rdma.md)."""
    return bool(_backend_of(group).supports_window)


def new_window(tensor: torch.Tensor | None = None, group: dist.ProcessGroup | None = None) -> Any:
    """Makes a window of a group, on all its ranks together and in the same order.

    Registering a tensor moves its storage into memory that the other ranks of the machine can map, as share_memory_()
    does: the tensor and its views stay valid, addresses taken before (data_ptr(), numpy()) do not. Sizes may differ
    between ranks, dtypes as well; the methods, PyTorch's, are:

    - `put(tensor, dst_rank, target_offset_nelems, async_op)` writes a tensor into that rank's window. The work is done
      when the bytes are there. It sends no signal.
    - `signal(peer_rank, async_op)` tells that rank, behind what was put before.
    - `wait_signal(peer_rank, async_op)` waits for that rank's next signal; what it put before is then here.
    - `map_remote_tensor(rank)`: a rank's window as a flat tensor, where that rank is on the same machine.
    - `tensor_register(tensor, owning=True)` and `tensor_deregister()`, on all ranks together. Without the latter the
      memory stays registered as long as the group lives.

    A wait that times out, or whose rank is lost, raises an error that names it and ends the group, as in a collective.

    Args:
        tensor: a contiguous CPU tensor of PyTorch's own memory; where RDMA reaches GPU memory and each rank is alone on
            its machine, also a CUDA tensor. None: `tensor_register` follows.
        group: the group; None: the default one.

    Returns:
        The window (PyTorch's `Window` since 2.14).

    Raises:
        ValueError: a rank's tensor cannot be registered; on every rank, with what to do.
        torch.distributed.DistBackendError: Gloo carries the group between machines, or a rank is lost.

    Example:
        >>> inbox = torch.zeros(1024)
        >>> window = ark_torch.distributed.new_window(inbox)
        >>> window.put(torch.ones(16), 1 - rank, 0, False)
        >>> window.signal(1 - rank, False)
        >>> window.wait_signal(1 - rank, False)
        >>> inbox[:16].sum().item()
        16.0
    """
    return _backend_of(group).new_window(tensor)


def _backend_of(group: dist.ProcessGroup | None) -> Any:
    import torch
    import torch.distributed as dist

    from ark_torch import _C

    group = group or dist.distributed_c10d._get_default_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError("ark: this process is not a member of the group: call it on the group's ranks only.")
    backend: Any = group._get_backend(torch.device("cpu"))
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
    if isinstance(backend, _C.ProcessGroupArk):
        return backend
    raise ValueError(
        f"ark: the group's CPU tensors are carried by {backend.name()!r}: only groups of the backend 'ark' (or "
        "'cpu:ark') have windows here."
    )
