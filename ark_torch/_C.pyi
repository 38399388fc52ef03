"""Types of the extension (csrc/bindings.cpp)."""

import enum
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# (collective, algorithm, when, max_ranks, max_bytes, chunk_bytes)
Rule = tuple[str, str, str, int, int, int]

class Options(dist.Backend.Options):  # type: ignore[name-defined,misc]
    class SharedMemory(enum.Enum):
        AUTO = 0
        ON = 1
        OFF = 2

    shared_memory: SharedMemory
    debug: bool
    spin_us: int
    buffer_mb: int
    flight_record: int
    flight_dump: str
    global_rank: int
    make_carrier: Callable[[Any, int, int, timedelta], Any]
    make_cuda_carrier: Callable[[Any, int, int, timedelta], Any]
    before_cuda: Callable[[], None]
    log: Callable[[str], None]
    dispatch: list[Rule]
    cuda_dispatch: list[tuple[int, dict[str, int]]]
    group_name: str
    global_ranks_in_group: list[int]
    _timeout: timedelta
    def __init__(self) -> None: ...
    def __copy__(self) -> Options: ...
    def __deepcopy__(self, memo: dict[int, Any]) -> Options: ...

class ProcessGroupArk(dist.Backend):  # type: ignore[misc]
    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None: ...
    @property
    def shares_memory(self) -> bool: ...
    @property
    def cuda_carrier(self) -> str: ...
    @property
    def cuda_shared_bytes(self) -> int: ...
    @property
    def options(self) -> Options: ...
    def get_error(self) -> Any: ...
    def perform_nocolor_split(self, device: Any = None) -> None: ...
    def _set_sequence_number_for_group(self) -> None: ...

def _flight_record_json() -> str: ...
def _flight_record_dump(path: str) -> Any: ...
def _shutdown_all_groups(patience_ms: int) -> None: ...
def _default_dispatch() -> list[Rule]: ...
def _default_cuda_dispatch(size: int) -> dict[str, int]: ...
def _reduce_isa() -> str: ...

class _JitSettings:
    version: str
    kernels_dir: str
    cache_dir: str
    prebuilt_dir: str
    nvrtc: str
    library_roots: list[str]
    toolkit_dirs: list[str]
    options: list[str]
    log: Callable[[str], None]
    def __init__(self) -> None: ...

def _configure_jit(settings: _JitSettings) -> None: ...
def _has_cuda_driver() -> bool: ...
def _probe_device(device: int, bytes: int = ...) -> dict[str, Any]: ...

# (name, text, oldest architecture)
def _kernel_stubs(sizes: list[int] = ...) -> list[tuple[str, str, int]]: ...

# what a wheel brings, compiled by nvcc (build_backend/ark_aot.py)
def _prebuilt_options(arch: str) -> list[str]: ...
def _store_prebuilt(folder: str, compiler: str, stub: str, arch: str, cubin: bytes, log: str) -> None: ...

# (version, path)
def _nvrtc() -> tuple[str, str]: ...

# the cubin; of each kernel: name, registers, bytes spilled, bytes of stack
def _compile_kernel(stub: str, arch: str, cached: bool = False) -> tuple[bytes, list[tuple[str, int, int, int]]]: ...
