"""Whole steps on many GPUs: computation as measured on one to four GPUs, communication as simulated.

Nothing beyond four GPUs has been measured; rails between nodes are assumptions (machine.rail_gbit, rail_latency_us).
"""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

from ark_torch.simulation.collective import simulate
from ark_torch.simulation.machine import Machine
from ark_torch.simulation.measured import load

GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
DLRM_SHAPES = {"dlrm_1": "D128-L1-B8192", "dlrm_8": "D128-L8-B4096"}
Row = dict[str, Any]


class Ddp:
    """GPT-2 XL: buckets are all-reduced one after the other while the backward pass produces the next.

    Transfers slow computation down by `slowdown` of their duration, derived from the step on two GPUs. The backward
    pass is two thirds of the computation, and buckets become ready at equal intervals in it.
    """

    BACKWARD = 2 / 3

    def __init__(self, results: Path, machine: Machine) -> None:
        every = [r for r in load(results, "training")["rows"] if (r["model"], r["mode"]) == ("gpt2-xl", "graph")]
        two = {row["contender"]: row for row in every if row["ranks"] == 2}
        self.machine = machine
        self.compute_us = two["free"]["step_ms"] * 1e3
        self.buckets = two["ark"]["buckets"]
        self.bucket = two["ark"]["gradient_bytes"] // self.buckets
        busy = self.buckets * self.all_reduce(2)
        self.slowdown = 0.0
        self.slowdown = max(0.0, two["ark"]["step_ms"] * 1e3 - self.step(2)) / busy
        self.measured = {2: two["ark"]["step_ms"] * 1e3}
        four = load(results, "training_4_h200")["rows"]
        self.measured[4] = 1e3 * next(
            r["step_ms"] for r in four if (r["model"], r["mode"], r["contender"]) == ("gpt2-xl", "graph", "ark_bulk32")
        )

    def all_reduce(self, gpus: int) -> float:
        return simulate(self.machine, "all_reduce", self.bucket, gpus).us

    def step(self, gpus: int) -> float:
        each = self.all_reduce(gpus)
        compute = self.compute_us + self.slowdown * each * self.buckets
        free = 0.0
        for bucket in range(1, self.buckets + 1):
            ready = compute * (1 - self.BACKWARD * (1 - bucket / self.buckets))
            free = max(free, ready) + each
        return float(max(compute, free))


class Decode:
    """A token of Llama 1B's shape in one loop kernel: a constant part, a share of the weights, 33 exchanges.

    The first two are derived from measurements on one and two GPUs. The model has 32 heads: beyond 32 GPUs, groups of
    32 work in parallel.
    """

    HIDDEN_BYTES, EXCHANGES, HEADS = 2 * 2048, 33, 32  # bfloat16; two exchanges per layer (16 layers), and the logits

    def __init__(self, results: Path, machine: Machine) -> None:
        self.machine = machine
        one = load(results, "decode_h200")["rows"][0]["microseconds"]["ark"]["median"]
        self.measured = {1: one}
        for gpus, name in ((2, "decode_ranks_h200"), (4, "decode_ranks_4_h200")):
            rows = load(results, name)["rows"]
            self.measured[gpus] = next(r["microseconds"]["median"] for r in rows if r["contender"] == "ark")
        self.weights_us = 2 * (one - self.measured[2] + self.exchanges(2))
        self.fixed_us = one - self.weights_us

    def exchanges(self, gpus: int) -> float:
        return self.EXCHANGES * simulate(self.machine, "all_reduce", self.HIDDEN_BYTES, gpus).us

    def step(self, gpus: int) -> float:
        group = min(gpus, self.HEADS)
        return float(self.fixed_us + self.weights_us / group + self.exchanges(group))


class Dlrm:
    """A training step of benchmarks/dlrm_step.py, with the same number of samples on every GPU.

    Fused pooling stores rows at their destination as they are produced, so that pooling and all-to-all together take as
    long as the longer one. The rest is derived from the fused step on two GPUs.
    """

    DIM, TABLES = 128, 26
    MLPS = ((13, 512, 256, 128), (128 + 27 * 26 // 2, 1024, 1024, 512, 256, 1))

    def __init__(self, results: Path, machine: Machine, shape: str) -> None:
        self.machine = machine
        length, batch = (int(part[1:]) for part in shape.split("-")[1:])
        self._exchanges: dict[int, tuple[float, float]] = {}  # (all_to_all, all_reduce) by number of GPUs
        row = next(row for row in load(results, "dlrm_step")["rows"] if row["shape"] == shape)
        self.measured = {2: row["graph_us"]["ark"]}
        self.pooled = 4 * self.DIM * batch * self.TABLES  # float32 bytes sent to each GPU
        self.weights = 4 * sum((a + 1) * b for sizes in self.MLPS for a, b in itertools.pairwise(sizes))
        self.pool_us = length * self.pooled / statistics.median(self._rates(results))
        self.rest_us = 0.0
        self.rest_us = self.measured[2] - self.step(2, True)

    @staticmethod
    def _rates(results: Path) -> list[float]:
        """Rates at which pooling reads rows, in bytes per microsecond."""
        made = []
        for row in load(results, "fused")["rows"]:
            tables, dim, length, batch = (int(part[1:]) for part in row["shape"].split("-"))
            made.append(2 * tables * dim * length * batch * row["ranks"] / row["us"]["pool"])
        return made

    def step(self, gpus: int, fused: bool) -> float:
        if gpus not in self._exchanges:
            self._exchanges[gpus] = (
                simulate(self.machine, "all_to_all", self.pooled, gpus).us,
                simulate(self.machine, "all_reduce", self.weights, gpus).us,
            )
        exchange, sums = self._exchanges[gpus]
        forward = max(self.pool_us, exchange) if fused else self.pool_us + exchange
        return self.rest_us + forward + exchange + sums


def rows(results: Path, machine: Machine, gpus: tuple[int, ...] = (2, 4, *GPUS)) -> list[Row]:
    """For each number of GPUs: each step's predicted microseconds, and the measured ones if they exist."""
    ddp, decode = Ddp(results, machine), Decode(results, machine)
    dlrms = {name: Dlrm(results, machine, shape) for name, shape in DLRM_SHAPES.items()}
    made = []
    for count in gpus:
        predicted = {
            "ddp": ddp.step(count), "decode": decode.step(count),
        }  # fmt: skip
        measured = {"ddp": ddp.measured, "decode": decode.measured}
        for name, dlrm in dlrms.items():
            predicted |= {name: dlrm.step(count, False), f"{name}_fused": dlrm.step(count, True)}
            measured[f"{name}_fused"] = dlrm.measured
        made.append({
            "gpus": count, "us": {name: round(us, 1) for name, us in predicted.items()},
            "measured_us": {name: round(of[count], 1) for name, of in measured.items() if count in of},
        })  # fmt: skip
    return made
