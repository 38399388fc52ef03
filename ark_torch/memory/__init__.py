"""GPU memory that the ranks of a machine can share, for tensors that collectives read and write in place.

```python
with torch.cuda.use_mem_pool(ark_torch.memory.pool()):
    bucket = torch.empty(64 << 20, dtype=torch.bfloat16, device="cuda")
ark_torch.distributed.register(bucket)  # collective, once
dist.all_reduce(bucket)                 # no copy into staging memory, here and in all later calls
```
Tensors of the pool behave like any others, also in programs that never register them.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["allocator", "pool"]

_pools: dict[int, torch.cuda.MemPool] = {}
_lock = threading.Lock()


def pool(device: int | str | torch.device | None = None) -> torch.cuda.MemPool:
    """The device's pool, whose tensors `ark_torch.distributed.register` accepts; every call returns the same pool.

    Args:
        device: a CUDA device; None: the current one.

    Raises:
        RuntimeError: this PyTorch or this machine has no CUDA.
        ValueError: the device is not a CUDA device.

    Example:
        >>> with torch.cuda.use_mem_pool(ark_torch.memory.pool()):
        ...     bucket = torch.empty(64 << 20, device="cuda")
    """
    import torch

    index = _index_of(device)
    with _lock:
        if index not in _pools:
            with torch.cuda.device(index):
                made = torch.cuda.MemPool(allocator())
            # The pool lives as long as the process: torch aborts if a pool dies before its users, such as a graph
            # captured with it, and their order at exit is undefined.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
            _pools[index] = made
        return _pools[index]


def empty(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Implements a group's allocate_tensor(), which FSDP2 calls: an uninitialized tensor from the device's pool."""
    import torch

    with torch.cuda.use_mem_pool(pool(device), device):
        return torch.empty(size, dtype=dtype, device=device)


@functools.cache
def allocator() -> Any:
    """The pools' allocator, for `torch.cuda.MemPool(...)`; also a group's `mem_allocator`."""
    import torch

    from ark_torch import _C

    _need_cuda()
    loaded = torch.cuda.memory.CUDAPluggableAllocator(_C.__file__, "ark_pool_alloc", "ark_pool_free")
    return loaded.allocator()  # type: ignore[no-untyped-call]


def _need_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        why = "this PyTorch is built without CUDA" if torch.version.cuda is None else "PyTorch finds no usable GPU"
        raise RuntimeError(
            f"ark: a pool of shareable memory needs CUDA, and {why}: use it on machines with GPUs only "
            "(if torch.cuda.is_available())."
        )


def _index_of(device: int | str | torch.device | None) -> int:
    import torch

    if device is not None and not isinstance(device, int):
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"ark: device is {device}: a pool of shareable memory is on a CUDA device.")
        device = device.index
    _need_cuda()
    index = torch.cuda.current_device() if device is None else device
    if not 0 <= index < torch.cuda.device_count():
        raise ValueError(f"ark: device is cuda:{index}, and there are {torch.cuda.device_count()} devices.")
    return index
