"""One collective on one machine: the algorithm chosen by the code's dispatch tables, and its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ark_torch.simulation import algorithms, between_nodes, carried, rdma, shared_memory
from ark_torch.simulation.machine import Machine
from ark_torch.simulation.processes import Call, Host, back_to_back
from ark_torch.simulation.world import Mail, World

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
FOLD_FROM = 5  # from this number of nodes, one stands for all
MOST_PROCESSES = 128  # of several nodes, which are simulated one by one
NETS = ("nccl", "rdma")  # what carries CUDA tensors between nodes
ENGINES = ("packets", "lines", "chunks", "bulk", "copy_engine")


class BadCall(ValueError):
    """The call to simulate names an unknown operation or an impossible size."""


@dataclass(frozen=True)
class Simulated:
    us: float
    engine: str
    algorithm: str
    sent: int  # bytes sent between ranks, summed over all simulated ranks
    received: int


@cache
def cuda_dispatch(ranks: int) -> Mapping[str, int]:
    """CudaDispatch::measured for this number of GPUs, from the extension."""
    from ark_torch import _autoload

    _autoload.ready()
    from ark_torch import _C

    return _C._default_cuda_dispatch(ranks)


@cache
def cpu_rules() -> tuple[tuple[Any, ...], ...]:
    """DispatchTable::defaults: (kind, algorithm, when, ranks, bytes, chunk), from the extension."""
    from ark_torch import _autoload

    _autoload.ready()
    from ark_torch import _C

    return tuple(tuple(rule) for rule in _C._default_dispatch())


def gpu_choice(operation: str, size: int, ranks: int, dispatch: Mapping[str, int]) -> tuple[str, str]:
    """CudaCommunicator's (algorithm, engine) for a whole tensor of `size` bytes."""
    part = size // ranks
    rings = "chunks" if part >= dispatch["chunks_from"] else "lines"
    bulk_from = dispatch["bulk_move_from"]  # of one message
    sums = "bulk" if size >= dispatch["bulk_from"] else rings
    if operation == "all_reduce":
        if size <= dispatch["one_shot_to"]:
            return "one_shot", "packets"
        return ("two_shot", "copy_engine") if size >= dispatch["copy_engine_from"] else ("two_shot", sums)
    if operation == "reduce_scatter":
        return ("two_shot", "copy_engine") if part >= dispatch["reduce_scatter_engine_from"] else ("two_shot", sums)
    if operation in ("all_gather", "all_to_all"):
        moves = "bulk" if operation == "all_gather" and part >= bulk_from else rings
        return ("move", "copy_engine") if part >= dispatch[f"{operation}_engine_from"] else ("move", moves)
    if size >= dispatch["broadcast_engine_from"]:
        return "from_root", "copy_engine"
    if ranks > 2 and size >= dispatch["relay_from"]:
        each = size // (ranks - 1)
        return "relay", "chunks" if each >= dispatch["chunks_from"] else "lines"
    if size >= bulk_from:
        return "from_root", "bulk"
    return "from_root", "chunks" if size >= dispatch["chunks_from"] else "lines"


def cpu_choice(operation: str, size: int, ranks: int, cores: int) -> tuple[str, int]:
    """DispatchTable::choose's (algorithm, chunk); `size` as counted there, bytes of one rank."""
    when = "oversubscribed" if ranks > cores else "core_per_rank"
    for kind, algorithm, applies, most_ranks, most_bytes, chunk in cpu_rules():
        if kind == operation and size <= most_bytes and ranks <= most_ranks and applies in (when, "both"):
            return algorithm, chunk
    return "one_shot", 256 << 10


def check(operation: str, size: int) -> None:
    if operation not in OPERATIONS:
        raise BadCall(f"there is no operation {operation!r}; operations are {', '.join(OPERATIONS)}")
    if not 1 <= size <= 1 << 40:
        raise BadCall(f"{size} bytes: a tensor has 1 byte to 1 TB")


