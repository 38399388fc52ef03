"""Makes the backend object of a new "ark" group; torch.distributed calls it for every group that names ark.

It reads the environment (ark_torch.env), completes the options and calls C++. Python also creates the groups that stand
in for ark: Gloo if ranks share no memory (PyTorch's wheels lack its C++ headers), and Gloo or NCCL with ARK_DISABLE.
"""

from __future__ import annotations

import atexit
import datetime
import json
import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ark_torch import env, memory
from ark_torch.distributed import locality

log = logging.getLogger("ark_torch")
if not log.handlers:
    # Shows log lines even in programs that configure no logging; they may raise the level or replace the handler.
    _handler = logging.StreamHandler()
    _handler.setFormatter(logging.Formatter("[ark] %(message)s"))
    log.addHandler(_handler)
    log.setLevel(logging.INFO)
    log.propagate = False

_at_exit = False


def create(dist_backend_opts: Any, backend_options: Any) -> Any:
    """The creator registered with torch.distributed (extended API).

    Args:
        dist_backend_opts: torch's _DistributedBackendOptions: store, group_rank, group_size, timeout, group_id and
            global_ranks_in_group (empty for the world).
        backend_options: the user's pg_options: None or ark_torch._C.Options.

    Raises:
        TypeError: pg_options belongs to another backend.
        ValueError: an environment variable or option has an invalid value.
        torch.distributed.DistBackendError: the ranks could not connect; names the rank.
    """
    settings = env.read()
    env.warn_of_unknown()
    rank, size = dist_backend_opts.group_rank, dist_backend_opts.group_size
    timeout = dist_backend_opts.timeout
    if settings.disable:
        return _stand_in(dist_backend_opts, rank, size, timeout)
    from ark_torch import _C

    if backend_options is not None and not isinstance(backend_options, _C.Options):
        raise TypeError(
            f"ark: [rank {rank}] pg_options is a {type(backend_options).__name__}: pass ark_torch.Options() or nothing."
        )
    options = complete(backend_options, settings)
    options._timeout = timeout
    options.group_name = dist_backend_opts.group_id
    options.global_ranks_in_group = list(dist_backend_opts.global_ranks_in_group)
    members = dist_backend_opts.global_ranks_in_group
    options.global_rank = members[rank] if len(members) else rank
    _shutdown_at_exit()
    return _C.ProcessGroupArk(dist_backend_opts.store, rank, size, options)


def complete(given: Any, settings: env.Settings | None = None) -> Any:
    """Options for C++: a copy of the user's, or the environment's."""
    from ark_torch import _C

    settings = settings or env.read()
    if given is not None:
        options = given.__copy__()
    else:
        options = _C.Options()
        options.shared_memory = getattr(_C.Options.SharedMemory, settings.shared_memory.upper())
        options.node = -1 if settings.node == "auto" else int(settings.node)
        options.net = settings.net
        options.rdma = rdma_options(settings)
        options.spin_us = -1 if settings.spin_us == "auto" else int(settings.spin_us)
        options.buffer_mb = settings.buffer_mb
        options.reduction = settings.reduction
        options.order = settings.order
        options.partials = settings.partials
        options.timing = settings.timing
        options.flight_record = settings.flight_record
        options.flight_dump = settings.flight_dump
        options.dispatch, options.cuda_dispatch = load_dispatch(settings.dispatch)
        options.debug = settings.debug
    if options.net != "gloo" and not options.rdma.device and not options.rdma.library:
        options.rdma.device = nearest_nic()
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        options.debug = True
    if settings.share_gpu:
        options.share_gpu = True
    if settings.disable_p2p != "auto":
        options.disable_p2p = settings.disable_p2p == "1"
    options.nccl_leaves_p2p = os.environ.get("NCCL_P2P_DISABLE", "0").strip() not in ("", "0")
    options.make_carrier = _make_gloo
    options.make_cuda_carrier = _make_cuda_carrier
    plain = options.__copy__()

    def known_dispatch(device: int, ranks: int) -> dict[str, int] | None:
        from ark_torch.distributed import first_use

        return first_use.known(plain, device, ranks)

    def measure_dispatch(store: Any, rank: int, ranks: int, device: int) -> dict[str, int]:
        from ark_torch.distributed import first_use

        return first_use.measure(plain, store, rank, ranks, device)

    # Rank 0 decides whether to measure, so every rank can.
    options.known_dispatch = known_dispatch if settings.tune else None
    options.measure_dispatch = measure_dispatch
    options.allocate = memory.empty
    options.log = log.info
    return options


