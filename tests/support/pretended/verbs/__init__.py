"""A pretended libibverbs: RDMA between processes of this machine without a NIC (control.hpp, nic.hpp).

`build()` compiles it and returns its path. Control tells it, while ranks run, which faults to produce.
"""

from __future__ import annotations

import fcntl
import mmap
import struct
from pathlib import Path

from support.pretended import make_library

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
# Same order as in control.hpp.
FIELDS = (
    *("link_down", "loss", "lose_completions", "swap_completions", "receiver_not_ready", "wrong_keys", "port_down"),
    *("no_devices", "most_memory", "small_mtu", "only_ipv6", "refuse_pairs"),
    *("link_down_1", "port_down_1", "refuse_dma_buf", "unreachable"),
)


def build(folder: Path) -> str:
    """Compiles it into the folder, once for all callers. Returns its path."""
    folder.mkdir(exist_ok=True)
    library = folder / "libibverbs.so.1"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            made = folder / "made"
            make_library(made, sorted(HERE.glob("*.cpp")), ["-O1", "-pthread", f"-I{ROOT / 'csrc'}"])
            made.rename(library)
    return str(library)


class Control:
    """The page that all ranks of a test map."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(4096))
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 4096)

    def set(self, **values: int) -> None:
        for name, value in values.items():
            struct.pack_into("=I", self._memory, 4 * FIELDS.index(name), value)
