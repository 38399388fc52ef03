"""Machines as the simulator sees them, in memory and as JSON: what moves bytes, and at what cost.

An *engine* is one way of moving bytes (packets, lines, chunks, bulk, copy_engine on GPUs; shared_memory on a CPU; tcp
between namespaces; rail between nodes). Its cost depends on the kernel and on the number of ranks, so engines are
stored by "operation/engine" and number of ranks.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

PRESETS = Path(__file__).with_name("machines.json")
MOST_RANKS = 4096


class BadMachine(ValueError):
    """A machine's description contains an unknown name or an impossible value."""


@dataclass(frozen=True)
class Engine:
    """setup_us: time of an operation, or a launch, before its first byte. latency_us: a message's fixed time.

    gbps: rate of one rank's engine, GB/s. rates: [[bytes, GB/s], ...] of operations that leave the caches, by size; the
    rate between two sizes is interpolated, and smaller operations than the first have gbps. message_us: time of a core
    for a message, at each end.
    """

    setup_us: float
    latency_us: float
    gbps: float
    rates: tuple[tuple[int, float], ...] = ()
    message_us: float = 0.0

    def rate(self, operation_bytes: float) -> float:
        """Interpolated in the logarithms of both."""
        if not self.rates or operation_bytes <= self.rates[0][0]:
            return self.gbps
        for (low, slow), (high, fast) in itertools.pairwise(self.rates):
            if operation_bytes <= high:
                share = math.log(operation_bytes / low) / math.log(high / low)
                return float(slow * (fast / slow) ** share)
        return self.rates[-1][1]


@dataclass(frozen=True)
class Machine:
    """kind: "gpu" (ranks are GPUs behind a switch) or "cpu" (ranks are processes that share cores).

    link_gbps: bandwidth of a GPU's port to its node's switch, in each direction (cpu: unused). rail_gbit: bandwidth of
    a rank's link to other nodes, Gbit/s in each direction (cpu: the node's link). rail_latency_us: latency between
    nodes. rail_burst: bytes that a cpu's link passes at once after it was idle. one_host: all nodes share the same
    cores, as network namespaces do. engines: see the module.
    """

    name: str
    kind: str
    node_ranks: int
    link_gbps: float
    rail_gbit: float
    rail_latency_us: float
    engines: dict[str, dict[int, Engine]] = field(default_factory=dict)
    cores: int = 0
    rail_burst: int = 0
    one_host: bool = False
    fitted_from: str = ""

    def __post_init__(self) -> None:
        def refuse(what: str, must: str) -> None:
            raise BadMachine(f"machine {self.name!r}: {what} {must}")

        if self.kind not in ("gpu", "cpu"):
            refuse("kind", f'is {self.kind!r} and must be "gpu" or "cpu"')
        if not isinstance(self.node_ranks, int) or not 1 <= self.node_ranks <= MOST_RANKS:
            refuse("node_ranks", f"is {self.node_ranks!r} and must be a whole number from 1 to {MOST_RANKS}")
        if self.kind == "cpu" and self.cores < 1:
            refuse("cores", f"is {self.cores!r} and must be 1 or more for a cpu")
        for name in ("link_gbps", "rail_gbit"):
            if not positive(getattr(self, name)):
                refuse(name, f"is {getattr(self, name)!r} and must be a number above 0")
        for name in ("rail_latency_us", "rail_burst"):
            value = getattr(self, name)
            if not (value == 0 or positive(value)):
                refuse(name, f"is {value!r} and must be 0 or more")
        if not isinstance(self.one_host, bool):
            refuse("one_host", f"is {self.one_host!r} and must be true or false")
        if not self.engines:
            refuse("engines", "has none")
        for key, by_ranks in self.engines.items():
            for ranks, engine in by_ranks.items():
                where = f"engines[{key!r}][{ranks}]"
                if ranks < 2:
                    refuse(where, "is for groups of fewer than 2 ranks")
                if not positive(engine.gbps):
                    refuse(f"{where}.gbps", f"is {engine.gbps!r} and must be a number above 0")
                for name in ("setup_us", "latency_us", "message_us"):
                    value = getattr(engine, name)
                    if not (value == 0 or positive(value)):
                        refuse(f"{where}.{name}", f"is {value!r} and must be 0 or more")
                sizes = [point[0] for point in engine.rates]
                if not all(positive(value) for point in engine.rates for value in point) or sizes != sorted(set(sizes)):
                    refuse(f"{where}.rates", f"is {engine.rates!r} and must be [bytes, GB/s] by growing bytes")

    def engine(self, operation: str, name: str, ranks: int) -> Engine:
        """The operation's engine, else another operation's; for the nearest number of ranks, preferring the larger."""
        by_ranks = self.engines.get(f"{operation}/{name}")
        if by_ranks is None:
            keys = sorted(key for key in self.engines if key.endswith(f"/{name}"))
            if not keys:
                raise BadMachine(f"machine {self.name!r}: engines has no {operation}/{name}, nor {name} at all")
            sums = [key for key in keys if ("reduce" in key) == ("reduce" in operation)]  # these kernels are similar
            by_ranks = self.engines[(sums or keys)[0]]
        return by_ranks[min(by_ranks, key=lambda known: (abs(known - ranks), -known))]

    def having(self, key: str, ranks: int, engine: Engine) -> Machine:
        """A copy with this engine replaced."""
        by_ranks = {**self.engines.get(key, {}), ranks: engine}
        return replace(self, engines={**self.engines, key: by_ranks})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _made(kind: type, given: Any, where: str) -> Any:
    if not isinstance(given, dict):
        raise BadMachine(f"{where} is {given!r} and must be an object")
    known = {one.name for one in fields(kind)}
    for name in given:
        if name not in known:
            raise BadMachine(f"{where} has no field {name!r}; it has {', '.join(sorted(known))}")
    try:
        return kind(**given)
    except TypeError as error:
        raise BadMachine(f"{where}: {str(error).removeprefix(kind.__name__ + '.__init__() ')}") from None


