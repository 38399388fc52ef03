"""A process that has imported PyTorch and forks ranks on request.

A forked rank takes tens of milliseconds; a spawned one imports PyTorch for seconds. The zygote never runs a tensor
operation and has one thread, so it can fork safely. A request is forked through a broker that ends at once, so that the
ranks belong to the test process (a child subreaper), which reaps them itself. A rank leaves at the end of main(), by
the interpreter's normal shutdown.

Started as: python -m support.zygote SOCKET_FD [MODULE ...]
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import sys
from typing import Any

from support import wire


def _fork_ranks(spec: dict[str, Any], fds: list[int]) -> tuple[list[int], int]:
    """Returns the ranks' pids. In a rank it returns ([], its index)."""
    read_end, write_end = os.pipe()
    broker = os.fork()
    if broker == 0:
        os.close(read_end)
        pids = []
        for index in range(spec["count"]):
            pid = os.fork()
            if pid == 0:
                os.close(write_end)
                return [], index
            pids.append(pid)
        os.write(write_end, b"".join(pid.to_bytes(8, "little") for pid in pids))
        os._exit(0)
    os.close(write_end)
    data = b""
    while part := os.read(read_end, 4096):
        data += part
    os.close(read_end)
    os.waitpid(broker, 0)
    for fd in fds:
        os.close(fd)
    return [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)], -1


def serve(control: socket.socket) -> tuple[dict[str, Any], int, int] | None:
    """Serves requests. Returns only in a rank (its spec, index, socket), or None at the end."""
    while True:
        try:
            spec, fds = wire.receive(control)
        except EOFError:
            return None
        pids, index = _fork_ranks(spec, fds)
        if index >= 0:
            control.close()
            for position, fd in enumerate(fds):
                if position != index:
                    os.close(fd)
            return spec, index, fds[index]
        wire.send(control, pids)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise AssertionError(f"the zygote has {threads} threads after importing {sys.argv[2:]}: a fork would lose them")
    gc.collect()
    gc.freeze()  # the ranks share these pages until something writes to them
    wire.send(control, "ready")
    job = serve(control)
    if job is not None:
        from support.rank import run_rank

        run_rank(*job)


if __name__ == "__main__":
    main()
