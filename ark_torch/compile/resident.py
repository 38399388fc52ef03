"""ark_torch.resident: N steps from one launch of a loop kernel, each on the state that the previous one left.

The loop is in the graph: a step's results are copied over its arguments, what is kept goes to row `counter` of a tensor
with a row per step, and noise and the like come from such rows. All state is in tensors, so N steps are the same tasks
N times, ordered by counters that only grow: steps are separated only by what they wait for. If a step is not one ark
region, it is called N times from Python, and the report and the log say why.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ark_torch.compile import options as table
from ark_torch.compile.backend import compile_graph
from ark_torch.compile.build import NotOneRegion
from ark_torch.compile.report import Report, log
from ark_torch.errors import UnsupportedGraph

_FEWEST_ROWS = 64


class Steps(NamedTuple):
    """What a launch has done."""

    kept: tuple[Tensor, ...]  # for each of `keep`, [done, *shape]
    state: tuple[Tensor, ...]  # the last step's results
    done: int


class Resident:
    """Steps that feed each other, run by one launch.

        def step(token, position):
            logits = model(token, position)
            return logits.argmax(-1, keepdim=True), position + 1

        loop = ark_torch.resident(step, stop=lambda token, position: token == end_of_text)
        tokens = loop(token, position, steps=50).kept[0]

    step:    a function of tensors that returns as many as it takes; result i, with the shape and type of argument i, is
             argument i of the next step. Models and caches (updated in place) belong to the function, as in any
             function passed to torch.compile.
    keep:    the results to keep of every step; by default 0, the first.
    stop:    a function of a step's results that returns a tensor of one element; no step follows if it is true. With
             collectives in the step it must be the same on all ranks.
    options: as in torch.compile(backend="ark", options=...). With {"fallback": False}, a step that is not one ark
             region is an error; otherwise it is launched once per step, and `reason` says why.

    loop(*state, steps=N, inputs=(...)) runs at most N steps, without gradients. The tensors of `state` are not
    modified. `inputs` have a row per step, [N, ...], and step(*state, *rows) gets its own, for example noise for
    sampling:

        def step(token, position, noise):
            logits = model(token, position) / temperature + noise
            return logits.argmax(-1, keepdim=True), position + 1

        noise = -torch.empty(50, 1, vocabulary).exponential_().log()  # Gumbel noise: follows torch.manual_seed
        tokens = loop(token, position, steps=50, inputs=(noise,)).kept[0]

    Ctrl-C ends a launch between two tasks with KeyboardInterrupt, and the in-place writes of the step in flight are
    then partial; on a GPU that step is finished. It aborts groups with collectives in the step: other ranks raise an
    error that names this one, instead of waiting for it. On a GPU, too, a call returns when its steps are done.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        *,
        keep: Sequence[int] = (0,),
        stop: Callable[..., Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._options = table.parse(None, options)
        self._given_options = dict(options or {})
        self._step, self._stop, self._keep = step, stop, tuple(keep)
        self.report = Report()  # of the step's graph, once compiled
        self.reason = ""  # why each step is a separate launch; "": it is not
        self._now = threading.local()
        self._loop: Callable[..., Any] | None = None
        self._single: Callable[..., Any] | None = None

    def __repr__(self) -> str:
        compiled = self._loop is not None or self._single is not None
        how = f"step by step: {self.reason}" if self.reason else "many steps a launch" if compiled else "not called yet"
        return f"<ark_torch.resident of {getattr(self._step, '__qualname__', type(self._step).__name__)}, {how}>"

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def __call__(self, *state: Tensor, steps: int, inputs: Sequence[Tensor] = ()) -> Steps:
        self._check(state, steps, inputs)
        own = [tensor.clone(memory_format=torch.contiguous_format) for tensor in state]
        # A power of two, so that few lengths need their own kernel.
        capacity = max(_FEWEST_ROWS, 1 << max(steps - 1, 0).bit_length())
        kept = [own[i].new_zeros((capacity, *own[i].shape)) for i in self._keep]
        done = 0
        if steps > 0 and not self.reason:
            done = self._launch(own, [_rows(tensor, capacity) for tensor in inputs], kept, steps)
        if steps > 0 and self.reason:
            done, own = self._one_by_one(own, inputs, kept, steps)
        return Steps(tuple(tensor[:done] for tensor in kept), tuple(own), done)

    def _check(self, state: Sequence[Tensor], steps: int, inputs: Sequence[Tensor]) -> None:
        if steps < 0:
            raise ValueError(f"steps is {steps}; it takes 0 or more")
        for what, tensors in (("state", state), ("inputs", inputs)):
            for i, tensor in enumerate(tensors):
                if not isinstance(tensor, Tensor):
                    raise TypeError(f"{what}[{i}] is {type(tensor).__name__}, not a tensor")
        for i, tensor in enumerate(inputs):
            if tensor.dim() == 0 or tensor.shape[0] < steps:
                raise ValueError(f"inputs[{i}] has the shape {list(tensor.shape)}; it takes a row for each of {steps}")
        for i in self._keep:
            if not 0 <= i < len(state):
                raise ValueError(f"keep names result {i} of {len(state)}")

    def _launch(self, own: list[Tensor], rows: list[Tensor], kept: list[Tensor], steps: int) -> int:
        """Returns 0, with the reason set, if one launch is not possible."""
        if self._loop is None:
            loop = _loop_body(self._step, self._stop, self._keep)
            self._loop = torch.compile(loop, backend=self._compile, fullgraph=True, dynamic=False)
        self._now.most, self._now.done = steps, 0
        device = next((tensor.device for tensor in (*own, *rows)), None)
        counter = torch.zeros(1, dtype=torch.int64, device=device)
        flag = torch.zeros(1, dtype=torch.bool, device=device)
        try:
            self._loop(own, rows, kept, counter, flag)
        except torch._dynamo.exc.Unsupported as error:
            self._cannot(f"it is not one graph ({_first_line(error)})", error)
        except Exception as error:
            reason = _find(error, NotOneRegion, UnsupportedGraph)
            if reason is None:
                raise
            self._cannot(str(reason), error)
        return int(self._now.done)

    def _cannot(self, reason: str, error: Exception) -> None:
        self.reason = reason
        if not self._options.fallback:
            raise UnsupportedGraph(
                f'options={{"fallback": False}}, and steps cannot share a launch: {reason}.'
            ) from error
        log.warning("Each step of a loop is a launch of its own: %s.", reason)

    def _compile(self, graph_module: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.report.graphs.clear()
        return compile_graph(graph_module, example_inputs, self._options, self.report, self._launch_region)

    def _launch_region(self, region: Any, inputs: list[Any]) -> Sequence[Any]:
        self._now.done = region.steps(inputs, self._now.most)
        return ()

    def _one_by_one(
        self, state: list[Tensor], inputs: Sequence[Tensor], kept: list[Tensor], steps: int
    ) -> tuple[int, list[Tensor]]:
        if self._single is None:
            self._single = torch.compile(self._step, backend="ark", options=self._given_options)
        done = 0
        while done < steps:
            results = _results(self._single(*state, *(tensor[done] for tensor in inputs)), state)
            for place, i in zip(kept, self._keep, strict=True):
                place[done] = results[i]
            state = results
            done += 1
            if self._stop is not None and bool(_one(self._stop(*results))):
                break
        return done, state


def _loop_body(step: Callable[..., Any], stop: Callable[..., Any] | None, keep: tuple[int, ...]) -> Callable[..., None]:
    from ark_torch.compile.operators import loop  # registers ark_torch::stop

    del loop

    def body(state: list[Tensor], rows: list[Tensor], kept: list[Tensor], counter: Tensor, flag: Tensor) -> None:
        given = [tensor.index_select(0, counter).squeeze(0) for tensor in rows]
        results = _results(step(*state, *given), state)
        for place, i in zip(kept, keep, strict=True):
            place.index_copy_(0, counter, results[i].unsqueeze(0))
        if stop is not None:
            flag.copy_(torch.ops.ark_torch.stop(_one(stop(*results))))
        counter.add_(1)
        # A result that is another argument of this step is copied before that argument is written.
        moved = [r.clone() if any(r is other for other in state) else r for r in results]
        for i, tensor in enumerate(state):
            if results[i] is not tensor:
                tensor.copy_(moved[i])

    # Dynamo counts compilations per code object, so each loop gets its own.
    return types.FunctionType(body.__code__.replace(), body.__globals__, "body", None, body.__closure__)


def _results(returned: Any, state: Sequence[Tensor]) -> list[Tensor]:
    """A step's results as arguments of the next one."""
    results = [returned] if isinstance(returned, Tensor) else list(returned)
    if len(results) != len(state):
        raise TypeError(f"a step returns as many tensors as it takes, {len(state)}, not {len(results)}")
    for i, (result, argument) in enumerate(zip(results, state, strict=True)):
        if result.shape != argument.shape or result.dtype != argument.dtype:
            raise TypeError(
                f"result {i} of a step is {result.dtype} {list(result.shape)}, and the next step takes "
                f"{argument.dtype} {list(argument.shape)} in its place"
            )
    return results


def _one(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise TypeError("stop returns a tensor of one element (.all() or .any() makes one of several)")
    return value.reshape(1) != 0


def _rows(tensor: Tensor, capacity: int) -> Tensor:
    """The tensor extended or cut to `capacity` rows."""
    if tensor.shape[0] >= capacity:
        return tensor[:capacity].contiguous()
    return torch.cat([tensor, tensor.new_zeros((capacity - tensor.shape[0], *tensor.shape[1:]))])


def _find(error: BaseException | None, *kinds: type[Exception]) -> BaseException | None:
    """The first error of these kinds in the chain: Dynamo wraps what a backend raises."""
    while error is not None and not isinstance(error, kinds):
        error = error.__cause__ or error.__context__
    return error


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
