"""The NIC that is nearest to this rank's GPU in the tree of PCI devices, as Linux shows it in /sys.

A machine with several GPUs usually has several NICs, each behind a switch with its GPUs. If every rank took the first
NIC, all would share it, and most bytes would cross the processors. GPUs that are equally far from several NICs take
them in turn.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

NVIDIA, DISPLAYS = "0x10de", ("0x0300", "0x0302")  # PCI vendor, and classes of devices


def nearest(gpu: str, root: Path = Path("/sys")) -> str:
    """The RDMA device with an active port that is nearest to the GPU at this PCI address ("0000:1b:00.0").

    Returns "" if that is unknown, or there is no choice.
    """
    nics = {name: (root / "class/infiniband" / name / "device").resolve() for name in active(root)}
    gpus = root / "bus/pci/devices"
    if len(nics) < 2 or not gpu or not (gpus / gpu).exists():
        return ""

    def candidates(address: str) -> list[str]:
        place = (gpus / address).resolve()
        distances = {name: _distance(place, nic) for name, nic in nics.items()}
        return [name for name, far in distances.items() if far == min(distances.values())]

    mine = candidates(gpu)
    rivals = [address for address in _gpus(gpus) if candidates(address) == mine]
    return mine[rivals.index(gpu) % len(mine) if gpu in rivals else 0]


def active(root: Path = Path("/sys")) -> list[str]:
    """RDMA devices with an active port."""
    folder = root / "class/infiniband"
    if not folder.is_dir():
        return []
    names = sorted((one.name for one in folder.iterdir()), key=lambda name: (len(name), name))
    return [name for name in names if any(map(_is_active, (folder / name).glob("ports/*/state")))]


def address_of_gpu() -> str:
    """The PCI address of this process's current GPU, or of the one that LOCAL_RANK stands for; "" if unknown."""
    if not torch.cuda.is_available():
        return ""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device()
    elif os.environ.get("LOCAL_RANK", "").isdecimal():
        index = int(os.environ["LOCAL_RANK"]) % max(1, torch.cuda.device_count())
    else:
        return ""
    about: Any = torch.cuda.get_device_properties(index)  # CPU builds of PyTorch declare no addresses
    return f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"


def _is_active(state: Path) -> bool:
    return _text(state).startswith("4")  # "4: ACTIVE"


def _gpus(folder: Path) -> Sequence[str]:
    return sorted(
        one.name
        for one in folder.iterdir()
        if _text(one / "vendor") == NVIDIA and _text(one / "class").startswith(DISPLAYS)
    )


def _distance(one: Path, other: Path) -> tuple[int, int]:
    """Processors' links between them, then PCI bridges."""
    ours, theirs = one.parts, other.parts
    shared = [a for a, b in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))]
    same_root = any(part.startswith("pci") for part in shared)
    nodes = [_text(place / "numa_node") for place in (one, other)]
    apart = 0 if same_root else 2 if nodes[0] != nodes[1] else 1
    return apart, len(ours) + len(theirs) - 2 * len(shared)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
