"""Registers tensors with a group, so that its collectives use them in place, without staging memory.

Registration is collective: it maps every rank's memory into the others, which takes milliseconds the first time. It
pays off only for tensors that are used repeatedly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

__all__ = ["deregister", "register"]


def register(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> bool:
    """Lets the collectives of a group read and write this tensor's memory in place, on all ranks together.

    Every rank passes a contiguous CUDA tensor of the same number of bytes, allocated from `ark_torch.memory.pool()`.
    From then on any tensor in that memory, slices included, is used in place; results have the same bits either way.
    Large collectives (on two GPUs all_reduce from 128 MB, in captured training steps from 24 MB, and all_gather from 64
    MB per rank) use copy engines, and for those all ranks must pass the same part of memory that was registered
    together: otherwise the group fails and names a rank. As with a collective, no other thread may run collectives of
    the group during the call.

    The memory stays mapped until `deregister` or the end of the group, even if the tensor is freed earlier: PyTorch may
    then reuse the memory for other tensors of the pool, but cannot return it to the device.

    Args:
        tensor: this rank's tensor.
        group: the group; None: the default one.

    Returns:
        True if the memory is registered. False, on all ranks, if ark does not carry the group's CUDA tensors (NCCL
        does, or ARK_DISABLE is set); nothing was done.

    Raises:
        ValueError: a rank's tensor is not on a GPU, not contiguous, empty or not from the pool, or a rank is capturing
            a graph; raised on every rank, naming the rank and the remedy.
        TypeError: a rank passed an object that is not a tensor.
        torch.distributed.DistBackendError: the ranks' tensors differ in bytes, or a rank could not map another's
            memory.

    Example:
        >>> with torch.cuda.use_mem_pool(ark_torch.memory.pool()):
        ...     bucket = torch.zeros(64 << 20, dtype=torch.bfloat16, device="cuda")
        >>> ark_torch.distributed.register(bucket)
        True
        >>> dist.all_reduce(bucket)
    """
    backend = _backend_of(group)
    return backend is not None and bool(backend._register_memory(_tensor(tensor)))


def deregister(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Ends the registration of exactly this range of memory, on all ranks together.

    Waits until the device has finished all enqueued work. Graphs captured during the registration must not be replayed
    afterwards. If the range was registered several times, the newest registration ends.

    Args:
        tensor: the registered tensor, or another with the same memory and size.
        group: the group that it was registered with; None: the default one.

    Raises:
        ValueError: a rank's tensor is not registered with this group; raised on every rank.
        torch.distributed.DistBackendError: ranks passed tensors that were not registered together.
    """
    backend = _backend_of(group)
    if backend is not None:
        backend._deregister_memory(_tensor(tensor))


def register_pool(backend: Any, pool: torch.cuda.MemPool) -> None:
    """Implements a group's register_mem_pool(): registers the pool's current segments."""
    import torch

    device = torch.device("cuda", torch.cuda.current_device())
    snapshot = pool.snapshot()  # type: ignore[no-untyped-call]
    segments = [(one["address"], one["total_size"]) for one in snapshot if one["device"] == device.index]
    backend._register_pool(pool.id, device, segments)


def deregister_pool(backend: Any, pool: torch.cuda.MemPool) -> None:
    """Implements a group's deregister_mem_pool()."""
    backend._deregister_pool(pool.id)


def _tensor(tensor: Any) -> torch.Tensor | None:
    """None for an object that is not a tensor: all ranks report it, instead of one that raises while the others
    wait."""
    import torch

    return tensor if isinstance(tensor, torch.Tensor) else None


def _backend_of(group: dist.ProcessGroup | None) -> Any:
    """The group's ark backend; None if ARK_DISABLE has replaced it."""
    import torch
    import torch.distributed as dist

    from ark_torch import _C, env

    group = group or dist.distributed_c10d._get_default_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError("ark: this process is not a member of the group: call it on the group's ranks only.")
    backend: Any = group._get_backend(torch.device("cuda"))
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
    if isinstance(backend, _C.ProcessGroupArk):
        return backend
    if env.read().disable:
        return None
    raise ValueError(
        f"ark: the group's CUDA tensors are carried by {backend.name()!r}: only groups of the backend 'ark' (or "
        "'cuda:ark') register memory."
    )
