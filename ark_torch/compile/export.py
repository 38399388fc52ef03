"""ark_torch.export() and ark_torch.load(): one call of a model, compiled here, run by a process without a compiler.

The file is PyTorch's own (torch.compiler.load_compiled_function reads it, too); this spares what its interface asks
for: an option of 2.11's, the bound forward pass, and the model as the first argument of what is loaded. Behind it
stand a checksum and the versions (program_file.py).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ark_torch.compile import program_file
from ark_torch.errors import CompileError


def _interface() -> Any:
    """Within it PyTorch compiles ahead of time. Raises CompileError if this PyTorch cannot."""
    if not hasattr(torch.compiler, "load_compiled_function"):
        raise CompileError(
            f"PyTorch {torch.__version__} saves no compiled programs; it takes torch.compiler's "
            "load_compiled_function, which newer ones have"
        )
    import torch._dynamo.config as config

    return config.patch(enable_aot_compile=True) if hasattr(config, "enable_aot_compile") else contextlib.nullcontext()


def export(
    model: Callable[..., Any],
    args: Sequence[Any],
    path: str | os.PathLike[str],
    kwargs: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> None:
    if not callable(model):
        raise TypeError(f"export: model is a {type(model).__name__}, not a module or a function")
    if isinstance(args, (str, torch.Tensor)) or not isinstance(args, Sequence):
        raise TypeError(f"export: args is a {type(args).__name__}, not a tuple of the call's arguments: write (x,)")
    if not isinstance(kwargs or {}, Mapping):
        raise TypeError(f"export: kwargs is a {type(kwargs).__name__}, not a dictionary of the call's named arguments")
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"export: path names a folder that is not there: {target.parent}")
    if target.is_dir():
        raise IsADirectoryError(f"export: path is a folder, not a file to write: {target}")
    with _interface(), torch.no_grad():
        compiled: Any = torch.compile(
            model,
            backend="ark",
            fullgraph=True,
            dynamic=False,
            options={"choose": "ark", "minimum": 1, **(options or {})},
        )
        function = compiled.forward if isinstance(model, nn.Module) else compiled
        try:
            program = function.aot_compile((tuple(args), dict(kwargs or {})))
        except CompileError:
            raise
        except Exception as error:  # from what pickles guards: PyTorch, or a tensor subclass
            raise _unsavable(model) or error from error
        written = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            program.save_compiled_function(str(written), **_outside(model, program.save_compiled_function))
            program_file.seal(written)
            written.replace(target)
        finally:
            written.unlink(missing_ok=True)


def _unsavable(model: object) -> CompileError | None:
    """What PyTorch cannot pickle of a model to compare others with, and what helps; None: nothing known."""
    parts = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
    held = {
        f"{name}.{key}".lstrip("."): type(one).__name__
        for name, part in parts.items()
        for key, one in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
        if is_traceable_wrapper_subclass(one)
    }
    if held:
        name, kind = next(iter(held.items()))
        return CompileError(
            f"export: PyTorch does not save programs of models that hold a {kind} ({name}): keep codes and scales as "
            "plain buffers, as examples/llama/quantized.py does, or compile the model where it runs"
        )
    for name, part in parts.items():
        if is_parametrized(part):
            return CompileError(
                f"export: PyTorch does not save programs of parametrized modules ({name}): call "
                "torch.nn.utils.parametrize.remove_parametrizations first"
            )
    return None


def _outside(model: object, interface: Callable[..., Any]) -> dict[str, Any]:
    """The module and its parts by name: a program that holds one is saved without it, and loaded with the caller's.
    The first PyTorch to save programs has no such argument, and refuses these."""
    if not isinstance(model, nn.Module) or "external_data" not in inspect.signature(interface).parameters:
        return {}
    return {"external_data": {f"model.{name}": part for name, part in model.named_modules()}}


def _other_call(path: str | os.PathLike[str], error: RuntimeError) -> RuntimeError | None:
    """What PyTorch says of a call that the program was not compiled for, in a sentence; None: it is another error."""
    text = str(error)
    if not text.startswith("GuardManager check failed"):
        return None
    found = re.search(r"verbose_code_parts=\[(.*?)\],\n", text, re.DOTALL)
    why = re.sub(r"\s+", " ", found[1].strip("\"' ")) if found else text
    return RuntimeError(
        f"load: {os.fspath(path)} was exported for other arguments, another kind of model or other settings: {why}. "
        "Export it for this call, too"
    )


def load(path: str | os.PathLike[str], model: nn.Module | None = None) -> Callable[..., Any]:
    lacking = (
        f"load: {os.fspath(path)} was made of a module: give one of its kind, whose parameters it takes, as `model`"
    )
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"load: model is a {type(model).__name__}, not a module")
    content, whole = program_file.opened(path)
    with _interface():
        try:
            function: Any = torch.compiler.load_compiled_function(
                io.BytesIO(content), **_outside(model, torch.compiler.load_compiled_function)
            )
        except CompileError:
            raise
        except Exception as error:  # a damaged pickle raises anything
            if isinstance(error, RuntimeError) and "external reference" in str(error):
                if model is None:
                    raise TypeError(lacking) from None
                raise
            if whole:
                raise
            raise program_file.unreadable(path) from error
    # The module is the first argument, or is held by what PyTorch wrapped around a module of its own.
    is_first = next(iter(function._artifacts.signature.parameters), "") == "self"
    if is_first and model is None:
        raise TypeError(lacking)
    bound = functools.partial(function, model) if is_first else function

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            try:
                return bound(*args, **kwargs)
            except RuntimeError as error:
                raise _other_call(path, error) or error from None

    return run
