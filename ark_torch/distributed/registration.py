"""Registering tensors with a group, so that its collectives use them in place, without staging memory.

Registration is collective: it maps every rank's memory into the others, which takes milliseconds the first time. What
it costs is paid once; a tensor that is used once should not be registered.
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
    Large collectives (all_reduce from 24 MB on, all_gather from 12 MB a rank on two GPUs) go by copy engines, and for
    those all ranks must pass the same place of memory that was registered together: where they do not, the group fails
    and names a rank. Like a collective, the call must not run beside other collectives of the group on other threads.

    The memory stays mapped until `deregister` or the end of the group, also when the tensor goes before: PyTorch may
    then give the same memory to other tensors of the pool, but not back to the device.

    Args:
        tensor: this rank's tensor.
        group: the group; None: the default one.

    Returns:
        True when it is registered; False, on all ranks, where ark does not carry the group's CUDA tensors (NCCL does,
        or ARK_DISABLE is set), and nothing was done.

    Raises:
        ValueError: a rank's tensor is not on a GPU, not contiguous, empty or not from the pool, or a rank captures a
            graph; on every rank, naming the rank and what to do.
        TypeError: a rank passed no tensor.
        torch.distributed.DistBackendError: the ranks' tensors differ in bytes, or one could not map another's.

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
    """Ends what `register` began for this very range of memory, on all ranks together.

    Waits until the device has done what was enqueued. Graphs that were captured while it was registered must not be
    replayed any more. Of several registrations of the range the newest ends.

    Args:
        tensor: the tensor that was registered, or another of the same memory and size.
        group: the group that it was registered with; None: the default one.

    Raises:
        ValueError: a rank's tensor is not registered with this group; on every rank.
        torch.distributed.DistBackendError: ranks passed tensors that were not registered together.
    """
    backend = _backend_of(group)
    if backend is not None:
        backend._deregister_memory(_tensor(tensor))


def register_pool(backend: Any, pool: torch.cuda.MemPool) -> None:
    """What a group's register_mem_pool() does: registers the segments that the pool has by now."""
    import torch

    device = torch.device("cuda", torch.cuda.current_device())
    snapshot = pool.snapshot()  # type: ignore[no-untyped-call]
    segments = [(one["address"], one["total_size"]) for one in snapshot if one["device"] == device.index]
    backend._register_pool(pool.id, device, segments)


def deregister_pool(backend: Any, pool: torch.cuda.MemPool) -> None:
    """What a group's deregister_mem_pool() does."""
    backend._deregister_pool(pool.id)


def _tensor(tensor: Any) -> torch.Tensor | None:
    """None for what is no tensor: told to all ranks instead of raised on one that the others then wait for."""
    import torch

    return tensor if isinstance(tensor, torch.Tensor) else None


def _backend_of(group: dist.ProcessGroup | None) -> Any:
    """The group's ark backend; None where ARK_DISABLE has put another in its place."""
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