def simulate(
    machine: Machine,
    operation: str,
    size: int,
    ranks: int,
    dispatch: Mapping[str, int] | None = None,
    engine: str | None = None,
    folded: bool | None = None,
    calls: int = 1,
    net: str = "nccl",
) -> Simulated:
    """Simulates one collective. `size`: bytes of the larger side, like nccl-tests. Raises BadMachine and BadCall.

    dispatch: fields of CudaDispatch that differ from the measured defaults. engine: overrides the tables. folded:
    whether one node stands for all; None: from FOLD_FROM nodes of GPUs, beyond MOST_PROCESSES processes. calls: of
    processes, back to back; the time is of one. net: one of NETS, of GPUs on several nodes.
    """
    check(operation, size)
    if net not in NETS:
        raise BadCall(f"there is no net {net!r} between nodes; it is one of {', '.join(NETS)}")
    if net == "rdma" and machine.kind == "cpu":
        raise BadCall(f"net 'rdma' is simulated for GPUs, not for the processes of {machine.name}, which use Gloo")
    nodes = -(-ranks // machine.node_ranks)
    if engine is not None and (nodes > 1 or machine.kind == "cpu"):
        raise BadCall(
            f"engine {engine!r} can be asked for on GPUs of one node alone, not on {ranks} ranks of {machine.name}"
        )
    if machine.kind == "gpu":
        fold = nodes >= FOLD_FROM if folded is None else folded
    else:  # in a broadcast root's node does what no other does
        fold = operation != "broadcast" and (ranks > MOST_PROCESSES if folded is None else folded)
    world = World(machine, ranks, fold)
    if machine.kind == "cpu":
        return _of_processes(machine, world, operation, size, calls)
    if world.nodes > 1 and net == "rdma":
        return _by_rdma(machine, operation, size, ranks, fold)
    if world.nodes > 1:

        def mail_of(what: str, bytes_here: float) -> Mail:
            if world.local == 1:
                name = "lines"
            else:
                name = gpu_choice(what, int(bytes_here), world.local, cuda_dispatch(world.local))[1]
            return Mail(world, machine.engine(what, name, world.local), int(bytes_here))

        us = between_nodes.hierarchical(world, operation, size, mail_of)
        return _done(world, us, "rail", "hierarchical")
    fields = {**cuda_dispatch(ranks), **(dispatch or {})}
    algorithm, name = gpu_choice(operation, size, ranks, fields)
    name = engine or name
    # Large sums by rings are several consecutive launches: one of each kind is simulated.
    largest = fields["part_bytes"] * ranks if algorithm == "two_shot" and name != "copy_engine" else size
    us = 0.0
    for count, bytes_here in ((size // largest, largest), (1, size % largest)):
        if count and bytes_here:
            us += count * _on_gpus(machine, world, operation, algorithm, name, bytes_here, size)
    return _done(world, us, name, algorithm)


def _done(world: World, us: float, engine: str, algorithm: str) -> Simulated:
    network = world.network
    return Simulated(us, engine, algorithm, sum(network.sent.values()), sum(network.received.values()))


def _by_rdma(machine: Machine, operation: str, size: int, ranks: int, folded: bool) -> Simulated:
    @cache
    def of_node(what: str, bytes_here: int) -> tuple[float, int]:
        one = simulate(machine, what, bytes_here, machine.node_ranks)
        return one.us, one.sent

    try:
        nodes = rdma.Nodes(machine, ranks, of_node, folded)
    except rdma.BadNodes as error:
        raise BadCall(str(error)) from None
    nodes.run(operation, size)
    return Simulated(nodes.us, "rdma", "nodes", nodes.sent, nodes.sent)


def _on_gpus(machine: Machine, world: World, operation: str, algorithm: str, name: str, size: int, whole: int) -> float:
    here = world.members()
    mail = Mail(world, machine.engine(operation, name, world.ranks), whole)
    in_turn = name == "copy_engine"
    if algorithm == "two_shot":
        work = algorithms.two_shot(mail, here, size, in_turn, gather=operation == "all_reduce")
    elif algorithm == "move":
        work = algorithms.move(mail, here, size, in_turn)
    else:
        work = {
            "one_shot": algorithms.one_shot, "relay": algorithms.relay, "from_root": algorithms.from_root
        }[algorithm](mail, here, size)  # fmt: skip
    return world.run(work, here)


def _of_processes(machine: Machine, world: World, operation: str, size: int, calls: int) -> Simulated:
    """Over shared memory, and between nodes by messages. The code counts bytes of one rank: for gathers its input."""
    ranks, host = world.every(), Host(world)
    if world.nodes > 1 and len(ranks) > MOST_PROCESSES:
        raise BadCall(
            f"{operation} of {world.ranks} processes on {world.nodes} nodes of {machine.name}: {len(ranks)} would be "
            f"simulated one by one, and {MOST_PROCESSES} are the most; give fewer --ranks or --node-ranks"
        )
    each = max(1, size // world.ranks) if operation in ("all_gather", "reduce_scatter", "all_to_all") else size
    on_cores = world.ranks if machine.one_host else world.local
    memory = machine.engine(operation, "shared_memory", on_cores)
    tcp = machine.engine(operation, "tcp", world.ranks) if world.nodes > 1 else None
    works = []
    for _ in range(calls):
        call = Call(host, memory, size, tcp)
        if tcp is None:
            algorithm, chunk = cpu_choice(operation, each, world.ranks, machine.cores)
            works.append(shared_memory.collective(call, ranks, operation, each, algorithm, chunk))
        else:
            work, algorithm = carried.collective(call, operation, each)
            works.append(work)
    us = back_to_back(world, works)
    return _done(world, us, "shared_memory" if tcp is None else "tcp", algorithm)
