"""A trial call of a user's model that leaves everything as it was: the basis of `ark_torch.explain`.

Before the call it saves the attributes and containers of all objects that the model and its arguments hold, the memory
of all their tensors except parameters, and the random number generators. Parameters are large and rarely written; a
graph that writes some has them saved before it runs (`save_written`). Versions are restored too, or the user's own
gradient would complain of a change that was undone. Of torch._dynamo, its knowledge of sizes and its cache entries are
restored (`compiling_apart`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import random
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Objects that belong to the process, not to a model that happens to hold them.
_FOREIGN = (
    "asyncio",
    "builtins",
    "concurrent",
    "importlib",
    "inspect",
    "io",
    "logging",
    "multiprocessing",
    "threading",
)


class Unchanged:
    """A context that restores `roots`, and all that they hold, to their state on entry."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self.modules: list[nn.Module] = []
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: dict[int, tuple[Tensor, int | None]] = {}  # each with its version
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._stack = contextlib.ExitStack()
        self._walk(roots)

    def __enter__(self) -> Unchanged:
        parameters = {
            tensor.untyped_storage()._cdata for tensor, _ in self._plain() if isinstance(tensor, nn.Parameter)
        }
        for tensor, _ in self._plain():
            if tensor.untyped_storage()._cdata not in parameters:
                self._save(tensor)
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        devices = list(range(torch.cuda.device_count())) if cuda else []
        self._stack.enter_context(torch.random.fork_rng(devices))
        self._stack.callback(random.setstate, random.getstate())
        return self

    def __exit__(self, *_: object) -> None:
        for container, saved in self._containers:
            if not _same(container, saved):
                container.clear()
                (container.extend if isinstance(container, list | deque) else container.update)(saved)
        for storage, saved_bytes in self._storages.values():
            storage.copy_(saved_bytes)
        for tensor, version in self._tensors.values():
            if version is not None and tensor._version != version:
                torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
        self._stack.close()

    def save_written(self, graph_module: GraphModule, inputs: Sequence[Any]) -> None:
        """Saves what a graph of torch._dynamo will write, found by running it on fake tensors."""
        written = _written(graph_module)
        for i, given in enumerate(inputs):
            if isinstance(given, Tensor) and (written is None or i in written):
                self._walk([given])
                self._save(given)

    def changed_parameters(self) -> int:
        """The number of unsaved tensors that were written: code between graphs wrote parameters."""
        return sum(
            version is not None and tensor._version != version
            for tensor, version in self._plain()
            if tensor.untyped_storage()._cdata not in self._storages
        )

    def _plain(self) -> Iterator[tuple[Tensor, int | None]]:
        for tensor, version in self._tensors.values():
            if tensor.layout == torch.strided and tensor.device.type != "meta":
                yield tensor, version

    def _save(self, tensor: Tensor) -> None:
        for part in _parts(tensor):
            if part.layout == torch.strided and part.device.type != "meta":
                storage = part.untyped_storage()
                if storage._cdata not in self._storages:
                    self._storages[storage._cdata] = (storage, storage.clone())  # type: ignore[no-untyped-call]

    def _walk(self, roots: Iterable[Any]) -> None:
        left, seen = list(roots), {id(container) for container, _ in self._containers}
        while left:
            one = left.pop()
            if id(one) in seen or id(one) in self._tensors:
                continue
            seen.add(id(one))
            if isinstance(one, Tensor):
                for part in _parts(one):
                    self._tensors[id(part)] = (part, None if part.is_inference() else part._version)
            elif isinstance(one, list | dict | set | deque):
                self._containers.append((one, copy.copy(one)))
                left += one.values() if isinstance(one, dict) else one
            elif isinstance(one, tuple | frozenset):
                left += one
            elif isinstance(one, functools.partial):
                left += [one.func, one.args, one.keywords]
            elif isinstance(one, types.MethodType):
                left += [one.__self__, one.__func__]
            elif isinstance(one, types.FunctionType):
                left += _held_by(one)
            elif isinstance(one, nn.Module):
                self.modules.append(one)
                left.append(vars(one))
            elif hasattr(one, "__dict__") and not _foreign(one):
                left.append(vars(one))


def _parts(tensor: Tensor) -> list[Tensor]:
    """The tensors that have the memory: those inside a wrapper (such as DTensor), or the tensor itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [part for name in names for part in _parts(getattr(tensor, name))]


def _held_by(function: types.FunctionType) -> Iterator[Any]:
    """The values of a function's variables: its closure, its defaults, and global models and tensors."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not assigned yet
            yield cell.cell_contents
    yield from function.__defaults__ or ()
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, nn.Module | Tensor):
            yield value


def _foreign(one: Any) -> bool:
    package = type(one).__module__.partition(".")[0]
    return isinstance(one, type | types.ModuleType) or package in _FOREIGN or package == "torch"


def _same(container: Any, saved: Any) -> bool:
    if len(container) != len(saved):
        return False
    if isinstance(container, set):
        return bool(container == saved)
    if isinstance(container, dict):
        return all(key in saved and saved[key] is value for key, value in container.items())
    return all(a is b for a, b in zip(container, saved, strict=True))


def _written(graph_module: GraphModule) -> set[int] | None:
    """Positions of the arguments that a graph writes; None if a run on fake tensors cannot tell."""
    fakes = [node.meta.get("example_value") for node in graph_module.graph.nodes if node.op == "placeholder"]
    mode = torch._guards.detect_fake_mode(fakes)
    if mode is None:
        return None
    try:
        with mode, torch.no_grad():
            trial = [fake.clone() if isinstance(fake, Tensor) else fake for fake in fakes]
            before = [fake._version if isinstance(fake, Tensor) else 0 for fake in trial]
            graph_module(*trial)
            return {i for i, fake in enumerate(trial) if isinstance(fake, Tensor) and fake._version != before[i]}
    except Exception:  # no fake kernel, or tensors' values are needed: then all count as written
        return None


@contextlib.contextmanager
def compiling_apart(backend: Callable[..., Any]) -> Iterator[Callable[[Any], Any]]:
    """Yields torch.compile with this backend and no memory of earlier calls; what torch._dynamo keeps of it is removed
    afterwards. If the owner compiles the same function too, that requires isolate_recompiles (PyTorch 2.13 and later):
    before, our entries stay next to theirs, and count towards Dynamo's recompile limit."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
    from torch._dynamo import convert_frame, pgo
    from torch._dynamo.utils import counters

    sizes = getattr(pgo, "_CODE_STATE", None)
    pgo._CODE_STATE = None  # otherwise a size that differs from the owner's last call would count as dynamic
    counted = {name: Counter(of) for name, of in counters.items()}
    known = "isolate_recompiles" in inspect.signature(torch.compile).parameters
    more: dict[str, Any] = {"isolate_recompiles": True} if known else {}
    try:
        yield lambda function: torch.compile(function, backend=backend, **more)
    finally:
        pgo._CODE_STATE = sizes
        counters.clear()
        counters.update(counted)
        for reference in list(convert_frame.input_codes.seen):
            code = reference()
            if code is None:
                continue
            entries = _debug_get_cache_entry_list(code)
            if entries and all(_backend_of(entry) is backend for entry in entries):
                reset_code(code)


def _backend_of(entry: Any) -> Any:
    found = getattr(entry, "backend", None)
    return getattr(found, "compiler_fn", found)  # torch.compile wraps it