def _engine(costs: Any, where: str) -> Engine:
    rates = costs.get("rates", ()) if isinstance(costs, dict) else ()
    if not isinstance(rates, (list, tuple)) or not all(isinstance(p, (list, tuple)) and len(p) == 2 for p in rates):
        raise BadMachine(f"{where}.rates is {rates!r} and must be [bytes, GB/s] by growing bytes")
    if isinstance(costs, dict):
        costs = {**costs, "rates": tuple((size, rate) for size, rate in rates)}
    made: Engine = _made(Engine, costs, where)
    return made


def from_json(given: Any) -> Machine:
    """Parses a machine from a JSON object. Raises BadMachine naming the bad field and the allowed values."""
    if not isinstance(given, dict):
        raise BadMachine(f"a machine is a JSON object, not {type(given).__name__}")
    engines: dict[str, dict[int, Engine]] = {}
    described = given.get("engines", {})
    if not isinstance(described, dict):
        raise BadMachine("engines must be an object: operation/engine -> ranks -> costs")
    for key, by_ranks in described.items():
        operation, slash, name = key.partition("/")
        if not (operation and slash and name) or not isinstance(by_ranks, dict):
            raise BadMachine(f"engines[{key!r}]: the name is OPERATION/ENGINE and its value an object by ranks")
        for ranks, costs in by_ranks.items():
            if not str(ranks).isdigit():
                raise BadMachine(f"engines[{key!r}]: {ranks!r} is no number of ranks")
            where = f"engines[{key!r}][{ranks}]"
            engines.setdefault(key, {})[int(ranks)] = _engine(costs, where)
    made: Machine = _made(Machine, {**given, "engines": engines}, "machine")
    return made


def presets() -> dict[str, Machine]:
    """The machines that fit.py computed from this repository's measurements, by name."""
    return {name: from_json(one) for name, one in json.loads(PRESETS.read_text(encoding="utf-8")).items()}


def load(text: str) -> Machine:
    """Loads a preset by name, or a JSON file. Raises BadMachine naming the known presets or the error."""
    known = presets()
    if text in known:
        return known[text]
    try:
        given = json.loads(Path(text).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadMachine(f"there is no machine and no file {text!r}; machines are {', '.join(known)}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadMachine(f"{text}: {error}") from None
    return from_json(given)
