"""A rank of a test: `Rank`, and the code that runs a test function in the rank's own process.

A test function is a top-level function `body(rank: Rank, *args)` of a test module. Its value, or its exception with the
traceback, goes to the test process. With `rank.report(name, value)` and `rank.wait_for(name)` the test process can act
(kill, stop, resume) at a chosen point.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support import wire
from support.processes import die_with_parent

if TYPE_CHECKING:
    import torch.distributed as dist


class Rank:
    """One process of a test's job."""

    def __init__(self, spec: dict[str, Any], index: int, sock: socket.socket) -> None:
        self.rank = index
        self.world_size: int = spec["count"]
        self.backend: str = spec["backend"]
        self.scratch = Path(spec["scratch"])
        self.job: str = spec["job"]
        self._spec = spec
        self._sock = sock
        self._inits = 0

    def fresh(self, job: str) -> None:
        """Restarts under another name, so that it does not see the previous stores."""
        self.job, self._inits = job, 0

    def report(self, name: str, value: Any = None) -> None:
        """Tells the test process that a point has been reached."""
        wire.send(self._sock, ("event", name, value))

    def wait_for(self, name: str) -> Any:
        """Waits until the test process calls go(name). Returns its value."""
        message, _ = wire.receive(self._sock)
        if message[0] != name:
            raise AssertionError(f"rank {self.rank} waits for {name!r} and was told {message[0]!r}")
        return message[1]

    def store(self, name: str = "") -> dist.Store:
        """Returns a store for this job only. The test process hosts it, so that it survives the death of any rank."""
        import torch.distributed as dist

        host, port = self._spec["store"]
        timeout = timedelta(seconds=self._spec["store_timeout"])
        tcp = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        return dist.PrefixStore(f"{self.job}/{name}", tcp)

    def init(self, backend: str | None = None, timeout: float = 60.0, **options: Any) -> dist.ProcessGroup:
        """Calls init_process_group over this job's store. It may be called again after destroy."""
        import torch.distributed as dist

        self._inits += 1
        dist.init_process_group(
            backend or self.backend,
            store=options.pop("store", None) or self.store(f"init{self._inits}"),
            rank=options.pop("rank", self.rank),
            world_size=options.pop("world_size", self.world_size),
            timeout=timedelta(seconds=timeout),
            **options,
        )
        group = dist.group.WORLD
        if group is None:
            raise AssertionError("init_process_group returned without a world group")
        if backend == "gloo":  # its ranks connect one by one, and one that ends would abort the others' start
            dist.barrier()
        return group


def load(path: str, name: str) -> Any:
    """Loads the test module by file, and registers it so that its classes can be pickled."""
    module_name = Path(path).stem
    if module_name not in sys.modules:
        sys.path.insert(0, str(Path(path).parent))
        module_spec = importlib.util.spec_from_file_location(module_name, path)
        if module_spec is None or module_spec.loader is None:
            raise ImportError(f"cannot load {path}")
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[module_name] = module
        module_spec.loader.exec_module(module)
    target: Any = sys.modules[module_name]
    for part in name.split("."):
        target = getattr(target, part)
    return target


def _redirect(path: str) -> None:
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def describe(error: BaseException) -> dict[str, Any]:
    """Returns the error as it is sent to the test process."""
    return {
        "type": type(error).__name__,
        "bases": [base.__name__ for base in type(error).__mro__],
        "message": str(error),
        "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
    }


def run_rank(spec: dict[str, Any], index: int, fd: int) -> None:
    """Runs the test's function. It ends with SystemExit and the interpreter's normal shutdown, or at once.

    The shutdown takes half a second, and copies most of the pages shared with the zygote.
    """
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    _redirect(f"{spec['scratch']}/rank{index}.log")
    message, _ = wire.receive(sock)
    if message != "start":
        raise AssertionError(f"expected start, got {message!r}")
    if spec["fork"]:
        die_with_parent(spec["parent"])
    for key, value in spec["env"].items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value
    os.environ.update(RANK=str(index), LOCAL_RANK=str(index), WORLD_SIZE=str(spec["count"]))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    sys.argv = [f"rank{index}"]

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.set_debug_level_from_env()
    torch.manual_seed(1234 + index)
    rank = Rank(spec, index, sock)
    code = 0
    try:
        body: Callable[..., Any] = load(spec["path"], spec["name"])
        value = body(rank, *spec["args"], **spec["kwargs"])
        if spec["destroy"] and dist.is_initialized():
            dist.destroy_process_group()
        wire.send(sock, ("result", value, None))
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else 1
        wire.send(sock, ("exit", code, None))
    except BaseException as error:  # the test process must hear of any error
        code = 1
        traceback.print_exc()
        wire.send(sock, ("error", describe(error), None))
    if code == 0 and spec["leaves_at_once"]:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    sys.exit(code)


def main() -> None:
    """A spawned rank: a fresh interpreter that gets its spec through the socket."""
    fd = int(sys.argv[1])
    sock = socket.socket(fileno=fd)
    (spec, index), _ = wire.receive(sock)
    run_rank(spec, index, sock.detach())


if __name__ == "__main__":
    main()