def rdma_options(settings: env.Settings) -> Any:
    """The environment's RDMA options, for C++."""
    from ark_torch import _C

    options = _C.RdmaOptions()
    options.device = settings.rdma_device
    options.port = 0 if settings.rdma_port == "auto" else int(settings.rdma_port)
    options.gid_index = -1 if settings.rdma_gid_index == "auto" else int(settings.rdma_gid_index)
    options.mtu = 0 if settings.rdma_mtu == "auto" else int(settings.rdma_mtu)
    for name in ("traffic_class", "service_level", "pkey_index", "timeout", "retry_count", "rnr_retry", "cache_mb"):
        setattr(options, name, getattr(settings, f"rdma_{name}"))
    options.library = settings.rdma_library
    return options


def nearest_nic() -> str:
    """The RDMA device nearest to this rank's GPU; "" if unknown, or if there is no choice."""
    return locality.nearest(locality.address_of_gpu()) if len(locality.active()) > 1 else ""


Rule = tuple[str, str, str, int, int, int]
CudaRule = tuple[int, dict[str, int]]


def load_dispatch(path: str) -> tuple[list[Rule], list[CudaRule]]:
    """Reads a dispatch table: JSON with a list "rules" for CPU tensors, a list "cuda" for CUDA tensors, or both.

    Raises ValueError describing an invalid table. Anything missing from the table uses the measured defaults.
    """
    if not path:
        return [], []
    fields = ("collective", "algorithm", "when", "max_ranks", "max_bytes", "chunk_bytes")
    try:
        with open(path, encoding="utf-8") as file:
            table = json.load(file)
        if not {"rules", "cuda"} & set(table):
            raise KeyError("rules")
        rules = [tuple(rule[field] for field in fields) for rule in table.get("rules", [])]
        cuda = [
            (int(rule["max_ranks"]), {name: int(value) for name, value in rule.items() if name != "max_ranks"})
            for rule in table.get("cuda", [])
        ]
        return rules, cuda  # type: ignore[return-value]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"ARK_DISPATCH={path!r} is no dispatch table ({type(error).__name__}: {error}): it is JSON with a list "
            f'"rules", each with {", ".join(fields)}, or a list "cuda", each with max_ranks and sizes in bytes.'
        ) from error


def _make_gloo(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    if not dist.is_gloo_available():
        raise RuntimeError(
            f"ark: [rank {rank}] this group cannot go through memory that its ranks share, and this PyTorch has no "
            "Gloo to carry it (nor, for CUDA tensors, NCCL): run all ranks on one machine, or use one with it."
        )
    backend = dist.ProcessGroupGloo(store, rank, size, timeout)
    backend._set_sequence_number_for_group()
    return backend


def _make_cuda_carrier(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    """PyTorch's NCCL; without it PyTorch's Gloo, which is slow and lacks some operations on CUDA tensors."""
    return (
        _make_nccl(store, rank, size, timeout) if dist.is_nccl_available() else _make_gloo(store, rank, size, timeout)
    )


def _make_nccl(
    store: Any, rank: int, size: int, timeout: datetime.timedelta, name: Any = "", members: Sequence[int] = ()
) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.group_name = name
    options.global_ranks_in_group = list(members)
    backend = dist.ProcessGroupNCCL(store, rank, size, options)
    backend._set_sequence_number_for_group()
    return backend


def _stand_in(opts: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    cuda = torch.cuda.is_available() and dist.is_nccl_available()
    if rank == 0:
        log.info('ARK_DISABLE is set: group "%s" is PyTorch\'s own %s', opts.group_id, "NCCL" if cuda else "Gloo")
    if not cuda:
        return _make_gloo(opts.store, rank, size, timeout)
    return _make_nccl(opts.store, rank, size, timeout, name=opts.group_id, members=opts.global_ranks_in_group)


def _shutdown_at_exit() -> None:
    """Shuts down open groups when Python exits, so that peers can tell an exit from a crash."""
    global _at_exit
    if _at_exit:
        return
    _at_exit = True
    from ark_torch import _C

    atexit.register(_C._shutdown_all_groups, 5000)
