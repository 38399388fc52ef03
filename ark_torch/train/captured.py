"""The step that `capture` returns. It decides which calls run eagerly, are captured, or are replayed.

The first calls train eagerly, on the stream of later captures. Then each batch shape gets a CUDA graph of the step,
which later calls replay. A step that cannot be captured always runs eagerly, and reports why. All ranks of the group do
the same in each call: all replay, or all run eagerly. A change of what is trained (frozen parameters, others in their
place) begins anew on all ranks, as capture() does.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from ark_torch.train import ddp, fsdp, graphs, held, inputs, models, optimizers, reasons, scope, sizing
from ark_torch.train.agreement import CAPTURE, EAGER, FAILED, KINDS, MOVED, REFUSED, RELAID, REPLAY, Agreement
from ark_torch.train.backward import Watch
from ark_torch.train.baked import Baked
from ark_torch.train.before import Before
from ark_torch.train.buckets import Buckets
from ark_torch.train.facts import facts_of, of_buffers
from ark_torch.train.layout import Layout
from ark_torch.train.step import Step

MB = 1 << 20


@dataclass
class _Graph:
    """A captured call: a number of steps on batches of certain shapes."""

    recording: graphs.Recording
    static: inputs.Static
    losses: Tensor
    held: held.Held = field(default_factory=dict)
    digest: int = 0  # of what it holds


@dataclass
class _Shape:
    """The state of one kind of call."""

    seen: bool = False  # has run eagerly
    filled: bool = False  # the host's state has changed in a first call, as caches do
    graph: _Graph | None = None


class CapturedStep:
    """The callable that `capture` returns: `step(batch)`.

    Attributes:
        captured: whether the last call replayed a graph.
        reason: why it did not; "" if it did.
    """

    def __init__(
        self, step: Step, steps: int, accumulate: int, warmup: int, max_shapes: int, mb: float | None, registered: bool
    ) -> None:
        self.captured, self.reason = False, "no step has run yet"
        self._step, self._steps, self._accumulate = step, steps, accumulate
        self._warmup, self._max_shapes = warmup, max_shapes
        subject = step.subject
        self._device = subject.device
        self._mover = inputs.Mover(self._device)
        self._recorder = graphs.recorder_for(self._device)
        self._agreement = Agreement(subject.group) if subject.group is not None else None
        self._never = self._why_never()  # why no call can be captured
        self._rates: optimizers.Rates | None = None
        self._shapes: dict[Any, _Shape] = {}
        self._epoch = 0  # of their keys
        self._told: set[str] = set()
        self._options: Any = None  # of the optimizer in the last call
        self._changing = 0  # calls in a row in which those changed
        self._why_changed = ""
        self._why_anew = ""  # since when graphs are recorded anew
        self._sizing: sizing.Sizing | None = None
        self._host_state = ""  # why a graph would repeat stale host state
        self._loss_dtype = torch.float32
        self._eager_calls = 0
        self._closed = False
        self._mb, self._registered = mb, registered
        if self._agreement is not None:
            self._agree()
            models.same_weights(subject)
        if subject.ddp is not None:
            step.standby = ddp.Standby(subject.ddp, self._recorder.stream if self._recorder is not None else None)
        self._make_buckets()
        if self._device.type == "cpu":
            optimizers.settle_on_cpu(step.optimizer)
        elif not self._never:
            self._rates = optimizers.Rates(step.optimizer, self._device)
        self._layout = Layout(subject, step.optimizer)
        self._baked: Baked | None = None  # what graphs take; none if there are no graphs, since it keeps states alive
        if self._recorder is not None and not self._never:
            averaged = step.averaging.module if step.averaging is not None else None
            self._baked = Baked(subject.module, averaged, step.optimizer)

    def _make_buckets(self) -> None:
        subject = self._step.subject
        if self._agreement is None or not subject.averages:
            return
        if self._mb is None and self._recorder is not None:
            self._sizing = sizing.sizing_for(subject, self._agreement, self._device, self._registered)
        limit = sizing.CANDIDATES_MB[0] if self._mb is None else self._mb
        self._step.buckets = Buckets(subject, self._agreement, int(limit * MB), self._registered)

    # ---- A call

    def __call__(self, batch: Any) -> Tensor:
        """Runs one step, or several; returns their losses. Raises on all ranks if the batch of one is invalid."""
        try:
            self._check_call()
            batches = inputs.split(batch, self._steps, self._accumulate)
            read = inputs.read(batches, (self._steps > 1, self._accumulate > 1))
        except Exception as error:
            self._refuse(error)
        fsdp.reshard(self._step.subject.sharded)
        relaid = self._layout.changed()
        if self._baked is None:
            mine = RELAID if relaid else EAGER
            if RELAID in ([mine] if self._agreement is None else self._agreement.plans(len(batches), mine)[0]):
                self._begin_anew()
            if self._device.type == "cpu":
                optimizers.settle_on_cpu(self._step.optimizer)  # a state may have been loaded
            return self._for_good(read) if self._never else self._eagerly(read, "there are no graphs on CPUs")
        moved = self._baked.moved()
        if self._rates is not None and self._rates.settle() and not moved:
            moved = "the optimizer's state was replaced"
        if moved:
            self._record_anew(moved)  # now, since _plan() ends a call that another rank refuses
        if self._sizing is not None and self._sizing.is_over():
            self._resize(self._sizing)
        shape = self._shape_of(read)
        plan = self._plan(shape, len(batches), RELAID if relaid else MOVED if moved else None)
        if plan in (RELAID, MOVED):
            if plan == RELAID:
                self._begin_anew()
            else:
                self._record_anew(moved or "another rank's tensors are others than before")
            shape = self._shape_of(read)
            plan = self._plan(shape, len(batches))
        if plan == EAGER and not self._never:
            return self._warm(shape, read)
        if self._never or (shape.graph is None and not self._record(shape, read, len(batches))):
            return self._for_good(read)
        assert shape.graph is not None
        return self._replay(shape.graph, read, len(batches))

    def close(self) -> None:
        """Frees graphs and buckets, and restores a DistributedDataParallel. Collective if a group is ark's."""
        self._forget_graphs()
        self._closed, self._baked = True, None
        if self._step.buckets is not None:
            self._step.buckets.close()
            self._step.buckets = None
        if self._step.standby is not None:
            self._step.standby.close()
            self._step.standby = None
        if self._agreement is not None:
            self._agreement.close()

    def _refuse(self, error: Exception) -> NoReturn:
        """Ends an invalid call. All ranks hear of it where they tell their plans, and until then do the same."""
        if self._agreement is None or self._closed:
            raise error
        if self._sizing is not None and self._sizing.is_over():
            self._resize(self._sizing)
        self._agreement.plans(1, REFUSED)
        self._agreement.refuse(error)

    def _check_call(self) -> None:
        if self._closed:
            raise RuntimeError("ark: train.capture: the step was closed: call capture() again.")
        if not torch.is_grad_enabled():
            raise RuntimeError("ark: train.capture: step() under torch.no_grad(): a step needs gradients; leave it.")
        wrapper = self._step.subject.ddp
        if wrapper is not None and not wrapper.require_backward_grad_sync:
            raise RuntimeError(
                "ark: train.capture: step() under no_sync(): a step ends with an update; pass accumulate= to capture()."
            )

    def _begin_anew(self) -> None:
        """After a change of what is trained, on some rank: does as capture() does, with the parameters of now.

        Collective. Raises on all ranks if one of them cannot go on, or if they differ; so does the next call, then.
        """
        step, subject = self._step, self._step.subject
        layout = Layout(subject, step.optimizer)
        why = self._layout.why_not(layout)
        if not why:
            try:
                models.check_again(subject, step.max_norm is not None, step.scales, self._layout.trains_others(layout))
                optimizers.check(step.optimizer, list(layout.parameters.values()))
            except ValueError as error:
                why = str(error).removeprefix("ark: train.capture: ").removesuffix(".")
        replaced = self._layout.replaced(layout)
        if self._agreement is not None:
            why = self._agreement.whose(self._agreement.share(why))
        if why:
            raise RuntimeError(f"ark: train.capture: {why}.")
        if self._agreement is not None:
            self._agreement.compare(self._facts())
            told = self._agreement.share(json.dumps(replaced))
            models.same_weights(subject, {name for text in told for name in json.loads(text)})
        if step.buckets is not None:
            step.buckets.close()
            step.buckets = self._sizing = None
        self._make_buckets()
        self._layout = layout  # last: after an error, the next call begins anew again
        self._record_anew("the trained parameters are others than before")
        self._eager_calls, self._host_state = 0, ""

    def _record_anew(self, why: str) -> None:
        """Forgets graphs: each kind of call runs eagerly once more, which creates state that the optimizer lacks."""
        self._forget_graphs()
        self._shapes.clear()
        models.look_again(self._step.subject)
        if self._baked is not None:
            self._baked.refresh(by_step=False)
        self._options, self._why_anew = None, why

    # ---- Eager steps

    def _eagerly(self, read: inputs.Batch, reason: str) -> Tensor:
        self.captured, self.reason = False, reason
        recorder = None if self._never else self._recorder
        batches = read.filled(self._mover.moved(read.tensors, recorder.stream if recorder is not None else None))

        def body() -> list[Tensor]:
            return [self._step.run(micro_batches) for micro_batches in batches]

        try:
            losses = body() if recorder is None else recorder.warm(body)
        except BaseException:
            self._break_off()
            raise
        self._loss_dtype = losses[0].dtype
        self._settle()
        self._mover.wait()
        return torch.stack(losses) if self._steps > 1 else losses[0]

    def _for_good(self, read: inputs.Batch) -> Tensor:
        if self._never not in self._told:
            self._say(self._never)
        return self._eagerly(read, self._never)

    def _warm(self, shape: _Shape, read: inputs.Batch) -> Tensor:
        """An eager step that a capture may follow; from the last warm-up call on, host state is compared around it."""
        watched, first = self._eager_calls + 1 >= self._warmup, not shape.seen
        step = self._step
        before = reasons.HostState(step.subject.module, step.optimizer, self._device) if watched else None
        losses = self._eagerly(read, self._why_eager(shape))
        shape.seen = True
        self._eager_calls += 1
        why = before.changed(self._device) if before is not None else ""
        if why and first and self._eager_calls > self._warmup and not shape.filled:
            shape.filled, shape.seen = True, False  # a cache for this shape, perhaps: the next call tells
        elif why:
            self._host_state = why
        return losses

    def _settle(self) -> None:
        """After the host has run a step, which may have created tensors and changed attributes."""
        if self._step.subject.sharded:
            self._layout.settle()
        if self._baked is not None:
            self._baked.refresh()

    def _break_off(self) -> None:
        """After an error within a step: makes the next one possible."""
        fsdp.reset(self._step.subject.sharded)
        if self._step.subject.pipeline is not None:
            self._step.subject.pipeline.reset()

    # ---- The choice

    def _why_never(self) -> str:
        subject, step = self._step.subject, self._step
        if self._recorder is None or subject.reason:
            return subject.reason
        if self._device.type == "cuda":
            why = optimizers.why_not(step.optimizer, step.scales)
            if why:
                return why
            if subject.group is not None:
                name = subject.group._get_backend(self._device).name()
                if name.lower() == "gloo":
                    return "Gloo carries the group's CUDA tensors through the host: use the backend ark or nccl"
        return step.averaging.why_not() if step.averaging is not None else ""

    def _why_eager(self, shape: _Shape) -> str:
        if self._eager_calls < self._warmup:
            since = f": {self._why_anew}" if self._why_anew else ""
            return f"eager call {self._eager_calls + 1} of {self._warmup} before the first capture{since}"
        if not shape.seen:
            return self._why_changed or self._why_anew or "the first batch of this shape"
        return "another rank runs this call eagerly" if shape.graph or not self._full() else self._too_many()

    def _full(self) -> bool:
        return sum(one.graph is not None for one in self._shapes.values()) >= self._max_shapes

    def _shape_of(self, read: inputs.Batch) -> _Shape:
        assert self._baked is not None
        kind = self._device.type
        options = optimizers.numbers(self._step.optimizer, self._step.scaler)
        epoch, values = self._epoch, self._baked.key()
        self._epoch = self._baked.epoch
        if self._epoch != epoch:
            self._forget_graphs()
            self._shapes.clear()
        key = (read.key, values, options, (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)))
        self._note_change(options, key in self._shapes)
        if key not in self._shapes and len(self._shapes) >= 8 * self._max_shapes:
            self._say(
                self._why_changed
                or "batches have too many shapes and constants: pad to few lengths, and pass numbers as tensors"
            )
            self._shapes = {known: shape for known, shape in self._shapes.items() if shape.graph is not None}
        return self._shapes.setdefault(key, _Shape())

    def _note_change(self, options: optimizers.Numbers, known: bool) -> None:
        """Says so if options of the optimizer or attributes change with every call, so that none is captured."""
        assert self._baked is not None
        of_optimizer = optimizers.changed(self._options, options) if self._options is not None else ""
        self._why_changed = of_optimizer or self._baked.why_changed
        self._options = options
        self._changing = self._changing + 1 if self._why_changed and not known else 0
        if self._changing == self._warmup:
            self._say(self._why_changed)

    def _too_many(self) -> str:
        return f"more than max_shapes={self._max_shapes} shapes of batch: this one runs eagerly"

    def _plan(self, shape: _Shape, count: int, first: int | None = None) -> int:
        """What all ranks do in this call: EAGER, or a replay, after a capture if needed; or what must come `first` on
        some rank: RELAID or MOVED."""
        full, ready = self._full(), shape.seen and self._eager_calls >= self._warmup
        if ready and not shape.graph and full:
            self._say(self._too_many())
        mine = REPLAY if shape.graph else CAPTURE if ready and not full else EAGER
        if mine == CAPTURE and self._host_state:
            mine = FAILED
        mine = first or mine
        told, differ = [mine], False
        if self._agreement is not None:
            told, differ = self._agreement.plans(count, mine, shape.graph.digest if shape.graph is not None else 0)
        if max(told) >= MOVED:
            return max(told)
        if FAILED in told:
            self._give_up(self._host_state)
            return EAGER
        if EAGER in told:
            return EAGER
        if CAPTURE in told:
            if mine == REPLAY and not self._settle_captures("", shape.graph):
                return EAGER
        elif differ:
            self._give_up(self._difference(shape.graph))
            return EAGER
        return mine

    # ---- Graphs

    def _record(self, shape: _Shape, read: inputs.Batch, count: int) -> bool:
        """Captures this call. Returns False, with all state restored, if some rank cannot capture it."""
        assert self._recorder is not None
        before, why = Before(self._step), ""
        try:
            shape.graph = self._recorded(self._recorder, read, count)
        except Exception as error:
            why = reasons.of(error)
        finally:
            if shape.graph is None:
                self._break_off()
                before.restore()
            before.restore_host()
            if self._baked is not None:
                self._baked.refresh()
        captured = shape.graph is not None
        if self._settle_captures(why, shape.graph):
            return True
        if captured:
            before.restore()
        return False

    def _recorded(self, recorder: graphs.Recorder, read: inputs.Batch, count: int) -> _Graph:
        step = self._step
        static = inputs.Static(read, self._device)
        self._mover.staged(read.tensors, static)
        losses = torch.zeros(count, dtype=self._loss_dtype, device=self._device)
        if step.averaging is not None:
            step.averaging.prepare(self._device)

        def body() -> None:
            passes = Watch()
            for number, micro_batches in enumerate(static.views()):
                losses[number].copy_(step.run(micro_batches, passes))

        sums = step.buckets.sums if step.buckets is not None else None
        group = step.subject.group
        alike = step.subject.pipeline is None
        watch = held.Watch(group, self._device, counts=alike) if group is not None else None
        with sums.recording(count) if sums is not None else contextlib.nullcontext():
            with scope.captures_step(group, self._device):
                recording = recorder.record(body)
            graph = _Graph(recording, static, losses)
        if watch is not None:
            graph.held = watch.held()
            graph.digest = held.digest(graph.held)
        return graph

    def _settle_captures(self, why: str, graph: _Graph | None) -> bool:
        """Whether the capture succeeded on all ranks that tried, with the same collectives in each graph."""
        if self._agreement is None:
            if why:
                self._give_up(why)
            return not why
        digest = graph.digest if graph is not None else 0
        values = self._agreement.everyone(digest << 31 | (FAILED if why else REPLAY))
        if FAILED in [value % KINDS for value in values]:
            self._give_up(why)
            return False
        if len(set(values)) > 1:
            self._give_up(self._difference(graph))
            return False
        return True

    def _difference(self, graph: _Graph | None) -> str:
        """What this call's graphs hold on one rank and not on another."""
        assert self._agreement is not None and graph is not None
        return held.difference([json.loads(text) for text in self._agreement.share(json.dumps(graph.held))])

    def _give_up(self, why: str) -> None:
        """Stops capturing on all ranks; `why` is this rank's own reason, or ""."""
        if self._agreement is not None:
            why = self._agreement.whose(self._agreement.share(why))
        self._forget_graphs()
        self._never, self._baked = why, None

    def _replay(self, graph: _Graph, read: inputs.Batch, count: int) -> Tensor:
        self._mover.staged(read.tensors, graph.static)
        if self._step.averaging is not None:
            self._step.averaging.before_replay(count)
        if self._sizing is not None:
            self._sizing.replay(read.key, count, graph.recording.replay)
        else:
            graph.recording.replay()
        if self._step.buckets is not None and self._step.buckets.sums is not None:
            self._step.buckets.sums.count_replay(count)
        self._step.optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers look at
        losses = graph.losses.clone()
        self._mover.wait()
        self.captured, self.reason, self._why_anew = True, "", ""
        return losses if self._steps > 1 else losses[0]

    def _resize(self, sizes: sizing.Sizing) -> None:
        """Goes on to the next size of buckets, on all ranks."""
        before, buckets = sizes.mb, self._step.buckets
        sizes.next()
        if sizes.mb != before and buckets is not None:
            self._forget_graphs()
            buckets.resize(int(sizes.mb * MB))
        if sizes.done:
            self._sizing = None

    def _forget_graphs(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # some may still run
        for shape in self._shapes.values():
            if shape.graph is not None:
                shape.graph.recording.reset()
                shape.graph = None

    # ---- Messages

    def _say(self, reason: str) -> None:
        if reason and reason not in self._told:
            self._told.add(reason)
            warnings.warn(f"ark: train.capture runs steps eagerly: {reason}.", stacklevel=4)

    def _facts(self) -> dict[str, str]:
        options = {
            "steps": str(self._steps),
            "accumulate": str(self._accumulate),
            "warmup": str(self._warmup),
            "max_shapes": str(self._max_shapes),
            "bucket_mb": "auto" if self._mb is None else str(float(self._mb)),
        }
        return facts_of(self._step, options)

    def _agree(self) -> None:
        assert self._agreement is not None
        self._agreement.compare(self._facts() | of_buffers(self._step.subject))
        told = self._agreement.share(self._never)
        self._never = self._agreement.whose(told)
