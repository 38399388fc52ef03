"""One rank of `ark doctor --links`: measures every pair of ranks in turn, while the others wait.

Run as a module (python -m ark_torch.tools._links_rank cpu|cuda FILE) with torch.distributed's variables; rank 0 writes
FILE, a JSON object.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SMALL = 8  # bytes
LARGE = {"cpu": 16 << 20, "cuda": 64 << 20}
ROUNDS = {"cpu": 5, "cuda": 20}
PINGS = 100


def numa_node(device: torch.device) -> int | None:
    """The NUMA node of the rank's GPU, or of its CPU cores if they share one; None: unknown."""
    if device.type == "cuda":
        about: Any = torch.cuda.get_device_properties(device)
        where = f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"
        files = [Path("/sys/bus/pci/devices") / where / "numa_node"]
        nodes = {int(path.read_text()) for path in files if path.exists()}
    else:
        cores = os.sched_getaffinity(0)
        nodes = {
            int(path.name.removeprefix("node"))
            for path in Path("/sys/devices/system/node").glob("node[0-9]*")
            if any((path / f"cpu{core}").exists() for core in cores)
        }
    return nodes.pop() if len(nodes) == 1 and min(nodes) >= 0 else None


def place_of(rank: int, device: torch.device) -> dict[str, Any]:
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else platform.machine()
    return {"rank": rank, "host": socket.gethostname(), "device": str(device), "name": name, "numa": numa_node(device)}


class Pair:
    """This rank's side of the measurements between ranks `one` and `two`."""

    def __init__(self, rank: int, one: int, two: int, device: torch.device) -> None:
        self.first, self.peer = rank == one, two if rank == one else one
        self.device = device

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _exchange(self, sends: bool, tensor: torch.Tensor) -> None:
        if sends:
            dist.send(tensor, self.peer)
        else:
            dist.recv(tensor, self.peer)

    def values_arrive(self, sends: bool) -> bool:
        """Whether the received values equal the sent ones; True on the sender."""
        generator = torch.Generator().manual_seed(1234)
        sent = torch.randint(-(2**62), 2**62, (1 << 17,), generator=generator)
        tensor = sent.to(self.device) if sends else torch.zeros_like(sent).to(self.device)
        self._exchange(sends, tensor)
        return bool((tensor.cpu() == sent).all())

    def latency_us(self) -> float:
        """Half a round trip of 8 bytes."""
        tensor = torch.zeros(SMALL, dtype=torch.uint8, device=self.device)
        times = []
        for _ in range(PINGS):
            began = time.perf_counter()
            self._exchange(self.first, tensor)
            self._exchange(not self.first, tensor)
            self._wait()
            times.append((time.perf_counter() - began) / 2 * 1e6)
        return statistics.median(times[PINGS // 5 :])

    def _rate(self, once: Callable[[], None], count: int) -> float:
        times = []
        for _ in range(ROUNDS[self.device.type] + 1):
            began = time.perf_counter()
            once()
            self._wait()
            times.append(time.perf_counter() - began)
        return count / statistics.median(times[1:]) / 1e9

    def gb_per_s(self, sends: bool) -> float:
        tensor = torch.rand(LARGE[self.device.type] // 4, device=self.device)
        return self._rate(lambda: self._exchange(sends, tensor), tensor.nbytes)

    def both_gb_per_s(self) -> float:
        """The rate of each direction while both are in use."""
        out = torch.rand(LARGE[self.device.type] // 4, device=self.device)
        into = torch.empty_like(out)

        def once() -> None:
            both = [dist.P2POp(dist.isend, out, self.peer), dist.P2POp(dist.irecv, into, self.peer)]
            for work in dist.batch_isend_irecv(both):
                work.wait()

        return self._rate(once, out.nbytes)


def measure(rank: int, one: int, two: int, device: torch.device) -> dict[str, Any]:
    """This rank's measurements of the pair; the receiving rank measures a direction."""
    pair = Pair(rank, one, two, device)
    first = rank == one
    right = [pair.values_arrive(first), pair.values_arrive(not first)]  # one -> two, two -> one
    latency = pair.latency_us()
    there, back = pair.gb_per_s(first), pair.gb_per_s(not first)
    return {"right": right, "latency_us": latency, "there": there, "back": back, "both": pair.both_gb_per_s()}


def combined(one: int, two: int, halves: list[dict[str, Any]]) -> dict[str, Any]:
    """The pair's result from both ranks' measurements; the longer time counts."""
    right = [all(half["right"][way] for half in halves) for way in (0, 1)]
    row: dict[str, Any] = {"from": one, "to": two, "right": right[0], "right_back": right[1]}
    row["latency_us"] = round(max(half["latency_us"] for half in halves), 2)
    for key, of in (("gb_per_s", "there"), ("gb_per_s_back", "back"), ("gb_per_s_both", "both")):
        row[key] = round(min(half[of] for half in halves), 2)
    return row


def main(kind: str, results: str) -> int:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("ark", timeout=timedelta(seconds=120))
    backend: Any = dist.group.WORLD._get_backend(device)  # type: ignore[union-attr]
    dist.all_reduce(torch.ones(1, device=device))
    places: list[Any] = [None] * world
    dist.all_gather_object(places, place_of(rank, device))
    pairs = []
    for one in range(world):
        for two in range(one + 1, world):
            halves: list[Any] = [None] * world
            half = measure(rank, one, two, device) if rank in (one, two) else None
            dist.all_gather_object(halves, half)
            row = combined(one, two, [half for half in halves if half is not None])
            if kind == "cuda" and places[one]["host"] == places[two]["host"] == socket.gethostname():
                ends = [torch.device(places[end]["device"]) for end in (one, two)]
                row["peer_access"] = torch.cuda.can_device_access_peer(*ends)
            pairs.append(row)
    carrier = backend.cuda_carrier if kind == "cuda" else "ark" if backend.shares_memory else "gloo"
    if rank == 0:
        found = {"kind": kind, "carrier": carrier or "ark", "places": places, "pairs": pairs}
        if kind == "cuda":
            found |= {"on_host": backend.cuda_on_host, "shared_bytes": backend.cuda_shared_bytes}
        Path(results).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
