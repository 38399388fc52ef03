"""Prints for the doctor what RDMA would use on this machine, as JSON rows.

It runs in its own process, since it loads PyTorch, the extension and a NIC's driver.
"""

from __future__ import annotations

import json
import resource

import torch

from ark_torch import _C, env
from ark_torch.distributed.group import nearest_nic, rdma_options


def locked_memory() -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit >> 10} KiB"


def gpu_lines(options: _C.RdmaOptions) -> list[str]:
    """Which NICs reach the memory of which GPU; empty without a CUDA device."""
    if not torch.cuda.is_available():
        return []
    lines = []
    for gpu in range(torch.cuda.device_count()):
        for nic, why in _C._rdma_gpu_paths(options, gpu):
            reached = (
                f"not reached, so it goes through the host's memory: {why}" if why else "reached directly, by dma-buf"
            )
            lines.append(f"memory of cuda:{gpu} from {nic}: {reached}")
    return lines


def rows() -> list[dict[str, str]]:
    settings = env.read()
    options = rdma_options(settings)
    near = "" if options.device or options.library else nearest_nic()
    options.device = near or options.device
    chosen, reason, ports = _C._rdma_devices(options)
    if not chosen:
        advice = (
            "" if settings.net != "rdma" else "ARK_NET=rdma asks for it: groups over several machines will not start"
        )
        state = "warn" if settings.net == "rdma" or ports else "info"
        found = f"none, so Gloo carries groups between machines: {reason}"
        return [{"probe": "rdma", "state": state, "found": found, "advice": advice}]
    budget = _C._rdma_retry_budget(options.timeout, options.retry_count)
    lines = [
        chosen,
        f"a silent peer counts as lost after {budget} or up to four times that; ulimit -l: {locked_memory()}",
    ]
    lines += [f"{near} is the nearest to this process's GPU; each rank takes its own"] if near else []
    lines += [f"{port}: {trouble or 'usable'}" for port, trouble in ports]
    lines += gpu_lines(options)
    advice = ""
    if locked_memory() != "unlimited":
        advice = "memory that the NIC uses is locked: `ulimit -l unlimited` before the job (docs/rdma.md)"
    if settings.net == "gloo":
        lines.append("not used: ARK_NET=gloo")
    return [{"probe": "rdma", "state": "ok", "found": "\n".join(lines), "advice": advice}]


if __name__ == "__main__":
    print(json.dumps(rows()))
