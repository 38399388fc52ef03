"""The state of a compression hook between steps: settings, layers with their residuals, and byte counts.

Every local decision comes out the same on all ranks: it depends only on settings, which ranks compare before the first
exchange, on counters that advance together, or on numbers that ranks have exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ark_torch.distributed.compression import agree
from ark_torch.distributed.compression import rules as rules_of
from ark_torch.distributed.compression.agree import log
from ark_torch.distributed.compression.auto import Auto, allocate, errors_of, sums_of
from ark_torch.distributed.compression.between import Nodes, nodes_of
from ark_torch.distributed.compression.contest import Contest
from ark_torch.distributed.compression.layers import Layer, Layers, redistribute
from ark_torch.distributed.compression.watch import Watch
from ark_torch.distributed.compression.zeros import Zeros

if TYPE_CHECKING:
    from ark_torch.distributed.compression.plan import Plan

COMPRESSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class State:
    """The state of `hook` (DistributedDataParallel) or `fsdp` (fully_shard). All ranks pass the same settings.

    Args:
        bits: 1 to 8 bits per element; or an Auto, which chooses each layer's bits from measured gradients.
        bucket: number of elements that share a scale: a multiple of 32 from 128 to 4096.
        error_feedback: whether the quantization error is kept (float32, on the gradient's device, as many elements as
            the compressed gradients) and added to the next gradient. None: for layers with less than 8 bits.
        group: a group of the backend "ark", the same as DDP's; None: that of `module` if it is a
            DistributedDataParallel, else the default group.
        module: the model that DDP wraps, or DDP's result: layers get its parameters' names, which rules and messages
            use. Without it they are "#0", "#1", in the order in which they are first reduced.
        rounding: "nearest" or "stochastic" (unbiased); None: nearest with error feedback, stochastic without.
        format: "uniform" (equal steps between a bucket's minimum and maximum) or "fp8" (e4m3 with a scale per bucket;
            bits=8).
        rules: names or patterns (fnmatch) of parameters to bits, "exact" or Rule(bits, bucket); the first match counts.
            One-dimensional parameters, and those with fewer than `exact_below` elements, are exact unless a rule says
            otherwise.
        exact_below: see rules.
        seed: seed of stochastic rounding; the same seed gives the same bits.
        when: "always"; or "faster": DDP's first steps time each bucket both ways, and buckets that compression does not
            speed up are sent exact from then on (logged once).
        where: "everywhere"; or "between": the ranks of a node add in float32, and only what travels between nodes has
            few bits. `bytes_sent` and `bytes_exact` then count what leaves the node. `fsdp` needs nodes with equal
            numbers of a group's ranks for that.
        skip_zeros: whether layers whose gradients are zero on all ranks send nothing. None: yes; on a CUDA device,
            where the check costs a synchronization, only every 64th step checks, and every step while such layers
            exist. True: check in every step (for models that use different layers in different steps). False: no.

    Attributes:
        bytes_sent: bytes that this rank has sent for gradients (and, with `fsdp`, parameters), including the flags of
            `skip_zeros`.
        bytes_exact: bytes that it would have sent without compression.

    Raises:
        TypeError, ValueError: a setting is invalid (the message names it and the allowed values), a rule matches no
            parameter, the module's group is another one, or this process is not in the group.
    """

    def __init__(
        self,
        bits: int | Auto = 4,
        bucket: int = 512,
        error_feedback: bool | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        module: nn.Module | None = None,
        rounding: str | None = None,
        format: str = "uniform",
        rules: rules_of.Rules | None = None,
        exact_below: int = 1024,
        seed: int = 0,
        when: str = "always",
        where: str = "everywhere",
        skip_zeros: bool | None = None,
    ) -> None:
        self.format = rules_of.check_choice("format", format, rules_of.FORMATS)
        self.auto = bits if isinstance(bits, Auto) else None
        self.bits = rules_of.check_bits("bits", self.auto.start if self.auto else bits, self.format)
        self.bucket = rules_of.check_bucket("bucket", bucket)
        self.rules = rules_of.parse(rules, self.format)
        widths = [self.bits, *(rule.bits for rule in self.rules.values() if rule.bits)]
        if error_feedback is None:
            error_feedback = self.auto is not None or min(widths) < 8
        self.error_feedback = bool(error_feedback)
        rounding = rounding if rounding is not None else "nearest" if self.error_feedback else "stochastic"
        self.rounding = rules_of.check_choice("rounding", rounding, rules_of.ROUNDINGS)
        self.when = rules_of.check_choice("when", when, ("always", "faster"))
        self.where = rules_of.check_choice("where", where, rules_of.PLACES)
        self.nodes: Nodes | None = None  # with where="between", once ranks have met; of the last group that did
        self.exact_below, self.seed, self.skip_zeros = int(exact_below), int(seed), skip_zeros
        if isinstance(module, DistributedDataParallel):
            if group is not None and group is not module.process_group:
                raise ValueError("ark: State(group=...) is another group than the module's: leave it out.")
            group, module = module.process_group, module.module
        if self.rules:
            if module is None:
                raise ValueError("ark: State(rules=...) names parameters: pass module=, the model that DDP wraps.")
            rules_of.check_patterns(self.rules, [name for name, _ in module.named_parameters()])
        self.group = agree.member(group)
        self.layers = Layers(module, self.rules, self.exact_below)
        self.zeros, self.contest, self.watch = Zeros(skip_zeros), Contest(), Watch()
        self.plans: dict[tuple[int, ...], Plan] = {}  # by the ids of layers, or of a bucket's parameters
        self.bytes_sent = self.bytes_exact = 0
        self.calls = self.step = 0
        self._met: dict[str, bool] = {}
        self._nodes: dict[str, Nodes] = {}
        self._told: set[str] = set()
        self._described = False

    # ---- Before and after exchanges

    def settings(self) -> dict[str, Any]:
        """The settings that must be equal on all ranks, in JSON types."""
        names = ("bucket", "error_feedback", "rounding", "format", "exact_below", "seed", "when", "where", "skip_zeros")
        return {
            "bits": asdict(self.auto) if self.auto else self.bits,
            **{name: getattr(self, name) for name in names},
            "rules": {pattern: asdict(rule) for pattern, rule in self.rules.items()},
        }

    def begin(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        """Collective in a group's first call. Returns whether gradients are compressed: not with one rank, nor with
        ARK_DISABLE or TORCH_DISTRIBUTED_DEBUG=DETAIL.

        Raises ValueError if the group is not ark's or ranks have different settings.
        """
        key = f"{group.group_name} {device.type}"
        if key not in self._met:
            why_exact = agree.why_exact(group, device)
            if group.size() > 1:
                agree.compare_settings(group, self.settings(), device)
            if why_exact:
                self.say("exact", f"{why_exact}: gradients are sent exact")
            self._met[key] = not why_exact and group.size() > 1
            if self._met[key] and self.where == "between":
                self.nodes = self._nodes[key] = nodes_of(group, device)
                if self.nodes.nodes == 1:
                    self.say("nodes", "where='between', and all ranks are on one node: gradients are sent exact")
                    self._met[key] = False
        return self._met[key]

    def nodes_in(self, group: dist.ProcessGroup, device: torch.device) -> Nodes | None:
        """With where="between", the nodes of a group that has met; None: its exchange is as one node's."""
        return self._nodes.get(f"{group.group_name} {device.type}")

    def say(self, what: str, text: str) -> None:
        """Logs `text` once per `what`, on rank 0."""
        if what not in self._told and self.group.rank() == 0:
            log.info("compression: %s", text)
        self._told.add(what)

    def next_seed(self) -> int:
        self.calls += 1
        return (self.seed * 0x9E3779B97F4A7C15 + self.calls) & (2**63 - 1)

    def end_step(self, device: torch.device) -> None:
        """Called after a step's last bucket."""
        if self.auto is not None and self.auto.chooses(self.step):
            self._choose(self.auto, device)
        self.step += 1
        if not self._described:
            self._described = True
            self.say("layers", self.describe(brief=True))

    # ---- Layers

    def width(self, layer: Layer) -> tuple[int, int]:
        """Bits and bucket of a layer; 0 bits: exact."""
        if layer.rule is not None:
            return layer.rule.bits, layer.rule.bucket or self.bucket
        return layer.chosen or self.bits, self.bucket

    def measure(self, plan: Plan, data: Tensor) -> None:
        """Adds Auto's measurements of this step's gradients."""
        if self.auto is None or not self.auto.measures(self.step):
            return
        for layer, gradient in zip(plan.layers, data.split_with_sizes(plan.numels), strict=True):
            if layer.rule is None:
                seen = sums_of(gradient, self.bucket)
                layer.sums = seen if layer.sums is None else layer.sums + seen

    def _choose(self, auto: Auto, device: torch.device) -> None:
        layers = [layer for layer in self.layers if layer.rule is None]
        if not layers:
            return
        none = torch.zeros(2, dtype=torch.float64, device=device)
        sums = torch.stack([none if layer.sums is None else layer.sums for layer in layers])
        if self.group.size() > 1:
            dist.all_reduce(sums, group=self.group)
        numels = [layer.numel for layer in layers]
        # A step that overflowed counts as zero.
        errors = [
            errors_of(energy, spread, numel, self.error_feedback and self.format == "uniform", auto.relative)
            for (energy, spread), numel in zip(sums.nan_to_num(0.0, 0.0, 0.0).tolist(), numels, strict=True)
        ]
        for layer, bits in zip(layers, allocate(errors, numels, auto.budget, auto.least), strict=True):
            layer.chosen, layer.sums = bits, None
        self.plans.clear()
        if self.group.rank() == 0:
            log.info("compression: bits chosen from the gradients of %d steps\n%s", auto.steps, self.describe())

    def describe(self, brief: bool = False) -> str:
        """A table of layers, bits and buckets; brief: one line."""
        layers = list(self.layers)
        total = sum(layer.numel for layer in layers)
        small = [layer for layer in layers if self.width(layer)[0]]
        codes = sum(layer.numel * self.width(layer)[0] for layer in small)
        numel = sum(layer.numel for layer in small)
        head = (
            f"{len(small)} of {len(layers)} layers, {numel / max(1, total):.1%} of {total / 1e6:.2f} M elements, at "
            f"{codes / max(1, numel):.2f} bits an element ({self.format}, {self.rounding}, error feedback "
            f"{'on' if self.error_feedback else 'off'})"
        )
        if brief:
            return head
        rows = [(layer.name, layer.shape, *self.width(layer)) for layer in layers]
        longest = max((len(row[0]) for row in rows), default=0)
        lines = [
            f"  {name:<{longest}}  {'exact' if not bits else f'{bits} bits, bucket {bucket}'}  {shape}"
            for name, shape, bits, bucket in rows
        ]
        return "\n".join([head, *lines])

    # ---- Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and counters, as CPU tensors; each rank saves its own."""
        return {
            "version": 1,
            "rank": self.group.rank(),
            "world_size": self.group.size(),
            "calls": self.calls,
            "step": self.step,
            "bits": {layer.name: layer.chosen for layer in self.layers if layer.chosen},
            "residuals": self.layers.state_dict(),
        }

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continues from a `state_dict`.

        Args:
            saved: this rank's saved state; or a sequence of all ranks' states, possibly from another number of ranks:
                their residuals are then summed, and each element goes to one rank.

        Raises:
            ValueError: the state is from another rank, from another number of ranks but not a sequence of all of them,
                or of another version.
        """
        rank, world = self.group.rank(), self.group.size()
        every = [saved] if isinstance(saved, Mapping) else sorted(saved, key=lambda one: int(one["rank"]))
        if not every or any(one.get("version") != 1 for one in every):
            raise ValueError(f"ark: [rank {rank}] State.load_state_dict: this is no state of version 1.")
        before = int(every[0]["world_size"])
        complete = [int(one["rank"]) for one in every] == list(range(before))
        if before == world:
            mine = [one for one in every if one["rank"] == rank]
            if not mine:
                raise ValueError(
                    f"ark: [rank {rank}] State.load_state_dict: this is rank {every[0]['rank']}'s state: each loads "
                    "what it saved."
                )
            residuals = mine[0]["residuals"]
        elif complete:
            residuals = redistribute([one["residuals"] for one in every], rank, world)
            self.say("moved", f"residuals of {before} ranks are summed, each element now held by one of {world} ranks")
        else:
            raise ValueError(
                f"ark: [rank {rank}] State.load_state_dict: saved by {before} ranks, and there are {world} now: pass a "
                f"list of the states of all {before} ranks."
            )
        self.calls, self.step = int(every[0]["calls"]), int(every[0]["step"])
        self.layers.load(residuals, every[0]["bits"], moved=before != world)
        self.plans.clear()
